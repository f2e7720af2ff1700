# SPDX-License-Identifier: Apache-2.0
"""Readers of an opened clip, as the engine's own loaders read it.

`OpenCVReader` makes the calls of vLLM 0.32's default loader in their order (`OpenCVVideoBackendMixin`,
vllm/multimodal/video_decoders/opencv.py), because the calls decide what an index means: frames are counted as they come
out of the decoder after the loader's look at the stream's end, and in MPEG-TS that look costs the frames before the
second keyframe. Nothing is sought, so an index is one picture whatever else was asked for.

FFmpeg conceals damage with whatever its threads have at hand: the engine's frames then differ from one process to the
next. So its messages are read, and a clip that they call damaged before the last frame in use is refused.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Collection, Sequence
from typing import Any, BinaryIO, Protocol

import numpy as np

# Containers that hold their own media. FFmpeg refuses every other one in the decoder itself, and any protocol: this is
# what keeps a playlist in disguise from being followed (`media.containers` gives the readable answer before).
FORMATS = (
    "aiff,apng,asf,avi,dv,flv,gif,h261,h263,h264,hevc,ivf,m4v,matroska,webm,mjpeg,mov,mp4,m4a,3gp,3g2,mj2,mpeg,"
    "mpegvideo,mpegts,mxf,nut,obu,ogg,rm,webp_pipe,yuv4mpegpipe"
)
CAPTURE_OPTIONS = f"format_whitelist;{FORMATS}|protocol_whitelist;none"

# What FFmpeg says of healthy clips that begin in the middle of another; such a clip is decoded twice more.
_BENIGN = ("mmco: unref short failure", "co located POCs unavailable")
# Codecs in which FFmpeg does not notice damage: such a clip is decoded twice more, or what it holds in place of the
# lost parts is the memory that happened to be there.
_SILENT = ("VP80", "APCO", "APCS", "APCN", "APCH", "AP4H", "AP4X")
_NEVER = ("FFV1",)
_OTHER_THREADS = (2, 16)
# Frames that may still come out after the last packet of a clip was decoded: more are rare.
_REORDERED = 4
_LEVEL = re.compile(r"^\[OPENCV:FFMPEG:(\d+)\]\s*")
_ERROR = 16


class ClipError(Exception):
    """The clip cannot be used as the engine would use it; one string that says why."""


class Reader(Protocol):
    """One opened clip. Methods raise `ClipError` or whatever the library raises."""

    num_frames: int
    """Frames that the engine's loader counts before it decodes any."""
    fps: float
    size: tuple[int, int]
    """`(height, width)` in pixels."""

    def read(self, indices: Sequence[int]) -> np.ndarray:
        """uint8 `[frames, height, width, 3]`, RGB; raises `EndOfClip` where there are fewer frames."""

    def time_error(self) -> float:
        """Largest distance in seconds of a frame that was read from index / fps; 0.0 at a constant rate."""


class EndOfClip(ClipError):
    """Only the first `num_frames` frames can be decoded."""

    def __init__(self, num_frames: int) -> None:
        super().__init__(f"only {num_frames} frames of it can be decoded")
        self.num_frames = num_frames


class Messages:
    """What C libraries in this process print, which is all that FFmpeg says of damage through OpenCV."""

    def __init__(self) -> None:
        self._file = os.memfd_create("messages")
        self._libc = ctypes.CDLL(None)
        for descriptor in (1, 2):
            os.dup2(self._file, descriptor)

    def take(self) -> list[tuple[bool, str]]:
        """New messages, each with whether it is an error."""
        self._libc.fflush(None)
        if not (length := os.lseek(self._file, 0, os.SEEK_CUR)):
            return []
        text = os.pread(self._file, length, 0).decode(errors="replace")
        os.lseek(self._file, 0, os.SEEK_SET)
        os.ftruncate(self._file, 0)
        found: list[tuple[bool, str]] = []
        for line in filter(str.strip, text.splitlines()):
            level = _LEVEL.match(line)
            if level is None and found:
                continue  # the rest of a message of several lines
            message = line[level.end() :] if level else line
            serious = (level is None or int(level[1]) <= _ERROR) and not any(
                said in message for said in _BENIGN
            )
            found.append((serious, message.strip()))
        return found


