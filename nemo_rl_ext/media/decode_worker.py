# SPDX-License-Identifier: Apache-2.0
"""The child process that decodes video: `python -m nemo_rl_ext.media.decode_worker`.

Decoders are C libraries that may hang or crash on a damaged file; here they take only this process with them.
Requests are JSON lines on standard input; a reply is a JSON line on standard output, followed by the frames as
raw bytes where it has a `shape`. The parent's side is `nemo_rl_ext.media.decoding`.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from nemo_rl_ext.media.sampling import sample_frames

# Address space, so that a bomb of a file ends in an error here rather than in the machine's memory.
_MAX_BYTES = 16 << 30
_ATTEMPTS = 3


class Reader(Protocol):
    """One opened clip. Methods raise whatever the library raises."""

    num_frames: int
    """As the container declares it."""
    fps: float

    def size(self) -> tuple[int, int]:
        """`(height, width)` in pixels."""
        ...

    def read(self, indices: Sequence[int]) -> np.ndarray:
        """uint8 `[frames, height, width, 3]`, RGB."""
        ...

    def read_alone(self, index: int) -> np.ndarray | None:
        """One frame by a fresh decoder, or None when it cannot be decoded."""
        ...


class DecordReader:
    """decord (the maintained `decord2`), one thread: bit-equal to the engine's OpenCV on the same FFmpeg."""

    def __init__(self, path: str) -> None:
        import decord

        self._open: Callable[[], Any] = lambda: decord.VideoReader(path, num_threads=1)
        self._reader = self._open()
        self.num_frames = len(self._reader)
        self.fps = float(self._reader.get_avg_fps())

    def size(self) -> tuple[int, int]:
        first = self._reader[0]
        self._padded = first.shape[2] != 3
        return int(first.shape[0]), int(first.shape[1])

    def read(self, indices: Sequence[int]) -> np.ndarray:
        if self._padded:
            return np.stack([_without_padding(self._reader[index].asnumpy()) for index in indices])
        batch: np.ndarray = self._reader.get_batch(list(indices)).asnumpy()
        return batch

    def read_alone(self, index: int) -> np.ndarray | None:
        # Its decoding thread runs ahead and may meet the damage first, or later: one failure proves nothing.
        for _ in range(_ATTEMPTS):
            try:
                return _without_padding(self._open()[index].asnumpy())
            except Exception as error:
                if "bound" in str(error).lower():
                    return None
        return None


def _without_padding(frame: np.ndarray) -> np.ndarray:
    """decord takes the padded rows of a clip that is turned by its metadata for a fourth channel."""
    height, width, depth = frame.shape
    return frame if depth == 3 else frame.reshape(height, -1)[:, : width * 3].reshape(height, width, 3)


class TorchcodecReader:
    """torchcodec, where its wheel loads; exact seeking, as in vLLM and NeMo-RL."""

    def __init__(self, path: str) -> None:
        from torchcodec.decoders import VideoDecoder

        self._open: Callable[[], Any] = lambda: VideoDecoder(
            path, dimension_order="NHWC", num_ffmpeg_threads=1, seek_mode="exact"
        )
        self._reader = self._open()
        metadata = self._reader.metadata
        self.num_frames = int(metadata.num_frames or 0)
        self.fps = float(metadata.average_fps or 0.0)

    def size(self) -> tuple[int, int]:
        metadata = self._reader.metadata
        return int(metadata.height or 0), int(metadata.width or 0)

    def read(self, indices: Sequence[int]) -> np.ndarray:
        frames: np.ndarray = self._reader.get_frames_at(indices=list(indices)).data.numpy()
        return frames

    def read_alone(self, index: int) -> np.ndarray | None:
        try:
            frame: np.ndarray = self._open().get_frame_at(index).data.numpy()
        except (RuntimeError, IndexError):
            return None
        return frame


READERS: dict[str, Callable[[str], Reader]] = {"decord": DecordReader, "torchcodec": TorchcodecReader}


