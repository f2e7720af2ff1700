# SPDX-License-Identifier: Apache-2.0
"""Clips of every kind that decoders disagree about, each frame carrying its number as pixels."""

import subprocess
from pathlib import Path

import numpy as np
import pytest

_WIDTH, _HEIGHT, _BLOCK = 128, 96, 16
_BITS = 8


def _numbered(num_frames, first=0, height=_HEIGHT, width=_WIDTH):
    """RGB frames [frames, height, width, 3]: a drifting ramp, and the frame's number as black and white blocks."""
    y, x = np.mgrid[0:height, 0:width]
    frames = np.empty((num_frames, height, width, 3), np.uint8)
    for index in range(num_frames):
        number = first + index
        drift = 3 * number
        frames[index, ..., 0] = (x + drift) % 256
        frames[index, ..., 1] = (2 * y + drift) % 256
        frames[index, ..., 2] = (x + y + 5 * number) % 256
        for bit in range(_BITS):
            left = bit * width // _BITS
            frames[index, : height // 3, left : left + width // _BITS] = 255 if number >> bit & 1 else 0
    return frames


def _number(frame):
    """The number that a decoded frame carries."""
    height, width = frame.shape[:2]
    blocks = [
        frame[height // 12 : height // 4, (2 * b + 1) * width // (2 * _BITS)].mean() for b in range(_BITS)
    ]
    return sum(1 << bit for bit, level in enumerate(blocks) if level > 127)


class Maker:
    """Makes clips with ffmpeg in a directory of its own."""

    def __init__(self, folder: Path, program: str) -> None:
        self.folder, self.program = folder, program

    def run(self, *arguments, frames=None):
        options = ("-hide_banner", "-loglevel", "error", "-nostdin", "-y", "-threads", "2")
        done = subprocess.run(
            [self.program, *options, *map(str, arguments)],
            input=None if frames is None else frames.tobytes(),
            capture_output=True,
            cwd=self.folder,
            check=False,
        )
        assert done.returncode == 0, (arguments, done.stderr.decode(errors="replace"))

    def encode(self, name, *options, num_frames=40, fps=25, first=0, height=_HEIGHT, width=_WIDTH, inputs=()):
        """A clip of numbered frames; `options` go between the input and the output."""
        frames = _numbered(num_frames, first, height, width)
        raw = ("-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{width}x{height}", "-r", fps, "-i", "-")
        self.run(*raw, *inputs, *options, name, frames=frames)
        return self.folder / name

    def remux(self, name, source, *options, before=()):
        """Packets of another clip, copied."""
        self.run(*before, "-i", source, "-c", "copy", *options, name)
        return self.folder / name


X264 = ("-c:v", "libx264", "-preset", "veryfast", "-pix_fmt", "yuv420p", "-crf", "18")
BFRAMES = ("-bf", "3", "-g", "12", "-sc_threshold", "0")


def _sine(seconds):
    return ("-f", "lavfi", "-i", f"sine=frequency=440:duration={seconds}")


def _overwritten(path, start, stop, step=97):
    """The file with bytes between two shares of its length replaced by noise."""
    data = bytearray(path.read_bytes())
    rng = np.random.default_rng(0)
    for place in range(int(len(data) * start), int(len(data) * stop), step):
        data[place] = int(rng.integers(256))
    return bytes(data)


def _healthy(make):
    x264 = (*X264, *BFRAMES)
    make.encode("plain.mp4", *x264)
    make.encode("no_bframes.mp4", *X264, "-bf", 0, "-g", 12)
    make.encode("pyramid.mp4", *X264, "-bf", 7, "-g", 30, "-x264-params", "b-pyramid=normal:b-adapt=0")
    make.encode("open_gop.mp4", *X264, "-g", 12, "-bf", 3, "-x264-params", "open-gop=1:scenecut=0:b-adapt=0")
    make.encode("one_gop.mp4", *X264, "-bf", 0, "-g", 60, num_frames=120, fps=30)
    make.encode("one_gop_bframes.mp4", *X264, "-bf", 3, "-g", 60, num_frames=120, fps=30)
    # Lossless cuts: the edit list hides what is decoded first.
    make.remux("cut.mp4", "one_gop.mp4", before=("-ss", "0.7"))
    make.remux("cut_bframes.mp4", "one_gop_bframes.mp4", before=("-ss", "0.7"))
    make.remux("cut_both.mp4", "one_gop_bframes.mp4", "-t", "1.5", before=("-ss", "0.7"))
    make.remux("cut_open_gop.mp4", "open_gop.mp4", before=("-ss", "0.9"))
    make.remux("cut_open_gop.mkv", "open_gop.mp4", before=("-ss", "0.9"))
    make.remux("cut_open_gop.ts", "open_gop.mp4", before=("-ss", "0.9"))
    make.remux("cut_open_gop.avi", "open_gop.mp4", before=("-ss", "0.9"))
    make.remux("cut_no_edit_list.mp4", "one_gop_bframes.mp4", "-use_editlist", "0", before=("-ss", "0.7"))
    make.remux("cut.mov", "one_gop.mp4", before=("-ss", "0.7"))
    make.remux("cut.mkv", "one_gop.mp4", before=("-ss", "0.7"))
    for suffix in ("mkv", "mov", "ts", "flv", "avi", "nut", "3gp", "m2ts", "h264"):
        make.remux(f"plain.{suffix}", "plain.mp4")
    make.remux("fragmented.mp4", "plain.mp4", "-movflags", "frag_keyframe+empty_moov+default_base_moof")
    make.remux("late_start.mp4", "plain.mp4", "-output_ts_offset", "5")
    make.remux("late_start.ts", "plain.mp4", "-output_ts_offset", "5")
    make.remux("late_start.mkv", "plain.mp4", "-output_ts_offset", "5")
    make.encode(
        "hevc.mp4", "-c:v", "libx265", "-pix_fmt", "yuv420p", "-x265-params", "log-level=error:keyint=12"
    )
    make.encode(
        "hevc_open_gop.mkv", "-c:v", "libx265", "-pix_fmt", "yuv420p", "-x265-params",
        "log-level=error:keyint=12:open-gop=1:bframes=3",
    )  # fmt: skip
    make.encode(
        "hevc_10bit.mp4", "-c:v", "libx265", "-pix_fmt", "yuv420p10le", "-x265-params", "log-level=error"
    )
    make.encode("h264_10bit.mp4", *X264[:4], "-pix_fmt", "yuv420p10le", "-bf", 3)
    make.encode("h264_444.mp4", *X264[:4], "-pix_fmt", "yuv444p")
    make.encode("h264_grey.mp4", *X264[:4], "-pix_fmt", "gray")
    make.encode("full_range.mp4", *X264, "-vf", "scale=out_range=full", "-color_range", "pc")
    make.encode(
        "bt709.mp4", *X264, "-colorspace", "bt709", "-color_primaries", "bt709", "-color_trc", "bt709"
    )
    make.encode("rgb.mkv", "-c:v", "libx264rgb", "-preset", "veryfast")
    make.encode("mpeg4.avi", "-c:v", "mpeg4", "-q:v", 3, "-bf", 2)
    make.encode("mpeg4.mp4", "-c:v", "mpeg4", "-q:v", 3, "-bf", 2)
    make.encode("mjpeg.avi", "-c:v", "mjpeg", "-q:v", 3, "-pix_fmt", "yuvj420p")
    make.encode("msmpeg4.avi", "-c:v", "msmpeg4", "-q:v", 3)
    make.encode("wmv2.wmv", "-c:v", "wmv2", "-q:v", 3)
    make.encode("wmv2_audio.wmv", "-c:v", "wmv2", "-q:v", 3, "-c:a", "wmav2", inputs=_sine(1.6))
    make.encode("wmv1.asf", "-c:v", "wmv1", "-q:v", 3)
    make.encode("h264.asf", *x264)
    make.encode("mpeg2.ts", "-c:v", "mpeg2video", "-q:v", 3, "-bf", 2, "-g", 12)
    make.encode("mpeg2.mpg", "-c:v", "mpeg2video", "-q:v", 3, "-bf", 2, "-g", 12)
    make.encode("mpeg2_interlaced.ts", "-c:v", "mpeg2video", "-q:v", 3, "-flags", "+ildct+ilme", "-top", 1)
    make.encode("h264_interlaced.mp4", *x264, "-x264-params", "tff=1")
    make.encode("h264_interlaced.ts", *x264, "-x264-params", "bff=1")
    make.encode("ts_audio.ts", *x264, "-c:a", "aac", inputs=_sine(1.6))
    make.encode("vp8.webm", "-c:v", "libvpx", "-b:v", "1M", "-deadline", "realtime", "-auto-alt-ref", 1)
    make.encode(
        "vp9.webm", "-c:v", "libvpx-vp9", "-b:v", "1M", "-deadline", "good", "-cpu-used", 5, "-auto-alt-ref", 1,
        "-lag-in-frames", 16,
    )  # fmt: skip
    make.encode("vp9_alpha.webm", "-c:v", "libvpx-vp9", "-b:v", "1M", "-cpu-used", 5, "-pix_fmt", "yuva420p")
    make.encode("av1.mp4", "-c:v", "libaom-av1", "-cpu-used", 8, "-b:v", "1M", num_frames=24)
    make.encode("av1.webm", "-c:v", "libaom-av1", "-cpu-used", 8, "-b:v", "1M", num_frames=24)
    make.encode("theora.ogv", "-c:v", "libtheora", "-q:v", 8)
    make.encode("ffv1.mkv", "-c:v", "ffv1", "-pix_fmt", "yuv420p")
    make.encode("prores.mov", "-c:v", "prores_ks", "-pix_fmt", "yuv422p10le", num_frames=12)
    make.encode("png.mov", "-c:v", "png", "-pix_fmt", "rgba", num_frames=12)
    make.encode("animation.gif", "-r", 25)
    make.encode("animation_slow.gif", "-vf", "setpts=N*N/40/25/TB", "-fps_mode", "vfr", num_frames=20)
    make.encode("animation.apng", "-f", "apng", num_frames=12)
    make.encode("animation.webp", "-c:v", "libwebp_anim", "-lossless", 1, num_frames=12)
    # Audio tracks: first, longer, shorter, starting earlier.
    make.encode("audio.mp4", *x264, "-c:a", "aac", inputs=_sine(1.6))
    make.encode("audio_first.mp4", *x264, "-c:a", "aac", "-map", "1:a", "-map", "0:v", inputs=_sine(1.6))
    make.encode("audio_longer.mp4", *x264, "-c:a", "aac", inputs=_sine(5))
    make.encode("audio_longer.mkv", *x264, "-c:a", "aac", inputs=_sine(5))
    make.encode("audio_shorter.mp4", *x264, "-c:a", "aac", inputs=_sine(0.5))
    make.encode("audio_early.mp4", *x264, "-c:a", "aac", inputs=("-itsoffset", "-0.5", *_sine(3)))
    make.encode("audio.avi", "-c:v", "mpeg4", "-c:a", "libmp3lame", inputs=_sine(1.6))
    make.encode(
        "two_tracks.mp4",
        "-filter_complex",
        "[0:v]split[a][b];[b]scale=64:48[c]",
        "-map",
        "[c]",
        "-map",
        "[a]",
        *x264,
    )
    # Variable rate, and timestamps that a container of whole milliseconds cannot tell apart.
    thinned = "select='not(mod(n\\,7)*mod(n\\,5))+gt(n\\,30)'"
    for suffix in ("mp4", "mkv", "ts"):
        make.encode(f"variable.{suffix}", *x264, "-vf", thinned, "-fps_mode", "vfr")
    for fps in (1500, 5000, 30000):
        make.encode(f"fps_{fps}.mp4", *X264, "-bf", 2, "-g", 12, "-video_track_timescale", 120000, fps=fps)
    make.encode("fps_1500.mkv", *X264, "-bf", 2, "-g", 12, fps=1500)
    make.encode("fps_ntsc.mkv", *x264, fps="30000/1001")
    make.encode("fps_slow.mp4", *x264, fps="1/3", num_frames=9)
    make.encode("duplicates.mp4", *x264, "-vf", "fps=60", num_frames=20)
    for degrees in (90, 180, 270):
        make.remux(f"turned_{degrees}.mp4", "plain.mp4", before=("-display_rotation", degrees))
    make.remux("turned_90.mkv", "plain.mp4", before=("-display_rotation", 90))
    make.remux("mirrored.mp4", "plain.mp4", before=("-display_hflip",))
    make.encode("wide_pixels.mp4", *x264, "-vf", "setsar=2")
    make.encode("odd_size.mkv", *X264[:4], "-pix_fmt", "yuv444p", height=97, width=131)
    make.encode("odd_size.webm", "-c:v", "libvpx-vp9", "-cpu-used", 5, "-b:v", "1M", height=97, width=131)
    make.encode("odd_size_420.gif", height=51, width=67)
    for name, codec in (
        ("mp4", X264),
        ("gif", ()),
        ("webm", ("-c:v", "libvpx-vp9", "-cpu-used", "5")),
        ("ts", X264),
        ("avi", ("-c:v", "mpeg4")),
        ("mkv", X264),
        ("wmv", ("-c:v", "wmv2")),
    ):
        make.encode(f"one_frame.{name}", *codec, num_frames=1, first=5)
        make.encode(f"two_frames.{name}", *codec, num_frames=2, first=5)
    # Sizes that change in mid-stream: the second half has another.
    mjpeg = ("-c:v", "mjpeg", "-q:v", 3, "-pix_fmt", "yuvj420p")
    for suffix, options in (("ts", (*X264, "-bf", 0)), ("h264", x264), ("mjpeg", mjpeg)):
        halves = [
            make.encode(f"first.{suffix}", *options, num_frames=20),
            make.encode(f"second.{suffix}", *options, num_frames=20, first=20, height=64, width=96),
        ]
        (make.folder / f"size_changes.{suffix}").write_bytes(b"".join(half.read_bytes() for half in halves))
        for half in halves:
            half.unlink()
    for suffix in ("avi", "mkv", "mov"):
        make.remux(f"size_changes.{suffix}", "size_changes.mjpeg", before=("-f", "mjpeg"))


def _damaged(make):
    """Holes, missing ends and overstated counts."""
    folder = make.folder
    for name in (
        "plain.mp4", "plain.mkv", "plain.ts", "plain.avi", "plain.flv", "hevc.mp4", "hevc_open_gop.mkv", "mpeg4.avi",
        "wmv2.wmv", "mpeg2.ts", "mpeg2.mpg", "vp8.webm", "vp9.webm", "av1.mp4", "animation.gif", "theora.ogv",
        "mjpeg.avi", "one_gop.mp4", "open_gop.mp4", "ffv1.mkv", "prores.mov",
    ):  # fmt: skip
        path = folder / name
        (folder / f"hole_{name}").write_bytes(_overwritten(path, 0.4, 0.5))
        (folder / f"noise_{name}").write_bytes(_overwritten(path, 0.2, 0.9, 1009))
        data = path.read_bytes()
        (folder / f"gap_{name}").write_bytes(data[: len(data) * 2 // 5] + data[len(data) // 2 :])
        (folder / f"short_{name}").write_bytes(data[: len(data) * 6 // 10])
    for name in ("plain.mp4", "one_gop.mp4", "pyramid.mp4"):
        make.remux(f"front_{name}", name, "-movflags", "+faststart")
        data = (folder / f"front_{name}").read_bytes()
        (folder / f"short_front_{name}").write_bytes(data[: len(data) * 6 // 10])
        (folder / f"front_{name}").unlink()


@pytest.fixture(scope="session")
def number():
    """`number(frame)`: the number that a decoded frame carries."""
    return _number


@pytest.fixture(scope="session")
def maker(tmp_path_factory):
    """Makes clips of numbered frames."""
    imageio_ffmpeg = pytest.importorskip("imageio_ffmpeg")
    return Maker(tmp_path_factory.mktemp("clips"), imageio_ffmpeg.get_ffmpeg_exe())


@pytest.fixture(scope="session")
def corpus(maker):
    """`{file name: path}` of every clip, healthy and damaged."""
    _healthy(maker)
    _damaged(maker)
    return {path.name: path for path in sorted(maker.folder.iterdir())}
