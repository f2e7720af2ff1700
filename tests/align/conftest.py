# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest
import torch

from nemo_rl_ext.align import compiled
from nemo_rl_ext.align.families.nemotron import Layout, NemotronFamily
from nemo_rl_ext.align.grids import DynamicTiler
from nemo_rl_ext.align.items import MediaItem
from nemo_rl_ext.align.runs import Grammar


@pytest.fixture(params=["plain", "compiled"])
def kernels_or_not(request, monkeypatch):
    """A test that takes it runs with numpy and torch alone, and with the compiled kernels."""
    kernels = compiled.load() if request.param == "compiled" else None
    if request.param == "compiled" and kernels is None:
        pytest.skip("numba is not installed")
    monkeypatch.setattr(compiled, "loaded", lambda: kernels)


@pytest.fixture
def grammar() -> Grammar:
    return Grammar(start_id=6, context_id=5, end_id=7)


@pytest.fixture
def make_family(grammar):
    """A Nemotron family with the released models' patch limits, or others."""

    def make(layout=Layout.REMOTE, dtype=torch.float32, minimum=16, maximum=1024, **kwargs) -> NemotronFamily:
        return NemotronFamily(
            grammar=grammar,
            tiler=DynamicTiler(patch_size=16, merge_size=2, min_num_patches=minimum, max_num_patches=maximum),
            mean=(0.48145466, 0.4578275, 0.40821073),
            std=(0.26862954, 0.26130258, 0.27577711),
            layout=layout,
            dtype=dtype,
            **kwargs,
        )

    return make


@pytest.fixture
def make_image():
    """An image item of a size (height, width) with seeded smooth content."""

    def make(size, seed=0, name=None) -> MediaItem:
        def load() -> np.ndarray:
            rng = np.random.default_rng(seed)
            coarse = rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)
            rows = np.arange(size[0]) * 8 // size[0]
            columns = np.arange(size[1]) * 8 // size[1]
            return coarse[rows][:, columns][None]

        return MediaItem(
            size=size, source=name or f"image-{seed}.png", content_hash=f"{seed}-{size}", load=load
        )

    return make


@pytest.fixture
def prompt(grammar):
    """Token ids of a prompt whose runs have the given lengths, between ordinary tokens."""

    def make(*lengths: int) -> list[int]:
        ids = [20, 21]
        for length in lengths:
            ids += [grammar.start_id, *[grammar.context_id] * length, grammar.end_id, 22]
        return ids

    return make
