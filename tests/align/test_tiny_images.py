# SPDX-License-Identifier: Apache-2.0
"""Images of a few pixels and threads of them, through an aligner with a real checkpoint's processor."""

import numpy as np
import pytest
import torch
from PIL import Image

from nemo_rl_ext.align.verdict import Verdict
from nemo_rl_ext.media.policy import MediaPolicy
from nemo_rl_ext.media.reader import MediaSource
from nemo_rl_ext.rollout.aligner import AlignerConfig, RolloutAligner
from nemo_rl_ext.rollout.fitting import TurnRequest

SIZES = [(height, width) for height in (1, 2, 3, 4) for width in (1, 3, 4, 9)]
"""(height, width); three pixels high or one, an image looks like three planes or one."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    rng = np.random.default_rng(0)
    for height, width in [*SIZES, (2, 20_000)]:
        pixels = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{height}x{width}.png")
    return folder


@pytest.fixture(scope="module")
def aligner(folder, tmp_path_factory):
    from nemo_rl_ext.models.checkpoint import build_tiny_checkpoint

    model_dir = build_tiny_checkpoint(tmp_path_factory.mktemp("checkpoint") / "tiny")
    return RolloutAligner(
        AlignerConfig(model_dir=model_dir, media_policy=MediaPolicy(roots=(folder,)), base_dir=folder)
    )


@pytest.mark.parametrize("size", SIZES)
def test_a_tiny_image_is_processed_as_what_it_is(aligner, size):
    source = MediaSource(ref=f"{size[0]}x{size[1]}.png")
    (static,) = aligner.static([(source,)])
    item = aligner.reader.measure(source)
    (grid,) = static.tensors.grids
    assert grid == aligner.family.static_grids([item])[0]
    expected = aligner.family.render(item, grid)
    # The processor and the engine round the same picture in their last bit apart; another picture is units away.
    assert torch.allclose(static.tensors.values["pixel_values"], expected, atol=2e-6)


def test_a_thread_costs_its_static_tensors_and_not_the_run(aligner):
    """Its arithmetic divides by zero in the processor; what the engine made of it, if anything, can still be proven."""
    thread, other = MediaSource(ref="2x20000.png"), MediaSource(ref="4x9.png")
    broken, fine = aligner.static([(thread,), (other,)])
    assert fine.tensors is not None
    assert broken.tensors is None
    assert broken.pixels[0].shape == (2, 20_000, 3)
    grammar, item = aligner.family.grammar, aligner.reader.measure(thread)
    grid = aligner.family.static_grids([item])[0]
    ids = [20, grammar.start_id, *[grammar.context_id] * grid.num_tokens(), grammar.end_id]
    request = TurnRequest(row_id="r", turn=0, token_ids=np.array(ids), media=(thread,), captured=(grid,))
    (aligned,) = aligner.align([request])
    assert aligned.report.media[0].verdict in (Verdict.MATCHED, Verdict.REPAIRED)
    assert int(aligned.tensors.values["image_grid_hw"].prod()) // 4 == grid.num_tokens()
