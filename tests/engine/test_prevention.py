# SPDX-License-Identifier: Apache-2.0
"""With the advised limit, and with fitted pictures, the real engine re-sizes nothing, whatever its cache holds."""

import random
from pathlib import Path

import pytest
from PIL import Image

from nemo_rl_ext.align.grids import DynamicTiler
from nemo_rl_ext.grpo.engine.actor import EngineActor
from nemo_rl_ext.grpo.engine.config import EngineConfig, LimitMMPerPromptConfig
from nemo_rl_ext.grpo.engine.requests import GenerationRequest
from nemo_rl_ext.manifest.fit import fitted_grids
from nemo_rl_ext.manifest.shared_context import limit_for_any, shared_patches
from nemo_rl_ext.models.checkpoint import build_tiny_checkpoint
from nemo_rl_ext.models.pin import pin_checkpoint
from nemo_rl_ext.models.tokenizer import build_byte_tokenizer

pytestmark = pytest.mark.engine

CONTEXT, IMAGES, TEXT = 512, 4, 60
NUM_REQUESTS = 200
TILER = DynamicTiler(patch_size=16, merge_size=2, min_num_patches=16, max_num_patches=1024)
TOKENIZER = build_byte_tokenizer()


def picture(rng: random.Random) -> Image.Image:
    size = int(2 ** rng.uniform(6.5, 11)), int(2 ** rng.uniform(6.5, 11))
    return Image.new("RGB", size, tuple(rng.randrange(256) for _ in range(3)))


def request(images: list[Image.Image], rng: random.Random) -> tuple[GenerationRequest, int]:
    """A request and the tokens of its text."""
    content = [{"type": "image"}] * len(images) + [{"type": "text", "text": "x" * rng.randrange(20)}]
    text = TOKENIZER.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    ids = tuple(TOKENIZER.encode(text))
    return GenerationRequest(prompt_token_ids=ids, images=tuple(images), max_new_tokens=1), len(
        ids
    ) + 2 * len(images)


def engine_grids(
    engine: EngineActor, images: list[Image.Image], rng: random.Random
) -> tuple[list[tuple[int, int]] | None, int]:
    """Patch grids (height, width) from the engine's receipt, None of a refused request, and the tokens of the text."""
    asked, text = request(images, rng)
    (result,) = engine.generate([asked])
    if result.error is not None:
        return None, text
    sizes = [item.geometry["imgs_sizes"] for item in result.receipt.items]
    return [(height // 16, width // 16) for height, width in sizes], text


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """`start(checkpoint, cache)`: an engine on a checkpoint with so many GiB of processor cache."""
    engines = []

    def make(model: Path, cache: float) -> EngineActor:
        engine = EngineActor(
            EngineConfig(
                model=str(model),
                max_model_len=CONTEXT,
                mm_processor_cache_gb=cache,
                limit_mm_per_prompt=LimitMMPerPromptConfig(image=IMAGES),
            )
        )
        engine.start()
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.shutdown()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return build_tiny_checkpoint(tmp_path_factory.mktemp("prevention") / "tiny")


@pytest.mark.parametrize("cache", [0.0, 1.0], ids=["cold", "cached"])
def test_a_pinned_engine_gives_every_image_its_static_grid(start, checkpoint, tmp_path, cache):
    limit = limit_for_any(IMAGES, TEXT, TILER, CONTEXT)
    assert limit is not None
    engine = start(pin_checkpoint(checkpoint, tmp_path / "pinned", limit).out, cache)
    pinned = DynamicTiler(patch_size=16, merge_size=2, min_num_patches=16, max_num_patches=limit)
    rng = random.Random(cache)
    seen: list[Image.Image] = []
    num_resized = 0
    for _ in range(NUM_REQUESTS // 2):
        images = [rng.choice(seen) if seen and rng.random() < 0.4 else picture(rng) for _ in range(IMAGES)]
        seen = [*seen, *images][-20:]
        grids, text = engine_grids(engine, images, rng)
        assert text <= TEXT
        sizes = [image.size[::-1] for image in images]
        assert grids == [pinned.static_grid(size) for size in sizes]
        num_resized += TILER.joint_grids(sizes, CONTEXT - 4) != tuple(map(TILER.static_grid, sizes))
    assert num_resized > NUM_REQUESTS // 8, "without a pin, many of these requests are re-sized"


def test_an_engine_without_a_pin_re_sizes_none_of_fitted_pictures(start, checkpoint):
    engine = start(checkpoint, 0.0)
    rng = random.Random(5)
    num_resized = 0
    for _ in range(NUM_REQUESTS // 4):
        images = [picture(rng) for _ in range(rng.randrange(1, IMAGES + 1))]
        found, _ = engine_grids(engine, images, rng)
        num_resized += found != [TILER.static_grid(image.size[::-1]) for image in images]
        grids = fitted_grids(
            [image.size[::-1] for image in images], shared_patches(CONTEXT, TEXT, TILER), TILER
        )
        assert grids is not None
        fitted = [image.resize((16 * g.width, 16 * g.height)) for image, g in zip(images, grids, strict=True)]
        found, _ = engine_grids(engine, fitted, rng)
        assert found == list(grids)
    assert num_resized > 5, "the pictures were chosen so that some are re-sized, or refused"
