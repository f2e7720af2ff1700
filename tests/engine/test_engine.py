# SPDX-License-Identifier: Apache-2.0
"""The real engine against the real policy, on the same weights.

One float32 engine for the module: only float32 tells wrong pixels from rounding.
"""

import dataclasses
import os
import re
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from PIL import Image

from nemo_rl_ext.align.runs import Grammar, RunKind, find_runs
from nemo_rl_ext.grpo.engine.actor import EngineActor, start_engine
from nemo_rl_ext.grpo.engine.config import EngineConfig
from nemo_rl_ext.grpo.engine.requests import (
    EngineError,
    GenerationRequest,
    GenerationResult,
    VideoInput,
)
from nemo_rl_ext.grpo.training.batch import MediaValues, PolicyRow, collate
from nemo_rl_ext.grpo.training.policy import Policy
from nemo_rl_ext.media.identity import pixel_digest
from nemo_rl_ext.models.tokenizer import EOS_ID, IMAGE_ID, PAD_ID, SPECIAL_TOKENS, build_byte_tokenizer

pytestmark = pytest.mark.engine

GRAMMAR = Grammar(
    start_id=SPECIAL_TOKENS.index("<img>"), context_id=IMAGE_ID, end_id=SPECIAL_TOKENS.index("</img>")
)
TOKENIZER = build_byte_tokenizer()
BAN = tuple(range(len(SPECIAL_TOKENS)))


@pytest.fixture(scope="module")
def checkpoint(tiny_checkpoint) -> Path:
    return tiny_checkpoint


@pytest.fixture(scope="module")
def config(checkpoint) -> EngineConfig:
    return EngineConfig(model=str(checkpoint), precision="float32", max_model_len=512)


def listening() -> set[tuple[str, int]]:
    connections = psutil.Process().net_connections("inet")
    return {tuple(c.laddr) for c in connections if c.status == psutil.CONN_LISTEN}


@pytest.fixture(scope="module")
def before() -> tuple[set[psutil.Process], set[tuple[str, int]]]:
    """Children and listening sockets that earlier tests left in this process, such as a Ray driver's."""
    return set(psutil.Process().children()), listening()


@pytest.fixture(scope="module")
def engine(config, before) -> Iterator[EngineActor]:
    engine = EngineActor(config)
    engine.start()
    yield engine
    engine.shutdown()


@pytest.fixture(scope="module")
def policy(checkpoint) -> Policy:
    return Policy.from_pretrained(checkpoint)


@pytest.fixture
def synced(engine, policy) -> tuple[EngineActor, Policy]:
    """Engine and policy on the same weights, whatever an earlier test pushed."""
    engine.update_weights(policy.state_dict_for_engine(), version=engine.version() + 1)
    return engine, policy