class OpenCVReader:
    """OpenCV's FFmpeg, one thread, called as vLLM calls it."""

    def __init__(self, clip: BinaryIO, messages: Messages, max_pixels: int) -> None:
        import cv2

        self._cv2, self._clip, self._messages = cv2, clip, messages
        messages.take()
        self._suspicious = False
        self._capture = self._open(1)
        self.size = self._height_width()
        if self.size[0] * self.size[1] > max_pixels:
            raise ClipError(
                f"its frames are {self.size[0]}x{self.size[1]}, over the limit of {max_pixels} pixels"
            )
        fourcc = int(self._capture.get(cv2.CAP_PROP_FOURCC)) & 0xFFFFFFFF
        codec = fourcc.to_bytes(4, "little").decode(errors="replace").upper()
        if codec in _NEVER:
            raise ClipError(f"damage would go unnoticed in its codec, {codec}")
        self._suspicious |= codec in _SILENT
        self.fps = float(self._capture.get(cv2.CAP_PROP_FPS))
        self.num_frames = self._count(self._capture)
        self._suspicious |= bool(messages.take())
        self._times: list[float] = []
        self._fresh = True

    def read(self, indices: Sequence[int]) -> np.ndarray:
        capture = self._capture if self._fresh else self._reopen(1)
        self._fresh = False
        self._times = []
        frames = self._read(capture, frozenset(indices))
        if self._suspicious:
            self._compare(frames)
        return np.stack([frames[index] for index in indices])

    def time_error(self) -> float:
        first = self._times[0] if self._times else 0.0
        return max(
            (abs(time - first - index / self.fps) for index, time in enumerate(self._times)), default=0.0
        )

    def _open(self, num_threads: int) -> Any:
        self._clip.seek(0)
        cv2 = self._cv2
        capture = cv2.VideoCapture(self._clip, cv2.CAP_FFMPEG, [cv2.CAP_PROP_N_THREADS, num_threads])
        if not capture.isOpened():
            said = self._said()
            raise ClipError(f"the engine's loader cannot open it{said}")
        return capture

    def _reopen(self, num_threads: int) -> Any:
        capture = self._open(num_threads)
        self._count(capture)
        self._messages.take()
        return capture

    def _height_width(self) -> tuple[int, int]:
        cv2 = self._cv2
        height, width = (
            int(self._capture.get(side)) for side in (cv2.CAP_PROP_FRAME_HEIGHT, cv2.CAP_PROP_FRAME_WIDTH)
        )
        return height, width

    def _count(self, capture: Any) -> int:
        """`get_video_metadata` of vLLM: the declared count, or what an edit list leaves of it."""
        cv2 = self._cv2
        declared = int(capture.get(cv2.CAP_PROP_FRAME_COUNT))
        if declared > 0 and capture.set(cv2.CAP_PROP_POS_AVI_RATIO, 1.0):
            visible = int(capture.get(cv2.CAP_PROP_POS_FRAMES))
            at_end = not capture.grab()
            capture.set(cv2.CAP_PROP_POS_FRAMES, 0)
            if at_end and 0 < visible < declared - 1:
                return visible
        return declared

    def _read(self, capture: Any, wanted: Collection[int]) -> dict[int, np.ndarray]:
        """The wanted frames by index, and the times of all up to the last one."""
        cv2, frames = self._cv2, {}
        for index in range(max(wanted) + 1):
            if not capture.grab():
                said = self._said()
                if not index:
                    only = ", which is the only one; give it as an image" if self.num_frames == 1 else said
                    raise ClipError(f"the engine's loader does not read its first frame{only}")
                raise EndOfClip(index)
            if index in wanted:
                retrieved, frame = capture.retrieve()
                if not retrieved or frame.shape != (*self.size, 3):
                    found = list(frame.shape) if retrieved else "nothing"
                    raise ClipError(f"frame {index} decodes to {found}, the clip's frames are {self.size}")
                frames[index] = cv2.cvtColor(frame, cv2.COLOR_BGR2RGB)
            self._times.append(capture.get(cv2.CAP_PROP_POS_MSEC) / 1000)
            self._judge(capture, index)
        return frames

    def _judge(self, capture: Any, index: int) -> None:
        """Refuse a clip that is damaged at this frame, or end it here where nearly nothing follows."""
        messages = self._messages.take()
        self._suspicious |= bool(messages)
        serious = [message for is_error, message in messages if is_error]
        if not serious:
            return
        if "interlaced" in serious[0]:
            raise ClipError(
                "its frames are interlaced, and the engine's OpenCV gives uninitialised memory for them; "
                "deinterlace it, for instance with ffmpeg's bwdif"
            )
        after = 0
        while capture.grab():
            after += 1
        # A file that was cut off ends in the middle of a packet, which the last frames wait for in the decoder.
        if after <= _REORDERED and index > 0:
            raise EndOfClip(index)
        raise ClipError(
            f"it is damaged: from frame {index} on, {after + 1} of its {max(self.num_frames, index + after + 1)} "
            f"frames cannot be trusted (the decoder says: {serious[0][:120]})"
        )

    def _compare(self, frames: dict[int, np.ndarray]) -> None:
        """Whether the engine, whose number of threads is not known here, gets these frames as well."""
        for num_threads in _OTHER_THREADS:
            capture = self._reopen(num_threads)
            for index in range(max(frames) + 1):
                grabbed = capture.grab()
                if index not in frames:
                    continue
                frame = capture.retrieve()[1] if grabbed else None
                same = frame is not None and np.array_equal(frame[..., ::-1], frames[index])
                if not same:
                    raise ClipError(f"it is damaged: frame {index} comes out differently every time")

    def _said(self) -> str:
        messages = self._messages.take()
        self._suspicious |= bool(messages)
        serious = [message for is_error, message in messages if is_error]
        return f" (it says: {serious[0][:120]})" if serious else ""