def decode(request: dict[str, Any]) -> tuple[dict[str, Any], np.ndarray | None]:
    """The reply to one request, and the frames unless only the header was asked for."""
    reader = READERS[request["backend"]](request["path"])
    height, width = reader.size()
    if height * width > request["max_pixels"]:
        return {
            "error": f"its frames are {height}x{width}, over the limit of {request['max_pixels']} pixels"
        }, None
    total = reader.num_frames
    if total < 1:
        return {"error": "it declares no frames"}, None
    reply: dict[str, Any] = {
        "fps": reader.fps,
        "size": [height, width],
        "declared_num_frames": total,
        "total_num_frames": total,
    }
    if request["probe"]:
        return reply, None
    if request["frame_indices"] and max(request["frame_indices"]) >= total:
        return {
            "error": f"frame {max(request['frame_indices'])} was asked for, but it has {total} frames"
        }, None
    chosen = _choose(request, total, reader.fps)
    try:
        frames = reader.read(chosen)
    except Exception:
        total = _decodable_frames(reader, total)
        if not total:
            return {"error": "not one of its frames can be decoded"}, None
        reply["total_num_frames"] = total
        chosen = _choose(request, total, reader.fps)
        alone = [reader.read_alone(index) for index in chosen]
        found = [frame for frame in alone if frame is not None]
        if len(found) < len(chosen):
            missing = next(index for index, frame in zip(chosen, alone, strict=True) if frame is None)
            return {"error": f"frame {missing} cannot be decoded, of {total} that should be there"}, None
        frames = np.stack(found)
    frames = np.ascontiguousarray(frames)
    if frames.dtype != np.uint8 or frames.ndim != 4 or frames.shape[0] != len(chosen) or frames.shape[3] != 3:
        return {"error": f"the decoder gave {frames.dtype} frames of shape {list(frames.shape)}"}, None
    return reply | {"shape": list(frames.shape), "frame_indices": list(chosen)}, frames


def _choose(request: dict[str, Any], total: int, fps: float) -> tuple[int, ...]:
    if request["frame_indices"] is not None:
        return tuple(request["frame_indices"])
    return sample_frames(
        total,
        request["num_frames"],
        temporal_patch_size=request["temporal_patch_size"],
        fps=fps,
        style=request["style"],
    )


def _decodable_frames(reader: Reader, declared: int) -> int:
    """How many leading frames decode, when the container promises more than it holds."""
    if reader.read_alone(0) is None:
        return 0
    good, bad = 0, declared
    while bad - good > 1:
        middle = (good + bad) // 2
        if reader.read_alone(middle) is None:
            bad = middle
        else:
            good = middle
    return good + 1


def main() -> None:
    """Serve requests until standard input closes."""
    # Libraries print to standard output as they please; replies get a descriptor of their own.
    with os.fdopen(os.dup(1), "wb") as replies:
        os.dup2(2, 1)
        # decord gives up after this many turns of a busy loop, which a loaded machine exhausts on healthy files;
        # the parent's clock decides instead.
        os.environ["DECORD_EOF_RETRY_MAX"] = str(1 << 30)
        resource.setrlimit(resource.RLIMIT_AS, (_MAX_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))
        for line in sys.stdin.buffer:
            request = json.loads(line)
            # The default action kills, wherever a library hangs; this only matters once the parent is gone.
            signal.alarm(int(request["timeout_s"]) + 5)
            try:
                reply, frames = decode(request)
            except Exception as error:
                first_line = (str(error).strip().splitlines() or [""])[0]
                reply, frames = {"error": f"{type(error).__name__}: {first_line[:300]}"}, None
                if isinstance(error, ImportError):
                    reply["missing"] = request["backend"]
            signal.alarm(0)
            replies.write(json.dumps(reply).encode() + b"\n")
            if frames is not None:
                replies.write(frames.data.cast("B"))
            replies.flush()


if __name__ == "__main__":
    main()