def image(width: int, height: int, seed: int = 0) -> Image.Image:
    """Smooth colours, so that a resize keeps what there is to see."""
    coarse = np.random.default_rng(seed).integers(
        0, 256, (height // 16 + 2, width // 16 + 2, 3), dtype=np.uint8
    )
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


def prompt(num_images: int, text: str = "go") -> tuple[int, ...]:
    content = [{"type": "image"}] * num_images + [{"type": "text", "text": text}]
    messages = [{"role": "user", "content": content}]
    return tuple(
        TOKENIZER.encode(TOKENIZER.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    )


def request(*images: Image.Image, text: str = "go", **settings) -> GenerationRequest:
    defaults = {"max_new_tokens": 8, "seed": 1, "ignore_eos": True, "banned_token_ids": BAN}
    return GenerationRequest(
        prompt_token_ids=prompt(len(images), text), images=images, **{**defaults, **settings}
    )


def run_lengths(token_ids: np.ndarray) -> list[int]:
    return [run.length for run in find_runs(token_ids, GRAMMAR)]


def collapsed(token_ids: np.ndarray) -> list[int]:
    """Every wrapped run as the one context token that it came from."""
    text = TOKENIZER.convert_ids_to_tokens(token_ids.tolist())
    joined = re.sub(r"<img> (<image> )+</img>", "<image>", " ".join(text))
    return TOKENIZER.convert_tokens_to_ids(joined.split(" "))


def patches(picture: Image.Image, grid: tuple[int, int]) -> torch.Tensor:
    """An image on an exact patch grid, in the order of operations of the engine's processor."""
    height, width = grid
    pixels = torch.from_numpy(np.array(picture)).permute(2, 0, 1)[None].float()
    pixels = torch.nn.functional.interpolate(
        pixels, size=(16 * height, 16 * width), mode="bicubic", align_corners=False, antialias=True
    )
    mean = torch.tensor([0.48145466, 0.4578275, 0.40821073]).view(1, 3, 1, 1)
    std = torch.tensor([0.26862954, 0.26130258, 0.27577711]).view(1, 3, 1, 1)
    pixels = (pixels / 255.0 - mean) / std
    pixels = pixels.reshape(3, height, 16, width, 16).permute(1, 3, 0, 2, 4)
    return pixels.reshape(height * width, 3 * 16 * 16)


def grids(result: GenerationResult) -> list[tuple[int, int]]:
    """Patch grids (height, width) of a request's images, from the engine's receipt."""
    sizes = [item.geometry["imgs_sizes"] for item in result.receipt.items if item.kind == "image"]
    return [(height // 16, width // 16) for height, width in sizes]


def media(images: Sequence[Image.Image], grids: Sequence[tuple[int, int]]) -> tuple[MediaValues, ...]:
    return tuple(
        dict(pixel_values=patches(picture, grid), image_grid_hw=torch.tensor([grid]))
        for picture, grid in zip(images, grids, strict=True)
    )


@torch.no_grad()
def gap(
    policy: Policy,
    asked: GenerationRequest,
    result: GenerationResult,
    shown: tuple[MediaValues, ...] = (),
    **settings,
) -> float:
    """Largest difference between the engine's log-probs and the policy's, over all sampled tokens."""
    num_prompt = len(result.prompt_token_ids)
    rows = [
        PolicyRow(
            token_ids=np.concatenate([result.prompt_token_ids, sequence.token_ids]),
            media=shown,
            sampled=np.arange(num_prompt + len(sequence.token_ids)) >= num_prompt,
            allowed_token_ids=asked.allowed_token_ids,
        )
        for sequence in result.outputs
    ]
    settings = {
        "banned_token_ids": asked.banned_token_ids,
        "temperature": asked.temperature,
        **settings,
    }
    logprobs = policy.forward_logprobs(collate(rows, pad_token_id=PAD_ID), **settings)
    return max(
        float(
            (values[num_prompt - 1 :][: len(sequence.logprobs)] - torch.from_numpy(sequence.logprobs))
            .abs()
            .max()
        )
        for values, sequence in zip(logprobs, result.outputs, strict=True)
    )


def test_images_over_the_budget_shrink_together(engine):
    (result,) = engine.generate([request(image(640, 480), image(300, 1024), image(300, 1024, seed=1))])
    assert result.error is None
    assert run_lengths(result.prompt_token_ids) == [165, 144, 144]
    assert [height * width // 4 for height, width in grids(result)] == [165, 144, 144]
    runs = find_runs(result.prompt_token_ids, GRAMMAR)
    assert {run.kind for run in runs} == {RunKind.WRAPPED}
    assert [item.runs for item in result.receipt.items] == [((run.offset, run.length),) for run in runs]


def test_text_logprobs_equal_the_policys(synced):
    engine, policy = synced
    asked = request(text="the quick brown fox " * 6, n=4, max_new_tokens=16)
    (result,) = engine.generate([asked])
    assert result.receipt.items == ()
    assert gap(policy, asked, result) < 2e-5


@pytest.mark.parametrize(
    "sizes",
    [[(128, 96)], [(640, 480), (300, 1024), (300, 1024)], [(33, 700), (257, 255)]],
    ids=["within budget", "over budget", "odd sizes"],
)
def test_image_logprobs_equal_the_policys_on_the_engines_grids(synced, sizes):
    engine, policy = synced
    images = [image(*size, seed=i) for i, size in enumerate(sizes)]
    asked = request(*images, n=4)
    (result,) = engine.generate([asked])
    right = gap(policy, asked, result, media(images, grids(result)))
    assert right < 5e-5
    swapped = [image(*size, seed=10 + i) for i, size in enumerate(sizes)]
    assert gap(policy, asked, result, media(swapped, grids(result))) > 10 * right


def test_wrong_grid_of_the_right_length_shows_in_the_gap(synced):
    engine, policy = synced
    images = [image(300, 200)]
    asked = request(*images, n=4)
    (result,) = engine.generate([asked])
    ((height, width),) = grids(result)
    assert gap(policy, asked, result, media(images, grids(result))) < 5e-5
    assert gap(policy, asked, result, media(images, [(width, height)])) > 5e-4


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.7},
        {"temperature": 0.0},
        {"temperature": 1.3, "allowed_token_ids": tuple(range(100, 110))},
        {"allowed_token_ids": (5, 100, 101), "banned_token_ids": (5,)},
    ],
    ids=["temperature", "greedy", "allowed set", "allowed set and ban"],
)
def test_processed_logprobs_are_mirrored(synced, settings):
    engine, policy = synced
    asked = request(image(128, 96), n=1 if settings.get("temperature") == 0 else 4, **settings)
    (result,) = engine.generate([asked])
    assert gap(policy, asked, result, media(asked.images, grids(result))) < 5e-5
    if asked.allowed_token_ids:
        assert all(set(s.token_ids.tolist()) <= set(asked.allowed_token_ids) for s in result.outputs)


def test_same_image_gets_its_own_size_in_each_request(engine):
    """The engine's caches are off: nothing of an earlier request decides what a later one sees."""
    big = image(640, 480)
    alone, crowded, again = engine.generate(
        [request(big), request(big, image(300, 1024), image(300, 1024)), request(big)]
    )
    assert run_lengths(alone.prompt_token_ids) == run_lengths(again.prompt_token_ids) == [252]
    assert run_lengths(crowded.prompt_token_ids)[0] == 165


def test_turn_continues_from_token_ids_with_more_images(synced):
    """The second turn appends to the ids of the first; the engine re-sizes the first image with the new ones."""
    engine, policy = synced
    images = (image(640, 480), image(300, 1024, seed=1), image(300, 1024, seed=2))
    first = request(images[0], max_new_tokens=4)
    (one,) = engine.generate([first])
    drawn = tuple(one.outputs[0].token_ids.tolist())
    tool = [{"role": "tool", "content": [{"type": "image"}, {"type": "image"}]}]
    message = TOKENIZER.apply_chat_template(tool, tokenize=False, add_generation_prompt=True)
    added = (*drawn, EOS_ID, *TOKENIZER.encode("\n" + message))
    second = dataclasses.replace(first, prompt_token_ids=(*first.prompt_token_ids, *added), images=images)
    (two,) = engine.generate([second])

    assert two.error is None
    assert run_lengths(one.prompt_token_ids) == [252]
    assert run_lengths(two.prompt_token_ids) == [165, 144, 144]
    shown = media(second.images, grids(two))
    assert gap(policy, second, two, shown) < 5e-5
    # Nothing but the runs changed: what was drawn in turn one stands in turn two, token for token.
    assert collapsed(two.prompt_token_ids) == list(second.prompt_token_ids)


def test_ban_holds_at_high_temperature(engine):
    asked = request(image(128, 96), n=50, max_new_tokens=4, temperature=2.0, seed=None)
    free = dataclasses.replace(asked, banned_token_ids=(), n=50, max_new_tokens=16)
    banned, unbanned = engine.generate([asked, free])
    drawn = np.concatenate([sequence.token_ids for sequence in banned.outputs])
    assert len(drawn) == 200
    assert not np.isin(drawn, BAN).any()
    assert np.isin(np.concatenate([sequence.token_ids for sequence in unbanned.outputs]), BAN).any()


def test_equal_seeds_draw_equal_tokens(engine):
    asked = request(image(128, 96), n=3)
    one, two = engine.generate([asked, asked])
    for left, right in zip(one.outputs, two.outputs, strict=True):
        assert left.token_ids.tolist() == right.token_ids.tolist()
    assert len({tuple(sequence.token_ids.tolist()) for sequence in one.outputs}) == 3


def test_more_prompt_tokens_than_a_step_takes_do_not_change_the_draws(synced):
    """Seeded requests that wait for their turn draw what they draw alone."""
    engine, policy = synced
    asked = [request(image(300, 200, seed=i), n=8, seed=i, max_new_tokens=4) for i in range(12)]
    crowded = engine.generate(asked)
    assert sum(len(result.prompt_token_ids) * 8 for result in crowded) > 2 * 4096
    for one, result in zip(asked[::5], crowded[::5], strict=True):
        assert gap(policy, one, result, media(one.images, grids(result))) < 5e-5
        (alone,) = engine.generate([one])
        for left, right in zip(alone.outputs, result.outputs, strict=True):
            assert left.token_ids.tolist() == right.token_ids.tolist()


def test_video_is_sized_per_frame_and_located(engine):
    frames = np.stack([np.asarray(image(80, 100, seed=i)) for i in range(5)])
    metadata = {"fps": 2.0, "frames_indices": [0, 1, 2, 3, 4], "total_num_frames": 5, "duration": 2.5}
    ids = tuple(TOKENIZER.encode("<|im_start|>user\n<video>\nwhat?<|im_end|>\n<|im_start|>assistant\n"))
    (result,) = engine.generate(
        [
            GenerationRequest(
                prompt_token_ids=ids,
                videos=(VideoInput(frames=frames, metadata={**metadata, "do_sample_frames": False}),),
                banned_token_ids=BAN,
            )
        ]
    )
    assert result.error is None
    (clip,) = result.receipt.items
    assert clip.geometry["pixel_values_flat_video"] == {"shape": [5, 3, 128, 96]}
    assert clip.frames.indices == (0, 1, 2, 3, 4) and clip.served == pixel_digest(frames)
    assert run_lengths(result.prompt_token_ids) == [12, 12, 12]
    offset, length = clip.range
    text = TOKENIZER.decode(result.prompt_token_ids[offset : offset + length])
    assert text.startswith("Frame 1 sampled at 0.00 seconds and frame 2 sampled at 0.50 seconds: <img>")
    assert text.endswith("</img>")


def refused() -> list:
    small = image(64, 64)
    return [
        pytest.param(request(small, text="x" * 600), "maximum context length is 512", id="too long"),
        pytest.param(request(*[small] * 5), "At most 4 image", id="too many images"),
        pytest.param(
            dataclasses.replace(request(small), images=()), "1 image tokens .* for 0 images", id="no image"
        ),
        pytest.param(
            request(small, text="a literal <image> token"), "2 image tokens .* for 1 images", id="phantom"
        ),
        pytest.param(
            dataclasses.replace(request(), prompt_token_ids=(3, 99999)),
            "99999|out of vocabulary",
            id="vocabulary",
        ),
        pytest.param(dataclasses.replace(request(), prompt_token_ids=()), "empty", id="empty prompt"),
        pytest.param(request(max_new_tokens=0), "max_tokens", id="nothing to sample"),
        pytest.param(request(temperature=-1.0), "temperature", id="negative temperature"),
        pytest.param(request(allowed_token_ids=()), "allowed_token_ids", id="nothing allowed"),
        pytest.param(request(small.convert("RGBA")), "image 0: expected .* mode RGBA", id="not RGB"),
        pytest.param(
            dataclasses.replace(request(small), images=(np.zeros((8, 8), np.uint8),)),
            r"expected uint8 \[height, width, 3\], found uint8 \(8, 8\)",
            id="grey array",
        ),
    ]


@pytest.mark.parametrize(("bad", "message"), refused())
def test_refused_request_stands_alone(engine, bad, message):
    bad = dataclasses.replace(bad, name="row-7")
    before, refusal, after = engine.generate([request(), bad, request()])
    assert refusal.outputs == ()
    assert refusal.error is not None and "'row-7'" in refusal.error
    assert re.search(message, refusal.error), refusal.error
    assert before.error is after.error is None
    assert len(before.outputs[0].token_ids) == len(after.outputs[0].token_ids) == 8


def nudged(policy: Policy, scale: float) -> dict[str, torch.Tensor]:
    """The policy's weights, each scaled a little: another model, still close to this one."""
    weights = policy.state_dict_for_engine()
    return {
        name: value * scale if name.startswith("language_model.") and "norm" not in name else value
        for name, value in weights.items()
    }


def test_every_parameter_arrives(synced):
    engine, policy = synced
    model = engine._engine.model
    loaded: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0)
    engine.update_weights(policy.state_dict_for_engine(), version=engine.version() + 1)
    loaded = dict(model.named_parameters())
    untouched = {name for name, value in loaded.items() if not value.any()}
    expected = policy.model.state_dict()
    # Biases of the vision tower start at zero in the checkpoint itself; vLLM never loads layer scales.
    zeros = {name for name in untouched if name.endswith((".bias", ".ls1", ".ls2"))}
    assert untouched == zeros
    torch.testing.assert_close(
        loaded["language_model.lm_head.weight"][: len(expected["language_model.lm_head.weight"])],
        expected["language_model.lm_head.weight"],
    )
    with torch.no_grad():
        for name, value in loaded.items():
            if name.endswith((".ls1", ".ls2")):
                value.fill_(1)
    asked = request(image(128, 96), n=4)
    (result,) = engine.generate([asked])
    assert gap(policy, asked, result, media(asked.images, grids(result))) < 5e-5


def test_update_between_requests_changes_what_is_drawn(synced):
    engine, policy = synced
    version = engine.version()
    asked = request(image(128, 96), n=4)
    (before,) = engine.generate([asked])
    engine.update_weights(nudged(policy, 1.5), version=version + 1, in_flight=False)
    (after,) = engine.generate([asked])
    assert (before.weight_version_start, before.weight_version_end) == (version, version)
    assert (after.weight_version_start, after.weight_version_end) == (version + 1, version + 1)
    assert [s.token_ids.tolist() for s in before.outputs] != [s.token_ids.tolist() for s in after.outputs]
    shown = media(asked.images, grids(after))
    assert gap(policy, asked, before, shown) < 5e-5
    assert gap(policy, asked, after, shown) > 1e-2


def start_long_request(engine: EngineActor, pool: ThreadPoolExecutor):
    before = engine.health()["num_requests"]
    future = pool.submit(engine.generate, [request(image(128, 96), n=2, max_new_tokens=400)])
    while engine.health()["num_requests"] == before or not engine.health()["num_running"]:
        time.sleep(0.001)
    return future


def test_update_in_flight_lands_within_a_running_request(synced):
    engine, policy = synced
    version = engine.version()
    with ThreadPoolExecutor() as pool:
        running = start_long_request(engine, pool)
        engine.update_weights(nudged(policy, 1.5), version=version + 1, in_flight=True)
        assert not running.done()
        (late,) = engine.generate([request()])
        (result,) = running.result()
    assert (late.weight_version_start, late.weight_version_end) == (version + 1, version + 1)
    assert (result.weight_version_start, result.weight_version_end) == (version, version + 1)
    for sequence in result.outputs:
        (_, start, change), (_, resumed, end) = sequence.weight_versions
        assert (start, end) == (0, 400)
        assert 0 < change == resumed < 400


def test_siblings_that_start_after_an_update_see_the_image_through_the_new_weights(synced, checkpoint):
    """More sequences than run at once share one image: its features from the old weights must not be reused."""
    engine, _ = synced
    trained = Policy.from_pretrained(checkpoint, lr=5e-3)
    asked = request(image(128, 96), n=100, max_new_tokens=24)
    with ThreadPoolExecutor() as pool:
        begun = engine.health()["num_requests"]
        future = pool.submit(engine.generate, [asked])
        while engine.health()["num_requests"] == begun or not engine.health()["num_running"]:
            time.sleep(0.001)
        version = engine.version() + 1
        row = PolicyRow(
            token_ids=[*prompt(0), GRAMMAR.start_id, *[IMAGE_ID] * 12, GRAMMAR.end_id],
            media=media([image(128, 96)], [(6, 8)]),
        )
        trained.forward_logprobs(collate([row], pad_token_id=PAD_ID)).mean().backward()
        trained.optimizer_step()
        engine.update_weights(trained.state_dict_for_engine(), version, in_flight=True)
        (result,) = future.result()
    late = tuple(s for s in result.outputs if [v for v, _, _ in s.weight_versions] == [version])
    assert 0 < len(late) < 100
    shown = media(asked.images, grids(result))
    assert gap(trained, asked, dataclasses.replace(result, outputs=late), shown) < 5e-5
    early = tuple(s for s in result.outputs if s not in late)
    assert gap(trained, asked, dataclasses.replace(result, outputs=early), shown) > 1e-3


def test_drained_update_waits_for_running_and_holds_back_later_requests(synced):
    engine, policy = synced
    version = engine.version()
    with ThreadPoolExecutor() as pool:
        running = start_long_request(engine, pool)
        update = pool.submit(engine.update_weights, nudged(policy, 1.5), version + 1, False)
        (result,) = running.result()
        update.result()
        (late,) = engine.generate([request()])
    assert (result.weight_version_start, result.weight_version_end) == (version, version)
    assert late.weight_version_start == version + 1


def test_unfit_weights_are_refused_unchanged(synced):
    engine, policy = synced
    version = engine.version()
    weights = policy.state_dict_for_engine()
    with pytest.raises(ValueError, match=f"expected more than the engine's {version}, found {version}"):
        engine.update_weights(weights, version=version)
    partial = dict(list(weights.items())[1:])
    with pytest.raises(ValueError, match="1 missing .*, 0 unknown"):
        engine.update_weights(partial, version=version + 1)
    with pytest.raises(ValueError, match="0 missing .*, 1 unknown .*surplus"):
        engine.update_weights({**weights, "surplus": torch.zeros(1)}, version=version + 1)
    assert engine.version() == version
    asked = request()
    (result,) = engine.generate([asked])
    assert gap(policy, asked, result) < 2e-5


def test_concurrent_callers_get_their_own_results(engine):
    sizes = [(64 + 32 * i, 96) for i in range(8)]
    barrier = threading.Barrier(len(sizes))

    def ask(i: int) -> GenerationResult:
        barrier.wait()
        (result,) = engine.generate([request(image(*sizes[i]), name=f"row-{i}", n=2, max_new_tokens=16)])
        return result

    with ThreadPoolExecutor(len(sizes)) as pool:
        results = list(pool.map(ask, range(len(sizes))))
    alone = [engine.generate([request(image(*size))])[0] for size in sizes]
    assert [result.name for result in results] == [f"row-{i}" for i in range(len(sizes))]
    assert [grids(result) for result in results] == [grids(result) for result in alone]
    assert engine.generate([]) == []


def test_engine_has_no_children_and_listens_on_loopback_only(engine, before):
    assert engine.health()["pid"] == os.getpid()
    children, sockets = before
    started = set(psutil.Process().children()) - children
    assert [child.cmdline() for child in started] == []
    assert {ip for ip, _ in listening() - sockets} <= {"127.0.0.1", "::1"}


def test_failing_step_answers_every_caller(config, monkeypatch):
    """A failure that is nobody's request ends the engine: waiting calls learn why, later ones at once."""
    from nemo_rl_ext.grpo.engine.vllm_engine import VllmEngine

    broken = EngineActor(config)
    broken.start()
    monkeypatch.setattr(VllmEngine, "step", lambda _: 1 / 0)
    with ThreadPoolExecutor(3) as pool:
        futures = [pool.submit(broken.generate, [request()]) for _ in range(3)]
        for future in futures:
            with pytest.raises(EngineError, match="ZeroDivisionError"):
                future.result()
    with pytest.raises(EngineError, match="not running: ZeroDivisionError"):
        broken.generate([request()])
    with pytest.raises(EngineError, match="not running"):
        broken.version()
    health = broken.health()
    assert (health["alive"], health["num_running"]) == (False, 0)
    broken.shutdown()


def test_not_a_checkpoint_is_one_clear_error(tmp_path):
    engine = EngineActor(EngineConfig(model=str(tmp_path)))
    with pytest.raises(ValueError, match="not a usable checkpoint: missing config.json"):
        engine.start()
    with pytest.raises(EngineError, match="not running: start failed"):
        engine.generate([request()])
    assert engine.health()["alive"] is False
    engine.shutdown()


def test_bad_argument_is_refused():
    with pytest.raises(ValueError, match="precision"):
        EngineConfig(model="x", precision="float16")
    with pytest.raises(ValueError, match="logprobs_mode"):
        EngineConfig(model="x", logprobs_mode="logits")
    with pytest.raises(ValueError, match="max_num_seqs"):
        EngineConfig(model="x", max_num_seqs=0)


def wait_until_gone(pid: int) -> None:
    deadline = time.monotonic() + 30
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, f"process {pid} survived"
        time.sleep(0.05)


def test_actor_serves_and_leaves_no_process_when_killed(cluster, config, policy):
    """bfloat16 this time, from a float32 checkpoint: what the demo runs."""
    import ray

    actor = start_engine(config.model_copy(update=dict(precision="bfloat16")))
    asked = request(image(128, 96), n=4, max_new_tokens=16)
    weights = ray.put(nudged(policy, 1.5))
    before = ray.get(actor.generate.remote([asked]))[0]
    ray.get(actor.update_weights.remote(weights, 7))
    after = ray.get(actor.generate.remote([asked, request(*[image(64, 64)] * 5)]))
    assert (before.weight_version_end, after[0].weight_version_start) == (0, 7)
    assert gap(policy, asked, before, media(asked.images, grids(before))) < 0.1
    assert after[0].error is None
    assert "At most 4 image" in after[1].error

    pid = ray.get(actor.health.remote())["pid"]
    children = [child.pid for child in psutil.Process(pid).children(recursive=True)]
    pending = actor.generate.remote([dataclasses.replace(asked, max_new_tokens=400)] * 8)
    ray.kill(actor)
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(pending)
    for survivor in (pid, *children):
        wait_until_gone(survivor)


def test_actor_refuses_a_directory_that_is_no_checkpoint(cluster, tmp_path):
    with pytest.raises(ValueError, match="not a usable checkpoint") as error:
        start_engine(EngineConfig(model=str(tmp_path)))
    assert "Traceback" not in str(error.value)
