# SPDX-License-Identifier: Apache-2.0
"""Every family on the real engine, with limits of its own: what is repaired fits, and what is wrong shows."""

import dataclasses

import numpy as np
import pytest
import torch

pytestmark = pytest.mark.engine

FAMILIES = {
    "qwen3_vl": {"size": {"shortest_edge": 1024, "longest_edge": 16384}},
    "qwen2_5_vl": {"size": {"shortest_edge": 3136, "longest_edge": 15680}},
    "internvl": {"max_patches": 3},
}
"""Tiny checkpoints and the engine's own `mm_processor_kwargs`."""
PROMPTS = {"image": ("image",), "clip": ("video",), "both": ("image", "video"), "two": ("image", "image")}


class Scene:
    """An engine, a policy and media of one family."""

    def __init__(self, name, path):
        from transformers import AutoTokenizer

        from nemo_rl_ext.align.families.registry import family_of
        from nemo_rl_ext.grpo.engine.config import EngineConfig, LimitMMPerPromptConfig
        from nemo_rl_ext.grpo.engine.vllm_engine import VllmEngine
        from nemo_rl_ext.grpo.training.policy import Policy
        from nemo_rl_ext.models.tiny_families import build_tiny_family

        model = str(build_tiny_family(name, path / name))
        self.name, self.family = name, family_of(model)
        self.tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
        self.engine = VllmEngine(
            EngineConfig(
                model=model,
                precision="float32",
                max_model_len=1024,
                mm_processor_kwargs=FAMILIES[name],
                limit_mm_per_prompt=LimitMMPerPromptConfig(image=2, video=1),
            )
        )
        self.policy = Policy.from_pretrained(model)
        self.banned = tuple(
            {token for own in self.family.grammars for token in (own.start_id, own.context_id)}
        )

    def prompt(self, kinds):
        content = [*({"type": kind} for kind in kinds), {"type": "text", "text": "?"}]
        chat = [{"role": "user", "content": content}]
        text = self.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        return np.array(self.tokenizer(text, add_special_tokens=False).input_ids)

    def generate(self, inputs):
        from nemo_rl_ext.grpo.engine.requests import GenerationRequest

        self.engine.add(
            GenerationRequest(
                prompt_token_ids=self.prompt([item.kind for _, item in inputs]),
                images=tuple(value for value, item in inputs if item.kind == "image"),
                videos=tuple(value for value, item in inputs if item.kind == "video"),
                banned_token_ids=self.banned,
                max_new_tokens=8,
                seed=1,
                ignore_eos=True,
            )
        )
        while self.engine.num_running:
            if finished := self.engine.step():
                return finished[0][1]
        raise AssertionError("the engine finished nothing")

    def gap(self, result, values):
        """Largest difference of log-probs when `values` are what is trained on."""
        from nemo_rl_ext.grpo.training.batch import PolicyRow, collate

        (output,) = result.outputs
        ids = np.concatenate((result.prompt_token_ids, output.token_ids))
        row = PolicyRow(token_ids=ids, media=(values,))
        # A shorter row beside it: padding must change nothing.
        other = PolicyRow(token_ids=self.prompt(()), media=())
        with torch.no_grad():
            ours = self.policy.forward_logprobs(
                collate([row, other], pad_token_id=0), banned_token_ids=self.banned
            )
        ours = ours[0, len(ids) - 1 - len(output.token_ids) : len(ids) - 1]
        return float(np.abs(ours.numpy() - output.logprobs).max())


@pytest.fixture(scope="module", params=FAMILIES)
def scene(request, tmp_path_factory):
    scene = Scene(request.param, tmp_path_factory.mktemp("families"))
    yield scene
    scene.engine.shutdown()


