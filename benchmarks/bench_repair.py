# SPDX-License-Identifier: Apache-2.0
"""Repairing a turn: against the checkpoint processor's own pass, and against vLLM's processor on the same grids."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measure import (
    Check,
    Effort,
    Section,
    Table,
    alternate,
    mib,
    peak_bytes,
    ratio,
    seconds,
    timing_table,
)
from nemo_rl_ext.align import compiled
from nemo_rl_ext.align.grids import Size

MEAN, STD = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]
MIN_PATCHES, MAX_PATCHES = 1024, 13312
CASES: tuple[tuple[Size, int], ...] = (
    ((480, 640), 1),
    ((480, 640), 16),
    ((1080, 2400), 1),
    ((1080, 2400), 4),
    ((1080, 2400), 16),
)
TARGET = 1.1


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One over-budget turn: decoded images, and the ids as the engine expanded them for `max_model_len`."""

    images: list[np.ndarray]
    max_model_len: int


def make_turn(size: Size, count: int) -> Turn:
    """`count` images of a size in a context that holds four fifths of their static tokens."""
    from nemo_rl_ext.align.grids import DynamicTiler

    tiler = DynamicTiler(16, 2, MIN_PATCHES, MAX_PATCHES)
    rng = np.random.default_rng(0)
    images = [rng.integers(0, 256, (*size, 3), dtype=np.uint8) for _ in range(count)]
    static = tiler.static_grid(size).num_tokens() * count
    return Turn(images=images, max_model_len=max(int(static * 0.8), MIN_PATCHES // 4 * count) + 4)


def contenders(turn: Turn, dtype: Any, model_dir: Path) -> dict[str, Callable[[], Any]]:
    """Every way to make the turn's tensors from its decoded images; the first is the checkpoint's processor."""
    import torch
    from PIL import Image
    from transformers import AutoImageProcessor
    from vllm.transformers_utils.processors.nano_nemotron_vl import DynamicResolutionImageTiler

    from nemo_rl_ext.align.families.nemotron import Layout, NemotronFamily
    from nemo_rl_ext.align.grids import DynamicTiler
    from nemo_rl_ext.align.items import MediaItem
    from nemo_rl_ext.align.runs import Grammar
    from nemo_rl_ext.align.turn import align_turn

    tiler = DynamicTiler(16, 2, MIN_PATCHES, MAX_PATCHES)
    sizes = [image.shape[:2] for image in turn.images]
    grids = tiler.joint_grids(sizes, turn.max_model_len - 4)
    grammar = Grammar(18, 20, 19)
    ids = [7]
    for grid in grids:
        ids += [grammar.start_id, *[grammar.context_id] * grid.num_tokens(), grammar.end_id]
    ids = np.array(ids, dtype=np.int32)
    family = {
        layout: NemotronFamily(
            grammar=grammar, tiler=tiler, mean=tuple(MEAN), std=tuple(STD), layout=layout, dtype=dtype
        )
        for layout in Layout
    }
    items = [
        MediaItem(size=image.shape[:2], source=f"{index}.png", load=lambda image=image: image[None])
        for index, image in enumerate(turn.images)
    ]

    def repair(layout: Layout) -> Any:
        aligned = align_turn(ids, items, family=family[layout])
        assert aligned.report.repaired and not aligned.report.neutral
        return aligned.tensors.values["pixel_values"]

    processor = AutoImageProcessor.from_pretrained(str(model_dir), local_files_only=True)

    def checkpoint() -> Any:
        return processor(images=turn.images, return_tensors="pt")["pixel_values"].to(dtype)

    engine = DynamicResolutionImageTiler(
        max_model_len=turn.max_model_len,
        patch_size=16,
        min_num_patches=MIN_PATCHES,
        max_num_patches=MAX_PATCHES,
        downsample_ratio=0.5,
        norm_mean=MEAN,
        norm_std=STD,
    )
    pictures = [Image.fromarray(image) for image in turn.images]

    def vllm() -> Any:
        params = engine.compute_params(pictures, turn.max_model_len - 4)
        return [tensor for one in params for tensor in engine.apply_params(one, dtype=dtype)]

    theirs, ours = vllm(), repair(Layout.NATIVE)
    from nemo_rl_ext.align.pixels import patchify

    assert torch.equal(ours, torch.cat([patchify(tensor[None], 16) for tensor in theirs])), "pixels differ"
    return {
        "checkpoint's processor, its own (larger) grids": checkpoint,
        "vLLM's processor, the engine's grids": vllm,
        "repair, transformers' layout": lambda: repair(Layout.NATIVE),
        "repair, released checkpoints' layout": lambda: repair(Layout.REMOTE),
    }


def resize_table(effort: Effort) -> Table:
    """What a repair spends most on: torch's float resize, the same bits compiled, and uint8, which gives others."""
    import torch

    from nemo_rl_ext.align.resize import bicubic, torch_bicubic

    rows = []
    sizes = (((480, 640), (448, 576)), ((1080, 2400), (960, 2144)), ((2160, 3840), (1280, 2272)))
    for size, new in sizes[:1] if effort.quick else sizes:
        frames = np.random.default_rng(0).integers(0, 256, (1, *size, 3), dtype=np.uint8)
        planes = torch.from_numpy(frames).permute(0, 3, 1, 2)

        def rounded(planes=planes, new=new) -> torch.Tensor:
            return torch.nn.functional.interpolate(
                planes, size=new, mode="bicubic", align_corners=False, antialias=True
            )

        calls = {
            "torch, float32 (the engine's)": lambda frames=frames, new=new: torch_bicubic(frames, new),
            "compiled, float32": lambda frames=frames, new=new: bicubic(frames, new),
            "torch, uint8 (rounded and clamped)": rounded,
        }
        engine = torch_bicubic(frames, new)
        timings = alternate(calls, rounds=effort.rounds)
        for name, call in calls.items():
            other = float((call().to(torch.float32) != engine).float().mean())
            rows.append(
                (
                    f"{size[1]}x{size[0]} to {new[1]}x{new[0]}",
                    name,
                    seconds(timings[name].median),
                    "baseline" if name == next(iter(calls)) else ratio(timings[name].ratio),
                    f"{other:.1%}" if other else "none",
                )
            )
    return Table(
        columns=("resize", "contender", "median", "against baseline", "values that differ"),
        rows=rows,
        caption="Resizing alone, one frame of noise.",
    )


def write_processor(folder: Path) -> Path:
    """A checkpoint directory that holds just an image processor with the released models' limits."""
    import json

    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "image_processor_type": "NemotronH_Omni_Reasoning_V3ImageProcessor",
        "patch_size": 16,
        "downsample_ratio": 0.5,
        "min_num_patches": MIN_PATCHES,
        "max_num_patches": MAX_PATCHES,
        "max_model_len": 131072,
        "norm_mean": MEAN,
        "norm_std": STD,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(config))
    return folder


def run(effort: Effort) -> Section:
    """One to sixteen images, float32 and bfloat16."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    import torch

    torch.set_num_threads(1)
    # As in an aligner, which loads the kernels when it starts.
    compiled.load()
    cases, memory, worst = {}, [], {}
    with tempfile.TemporaryDirectory() as scratch:
        model_dir = write_processor(Path(scratch) / "checkpoint")
        for size, count in CASES[:1] if effort.quick else CASES:
            for dtype in (torch.float32, torch.bfloat16):
                made = contenders(make_turn(size, count), dtype, model_dir)
                # Short calls are the noisiest, and cheap to repeat; those of seconds are neither.
                rounds = effort.rounds * 3 if size == CASES[0][0] and count == 1 else effort.rounds
                rounds = max(3, effort.rounds // 2) if count == 16 else rounds
                timings = alternate(made, rounds=rounds)
                name = f"{count} x {size[1]}x{size[0]}, {str(dtype).removeprefix('torch.')}"
                cases[name] = timings
                against_engine = (
                    timings["repair, transformers' layout"].median
                    / timings["vLLM's processor, the engine's grids"].median
                )
                worst[name] = (timings["repair, transformers' layout"].quartiles[1], against_engine)
                memory.append((name, *(mib(peak_bytes(call)) for call in made.values())))
    slowest = max(worst, key=lambda name: worst[name][0])
    engine = max(worst, key=lambda name: worst[name][1])
    columns = (
        "turn",
        "checkpoint's processor",
        "vLLM's processor",
        "repair, transformers'",
        "repair, released",
    )
    return Section(
        name="repair",
        title="Repairing a turn",
        about="All contenders start from the same decoded images, in one thread. The checkpoint's processor makes its "
        "own, larger grids; vLLM's makes exactly the pixels of the repair (asserted bit for bit), so it is the fair "
        "comparison of the two. Released checkpoints want one zero-padded tensor of all images.",
        tables=[
            timing_table(cases, "turn"),
            resize_table(effort),
            Table(
                columns=columns, rows=memory, caption="Peak memory over the decoded images, results included."
            ),
        ],
        checks=[
            Check(
                target="a repair <= 1.1x the checkpoint processor's own pass, every row at its 75th percentile",
                measured=f"at most {ratio(worst[slowest][0])} ({slowest})",
                met=worst[slowest][0] <= TARGET,
            ),
            Check(
                target="a repair <= 1.1x vLLM's processor on the same grids",
                measured=f"at most {ratio(worst[engine][1])} ({engine})",
                met=worst[engine][1] <= TARGET,
            ),
        ],
    )