class TorchcodecReader:
    """torchcodec, where its wheel loads; exact seeking, as vLLM's own loader of that name and NeMo-RL have it."""

    def __init__(self, clip: BinaryIO, messages: Messages, max_pixels: int) -> None:
        from torchcodec.decoders import VideoDecoder

        self._decoder = VideoDecoder(clip, dimension_order="NHWC", num_ffmpeg_threads=1, seek_mode="exact")
        metadata = self._decoder.metadata
        self.num_frames = int(metadata.num_frames or 0)
        self.fps = float(metadata.average_fps or 0.0)
        self.size = int(metadata.height or 0), int(metadata.width or 0)
        if self.size[0] * self.size[1] > max_pixels:
            raise ClipError(
                f"its frames are {self.size[0]}x{self.size[1]}, over the limit of {max_pixels} pixels"
            )
        self._time_error = 0.0

    def read(self, indices: Sequence[int]) -> np.ndarray:
        batch = self._decoder.get_frames_at(indices=list(indices))
        times = batch.pts_seconds.tolist()
        first = self._decoder.metadata.begin_stream_seconds or 0.0
        self._time_error = max(
            abs(time - first - i / self.fps) for i, time in zip(indices, times, strict=True)
        )
        frames: np.ndarray = batch.data.numpy()
        return frames

    def time_error(self) -> float:
        return self._time_error


READERS: dict[str, type[OpenCVReader] | type[TorchcodecReader]] = {
    "opencv": OpenCVReader,
    "torchcodec": TorchcodecReader,
}