def medium(kind, seed, size=(180, 300), frames=20):
    """Seeded blocks, as an engine input and as an item of alignment."""
    from nemo_rl_ext.align.items import MediaItem
    from nemo_rl_ext.grpo.engine.requests import VideoInput

    count = frames if kind == "video" else 1
    coarse = np.random.default_rng(seed).integers(0, 256, (count, 6, 6, 3), dtype=np.uint8)
    rows, columns = (np.arange(side) * 6 // side for side in size)
    pixels = np.ascontiguousarray(coarse[:, rows][:, :, columns])
    if kind == "image":
        return pixels[0], MediaItem(size=size, source=f"image-{seed}", load=lambda: pixels)
    indices = tuple(range(0, 12 * count, 12))
    metadata = {
        "total_num_frames": 12 * count,
        "fps": 24.0,
        "duration": count / 2,
        "video_backend": "opencv",
        "frames_indices": list(indices),
        "do_sample_frames": False,
    }
    item = MediaItem(
        kind="video",
        size=size,
        source=f"clip-{seed}",
        load=lambda wanted: pixels[[indices.index(index) for index in wanted]],
        frame_indices=indices,
        fps=24.0,
        total_frames=12 * count,
    )
    return VideoInput(frames=pixels, metadata=metadata), item


def aligned(scene, result, items):
    from nemo_rl_ext.align.turn import align_turn
    from nemo_rl_ext.receipts.evidence import evidence_of

    ids = result.prompt_token_ids
    evidence = evidence_of(result.receipt.items, items, ids, scene.family)
    turn = align_turn(ids, items, family=scene.family, evidence=evidence)
    assert not turn.report.neutral, str(turn.report)
    return turn


@pytest.mark.parametrize("name", PROMPTS)
def test_what_the_engine_saw_is_what_is_trained_on(scene, name):
    inputs = [medium(kind, seed, frames=8) for seed, kind in enumerate(PROMPTS[name])]
    result = scene.generate(inputs)
    turn = aligned(scene, result, [item for _, item in inputs])
    gap = scene.gap(result, turn.tensors.values)
    print(name, turn.report.repaired, f"{gap:.1e}")
    assert gap < 1e-5
    assert turn.report.repaired or "image" not in PROMPTS[name]


def changed(inputs, how):
    """The items of a request as a trainer would have them that holds other pixels of the same number."""
    items = [item for _, item in inputs]
    if how == "other":
        return [medium(item.kind, 7 + place, frames=8)[1] for place, item in enumerate(items)]
    if how == "swapped":
        return items[::-1]
    flip = {"backwards": lambda pixels: pixels[::-1], "upside down": lambda pixels: pixels[:, ::-1]}[how]
    return [
        dataclasses.replace(
            item, load=lambda *wanted, load=item.load: np.ascontiguousarray(flip(load(*wanted)))
        )
        for item in items
    ]


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("image", "other"),
        ("image", "upside down"),
        ("two", "swapped"),
        ("clip", "other"),
        ("clip", "backwards"),
    ],
)
def test_wrong_pixels_of_the_right_count_show(scene, name, how):
    inputs = [medium(kind, seed, frames=8) for seed, kind in enumerate(PROMPTS[name])]
    result = scene.generate(inputs)
    gap = scene.gap(result, aligned(scene, result, changed(inputs, how)).tensors.values)
    print(name, how, f"{gap:.1e}")
    assert gap > 1e-3


class OwnPositions:
    """A family whose positions are left to transformers."""

    def __init__(self, family):
        self.family = family

    def __getattr__(self, name):
        return getattr(self.family, name)

    def sequence(self, token_ids, values):
        given = self.family.sequence(token_ids, values)
        return {key: value for key, value in given.items() if key != "position_ids"}


def test_a_clip_at_the_trainers_own_positions_shows(scene):
    if scene.name != "qwen2_5_vl":
        pytest.skip("transformers' positions are the engine's")
    inputs = [medium("video", 0)]
    result = scene.generate(inputs)
    values = aligned(scene, result, [inputs[0][1]]).tensors.values
    right, family = scene.gap(result, values), scene.policy.family
    scene.policy.family = OwnPositions(family)
    try:
        wrong = scene.gap(result, values)
    finally:
        scene.policy.family = family
    print("positions", f"{right:.1e} {wrong:.1e}")
    assert right < 1e-5 and wrong > 1e-3


def test_trained_weights_reach_the_engine(scene):
    from nemo_rl_ext.grpo.training.batch import PolicyRow, collate

    inputs = [medium("image", 5)]
    before = scene.generate(inputs)
    values = aligned(scene, before, [inputs[0][1]]).tensors.values
    ids = np.concatenate((before.prompt_token_ids, before.outputs[0].token_ids))
    row = PolicyRow(token_ids=ids, media=(values,))
    scene.policy.forward_logprobs(collate([row], pad_token_id=0)).mean().backward()
    assert scene.policy.optimizer_step() > 0
    assert scene.gap(before, values) > 1e-4
    scene.engine.load_weights(scene.policy.state_dict_for_engine(), scene.engine.version + 1)
    after = scene.generate(inputs)
    assert scene.gap(after, values) < 1e-5
