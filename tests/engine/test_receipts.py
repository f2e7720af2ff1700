# SPDX-License-Identifier: Apache-2.0
"""What vLLM's receipts say of requests on which inference from counts is wrong; the processor cache is on."""

from collections.abc import Iterator

import numpy as np
import pytest

from nemo_rl_ext.media.identity import pixel_digest
from nemo_rl_ext.media.video import DecodedVideo
from nemo_rl_ext.models.tokenizer import IMAGE_ID, SPECIAL_TOKENS

pytestmark = pytest.mark.engine

VIDEO_ID = SPECIAL_TOKENS.index("<video>")
MAX_MODEL_LEN = 657


@pytest.fixture(scope="module")
def engine(tiny_checkpoint) -> Iterator[object]:
    from nemo_rl_ext.grpo.engine.config import EngineConfig, LimitMMPerPromptConfig
    from nemo_rl_ext.grpo.engine.vllm_engine import VllmEngine

    config = EngineConfig(
        model=str(tiny_checkpoint),
        precision="float32",
        max_model_len=MAX_MODEL_LEN,
        mm_processor_cache_gb=1.0,
        limit_mm_per_prompt=LimitMMPerPromptConfig(image=6, video=2),
    )
    engine = VllmEngine(config)
    yield engine
    engine.shutdown()


def picture(height, width, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def clip(frames, height, width, seed=0):
    from nemo_rl_ext.grpo.engine.requests import VideoInput

    decoded = DecodedVideo(
        frames=np.random.default_rng(seed).integers(0, 256, (frames, height, width, 3), dtype=np.uint8),
        frame_indices=tuple(range(0, 12 * frames, 12)),
        fps=24.0,
        total_num_frames=12 * frames,
        declared_num_frames=12 * frames,
        source="clip.mp4",
        backend="opencv",
    )
    return VideoInput(frames=decoded.frames, metadata=decoded.engine_metadata())


def generate(engine, ids, images=(), videos=(), n=1):
    from nemo_rl_ext.grpo.engine.requests import GenerationRequest

    request = GenerationRequest(
        prompt_token_ids=ids,
        images=images,
        videos=videos,
        n=n,
        max_new_tokens=2,
        banned_token_ids=(IMAGE_ID, VIDEO_ID),
    )
    name, done = engine.add(request), {}
    while name not in done:
        done.update(dict(engine.step()))
    return done[name]


def sizes(result):
    return [tuple(item.geometry["imgs_sizes"]) for item in result.receipt.items]


def test_an_image_that_comes_again_is_served_from_the_cache_and_says_so(engine):
    image, other = picture(96, 102), picture(300, 200)
    first = generate(engine, [40, IMAGE_ID, 41], (image,))
    again = generate(engine, [40, IMAGE_ID, IMAGE_ID, IMAGE_ID], (image, other, other), n=2)
    assert [item.cached for item in first.receipt.items] == [False]
    # Looked up before either of the two was made.
    assert again.receipt.items[0].cached
    for result, images in ((first, (image,)), (again, (image, other, other))):
        assert [item.served for item in result.receipt.items] == [pixel_digest(pixels) for pixels in images]
        assert [item.pixels for item in result.receipt.items] == [
            item.served for item in result.receipt.items
        ]
        assert result.receipt.prompt_tokens == len(result.prompt_token_ids)
    assert len(again.outputs) == 2


def test_a_warm_cache_moves_the_shared_budget_and_the_receipt_has_the_grids(engine):
    first = picture(96, 102, seed=50)
    later = [picture(2042, 2462, seed=51), picture(488, 487, seed=52), picture(920, 887, seed=53)]
    generate(engine, [40, IMAGE_ID], (first,))
    result = generate(engine, [40, *[IMAGE_ID] * 4], (first, *later))
    # Replaying the budget over all four names 28x30 patches for the third one.
    assert sizes(result)[2] == (30 * 16, 28 * 16)


def test_the_runs_are_those_of_the_ids(engine):
    result = generate(
        engine, [40, IMAGE_ID, 41, IMAGE_ID], (picture(64, 64, seed=3), picture(96, 64, seed=4))
    )
    for item in result.receipt.items:
        ((offset, length),) = item.runs
        assert (result.prompt_token_ids[offset : offset + length] == IMAGE_ID).all()
        assert item.geometry["num_tokens_per_image"] == length


def test_clips_and_images_stand_in_prompt_order(engine):
    film, image = clip(4, 96, 128), picture(64, 80)
    result = generate(engine, [40, IMAGE_ID, 41, VIDEO_ID], (image,), (film,))
    assert [item.kind for item in result.receipt.items] == ["image", "video"]
    seen = result.receipt.items[1]
    assert seen.served == pixel_digest(film.frames)
    assert seen.frames.indices == (0, 12, 24, 36) and seen.frames.total == 48
    assert seen.geometry["pixel_values_flat_video"]["shape"] == [4, 3, 96, 128]


def test_other_frames_of_the_same_times_have_another_identity(engine):
    one, other = clip(4, 96, 128, seed=7), clip(4, 96, 128, seed=8)
    served = [generate(engine, [40, VIDEO_ID], (), (film,)).receipt.items[0].served for film in (one, other)]
    assert served == [pixel_digest(one.frames), pixel_digest(other.frames)]


def test_a_refused_request_leaves_the_cache_usable(engine):
    image = picture(64, 64, seed=9)
    with pytest.raises(ValueError, match="maximum context length"):
        engine.add(_request([40] * MAX_MODEL_LEN + [IMAGE_ID], (image,)))
    # Long only once the image is expanded: the processor has run, and the cache may know the image.
    with pytest.raises(ValueError, match="refused it"):
        engine.add(_request([40] * (MAX_MODEL_LEN - 2) + [IMAGE_ID], (image,)))
    result = generate(engine, [40, IMAGE_ID], (image,))
    assert result.error is None
    assert result.receipt.items[0].served == pixel_digest(image)


def test_text_has_an_empty_receipt(engine):
    assert generate(engine, [40, 41]).receipt.items == ()


def _request(ids, images):
    from nemo_rl_ext.grpo.engine.requests import GenerationRequest

    return GenerationRequest(prompt_token_ids=ids, images=images, max_new_tokens=2)


def test_which_weights_drew_which_token_without_vllms_own_record(engine, monkeypatch):
    """vLLM before 0.32 keeps none."""

    def spans():
        from nemo_rl_ext.grpo.engine.requests import GenerationRequest

        request = GenerationRequest(prompt_token_ids=[40, 41], n=2, max_new_tokens=9, ignore_eos=True)
        name, done, first = engine.add(request), {}, engine.version
        for step in range(100):
            if step in (3, 5):
                engine.set_version(engine.version + 1)
            done.update(dict(engine.step()))
            if name in done:
                break
        return [
            [(version - first, start, end) for version, start, end in output.weight_versions]
            for output in done[name].outputs
        ]

    said = spans()
    monkeypatch.setattr(engine._versions, "recorded_by_vllm", False)
    assert spans() == said
    for (old, begin, change), (new, resumed, later), (newest, last, end) in said:
        assert (old, new, newest, begin, end) == (0, 1, 2, 0, 9)
        assert 0 < change == resumed < later == last < 9
