# SPDX-License-Identifier: Apache-2.0
"""The child process that decodes clips: `python -m nemo_rl_ext.media.decode_worker DESCRIPTOR`.

Decoders are C libraries that may hang or crash on a damaged file; here they take only this process with them. The
descriptor is one end of a `multiprocessing.connection`. A request is a JSON message and the clip's open file; a reply
is a JSON message, followed by the frames' bytes where it has a `shape`. The parent's side is `media.decoding`.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from typing import Any, BinaryIO

import numpy as np

from nemo_rl_ext.media.clip_readers import CAPTURE_OPTIONS, READERS, ClipError, EndOfClip, Messages
from nemo_rl_ext.media.sampling import sample_frames

# Address space, so that a bomb of a file ends in an error here rather than in the machine's memory.
_MAX_BYTES = 16 << 30

Reply = tuple[dict[str, Any], np.ndarray | None]


def decode(request: dict[str, Any], clip: BinaryIO, messages: Messages) -> Reply:
    """The reply to one request, and the frames unless only the header was asked for."""
    if request["backend"] not in READERS:
        raise ClipError(f"expected a video backend of {', '.join(READERS)}, found {request['backend']!r}")
    reader = READERS[request["backend"]](clip, messages, request["max_pixels"])
    if reader.num_frames < 1:
        raise ClipError("the engine's loader counts no frames in it")
    reply: dict[str, Any] = {
        "fps": reader.fps,
        "size": list(reader.size),
        "declared_num_frames": reader.num_frames,
    }
    if request["probe"]:
        return reply, None
    total, wanted = reader.num_frames, request["frame_indices"]
    if wanted and max(wanted) >= total:
        raise ClipError(f"frame {max(wanted)} was asked for, but it has {total} frames")
    chosen = wanted or _sampled(request, total, reader.fps)
    try:
        frames = reader.read(chosen)
    except EndOfClip as end:
        total = end.num_frames
        if wanted:
            raise ClipError(
                f"frame {max(wanted)} cannot be decoded, of {reader.num_frames} that should be there; {total} can"
            ) from None
        chosen = _sampled(request, total, reader.fps)
        frames = reader.read(chosen)
    frames = np.ascontiguousarray(frames)
    if frames.dtype != np.uint8 or frames.shape[1:] != (*reader.size, 3):
        raise ClipError(f"the decoder gave {frames.dtype} frames of shape {list(frames.shape)}")
    return reply | {
        "shape": list(frames.shape),
        "frame_indices": list(chosen),
        "total_num_frames": total,
        "time_error_s": reader.time_error(),
    }, frames


def _sampled(request: dict[str, Any], total: int, fps: float) -> Sequence[int]:
    return sample_frames(
        total,
        request["num_frames"],
        temporal_patch_size=request["temporal_patch_size"],
        fps=fps,
        style=request["style"],
    )


def _answer(request: dict[str, Any], descriptor: int, messages: Messages) -> Reply:
    with os.fdopen(descriptor, "rb") as clip:
        try:
            return decode(request, clip, messages)
        except ClipError as error:
            return {"error": str(error)}, None
        except ImportError as error:
            return {"error": str(error), "missing": request["backend"]}, None
        # A decoding library's bindings raise whatever they like on a file that they do not like.
        except Exception as error:
            first_line = (str(error).strip().splitlines() or [""])[0]
            return {"error": f"{type(error).__name__}: {first_line[:300]}"}, None


def main() -> None:
    """Serve requests until the parent closes its end."""
    connection = Connection(int(sys.argv[1]))
    os.environ.update(
        OPENCV_FFMPEG_CAPTURE_OPTIONS=CAPTURE_OPTIONS, OPENCV_FFMPEG_LOGLEVEL="24", OPENCV_LOG_LEVEL="OFF"
    )
    messages = Messages()
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))
    while True:
        try:
            request = json.loads(connection.recv_bytes())
            descriptor = recv_handle(connection)
        except EOFError:
            return
        # The default action kills, wherever a library hangs; this only matters once the parent is gone.
        signal.alarm(int(request["timeout_s"]) + 5)
        reply, frames = _answer(request, descriptor, messages)
        signal.alarm(0)
        connection.send_bytes(json.dumps(reply).encode())
        if frames is not None:
            connection.send_bytes(frames.data.cast("B"))


if __name__ == "__main__":
    main()
