# SPDX-License-Identifier: Apache-2.0
"""One family on the real engine: a tiny checkpoint, an engine with limits of its own, the policy, and media."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nemo_rl_ext.align.families.family import Layout
from nemo_rl_ext.align.families.registry import family_of
from nemo_rl_ext.align.grids import Size
from nemo_rl_ext.align.items import MediaItem
from nemo_rl_ext.align.turn import AlignedTurn, align_turn
from nemo_rl_ext.grpo.engine.requests import GenerationRequest, GenerationResult, VideoInput
from nemo_rl_ext.media.identity import pixel_digest
from nemo_rl_ext.receipts.evidence import evidence_of, items_of_turn

ENGINES: dict[str, dict[str, Any]] = {
    "nemotron": {"max_model_len": 700, "mm_processor_kwargs": {}},
    "qwen2_5_vl": {"mm_processor_kwargs": {"size": {"shortest_edge": 3136, "longest_edge": 15680}}},
    "qwen3_vl": {"mm_processor_kwargs": {"size": {"shortest_edge": 1024, "longest_edge": 16384}}},
    "internvl": {"mm_processor_kwargs": {"max_patches": 3}},
}
"""Per tiny checkpoint what its engine is started with that the trainer does not have."""

Shown = tuple[Any, MediaItem]
"""A medium as the engine is given it, and as the item that alignment knows."""


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """One request of a conversation: its result, its media, and from which of them on the turn is its own."""

    result: GenerationResult
    shown: tuple[Shown, ...]
    first: int
    offset: int

    @property
    def token_ids(self) -> np.ndarray:
        """The turn's own prompt, [tokens]."""
        return self.result.prompt_token_ids[self.offset :]

    @property
    def whole(self) -> np.ndarray:
        """Prompt and answer, [tokens]."""
        return np.concatenate((self.result.prompt_token_ids, self.result.outputs[0].token_ids))


class Scene:
    """An engine and a policy of one family's tiny checkpoint."""

    def __init__(self, name: str, folder: Path) -> None:
        from transformers import AutoTokenizer

        from nemo_rl_ext.grpo.engine.config import EngineConfig, LimitMMPerPromptConfig
        from nemo_rl_ext.grpo.engine.vllm_engine import VllmEngine
        from nemo_rl_ext.grpo.training.policy import Policy
        from nemo_rl_ext.models.checkpoint import build_tiny_checkpoint
        from nemo_rl_ext.models.tiny_families import build_tiny_family

        path = folder / name
        model = str(build_tiny_checkpoint(path) if name == "nemotron" else build_tiny_family(name, path))
        self.name, self.family = name, family_of(model, layout=Layout.NATIVE)
        self.tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
        self.engine = VllmEngine(
            EngineConfig(
                model=model,
                precision="float32",
                limit_mm_per_prompt=LimitMMPerPromptConfig(image=4, video=2),
                **{"max_model_len": 1024, **ENGINES[name]},
            )
        )
        self.policy = Policy.from_pretrained(model)
        self.banned = tuple(
            {token for own in self.family.grammars for token in (own.start_id, own.context_id)}
        )

    def prompt(self, kinds: Sequence[str]) -> np.ndarray:
        """One message with media of these kinds, unexpanded, [tokens]."""
        content = [*({"type": kind} for kind in kinds), {"type": "text", "text": "?"}]
        chat = [{"role": "user", "content": content}]
        text = self.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        return np.array(self.tokenizer(text, add_special_tokens=False).input_ids)

    def generate(self, shown: Sequence[Shown], prompt: np.ndarray | None = None) -> GenerationResult:
        """Eight tokens of the engine."""
        self.engine.add(
            GenerationRequest(
                prompt_token_ids=self.prompt([item.kind for _, item in shown]) if prompt is None else prompt,
                images=tuple(value for value, item in shown if item.kind == "image"),
                videos=tuple(value for value, item in shown if item.kind == "video"),
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

    def converse(self, turns: Sequence[Sequence[Shown]]) -> list[Exchange]:
        """One request per turn, each with all that was said before; a prompt that changed starts anew."""
        prompt, shown, exchanges = np.array([], dtype=np.int64), (), []
        for own in turns:
            prompt = np.concatenate((prompt, self.prompt([item.kind for _, item in own])))
            first, offset = len(shown), 0
            shown = (*shown, *own)
            result = self.generate(shown, prompt)
            if exchanges:
                before = exchanges[-1].whole
                if np.array_equal(result.prompt_token_ids[: len(before)], before):
                    offset = len(before)
                else:
                    first = 0
            exchanges.append(Exchange(result=result, shown=shown, first=first, offset=offset))
            prompt = np.concatenate((prompt, result.outputs[0].token_ids))
        return exchanges

    def align(self, exchange: Exchange, *, receipts: bool = True) -> AlignedTurn:
        """The turn's own media, judged by the engine's receipt or by the runs of our own request alone."""
        items = [item for _, item in exchange.shown[exchange.first :]]
        ids, evidence = exchange.token_ids, None
        if receipts:
            assert exchange.result.receipt is not None
            said = items_of_turn(exchange.result.receipt, exchange.first, exchange.offset)
            evidence = evidence_of(said, items, ids, self.family)
        return align_turn(ids, items, family=self.family, evidence=evidence, ordered=True)

    def gap(self, result: GenerationResult, *media: Mapping[str, torch.Tensor]) -> float:
        """Largest difference of log-probs of the answer when these values are what is trained on."""
        from nemo_rl_ext.grpo.training.batch import PolicyRow, collate

        (output,) = result.outputs
        ids = np.concatenate((result.prompt_token_ids, output.token_ids))
        # A shorter row beside it: padding must change nothing.
        rows = [PolicyRow(token_ids=ids, media=media), PolicyRow(token_ids=self.prompt(()), media=())]
        with torch.no_grad():
            ours = self.policy.forward_logprobs(collate(rows, pad_token_id=0), banned_token_ids=self.banned)
        ours = ours[0, len(ids) - 1 - len(output.token_ids) : len(ids) - 1]
        return float(np.abs(ours.numpy() - output.logprobs).max())


def medium(kind: str, seed: int, size: Size = (180, 300), frames: int = 20) -> Shown:
    """Seeded blocks of an image or a clip."""
    count = frames if kind == "video" else 1
    coarse = np.random.default_rng(seed).integers(0, 256, (count, 6, 6, 3), dtype=np.uint8)
    rows, columns = (np.arange(side) * 6 // side for side in size)
    pixels = np.ascontiguousarray(coarse[:, rows][:, :, columns])
    if kind == "image":
        item = MediaItem(
            size=size, source=f"image-{seed}", load=lambda: pixels, digest=pixel_digest(pixels[0])
        )
        return pixels[0], item
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
        digest=pixel_digest(pixels),
    )
    return VideoInput(frames=pixels, metadata=metadata), item


def _changed(
    item: MediaItem, flip: Callable[[np.ndarray], np.ndarray], size: Size | None = None
) -> MediaItem:
    return dataclasses.replace(
        item,
        size=size or item.size,
        digest="",
        load=lambda *wanted, load=item.load: np.ascontiguousarray(flip(load(*wanted))),
    )


def _transposed(item: MediaItem) -> MediaItem:
    height, width = item.size
    return _changed(item, lambda pixels: pixels.swapaxes(1, 2), (width, height))


WRONG: dict[str, tuple[tuple[str, ...], Callable[[list[MediaItem]], list[MediaItem]]]] = {
    "another image": (("image",), lambda _: [dataclasses.replace(medium("image", 7)[1], digest="")]),
    "image upside down": (("image",), lambda items: [_changed(items[0], lambda pixels: pixels[:, ::-1])]),
    "image transposed": (("image",), lambda items: [_transposed(items[0])]),
    "images swapped": (("image", "image"), lambda items: items[::-1]),
    "another clip": (("video",), lambda _: [dataclasses.replace(medium("video", 7, frames=8)[1], digest="")]),
    "frames backwards": (("video",), lambda items: [_changed(items[0], lambda pixels: pixels[::-1])]),
    "clip transposed": (("video",), lambda items: [_transposed(items[0])]),
}
"""What a trainer may hold in place of a request's media, with the same number of features: kinds shown, change."""


def gap_of_wrong(scene: Scene, name: str) -> float:
    """The log-prob gap when media of the right count and the wrong pixels are trained on."""
    kinds, change = WRONG[name]
    shown = [medium(kind, seed, frames=8) for seed, kind in enumerate(kinds)]
    result = scene.generate(shown)
    held = [dataclasses.replace(item, digest="") for item in change([item for _, item in shown])]
    seen = scene.align(Exchange(result=result, shown=tuple(shown), first=0, offset=0))
    grids = [judged.grid for judged in seen.report.media]
    if "transposed" in name:
        grids = [type(grid)(grid.width, grid.height) for grid in grids]
    rendered = [scene.family.render(item, grid) for item, grid in zip(held, grids, strict=True)]
    return scene.gap(result, scene.family.pack(held, grids, rendered).values)


class OwnPositions:
    """A family whose positions are left to transformers."""

    def __init__(self, family: Any) -> None:
        self.family = family

    def __getattr__(self, name: str) -> Any:
        return getattr(self.family, name)

    def sequence(
        self, token_ids: torch.Tensor, values: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """What the family gives, without its positions."""
        given = self.family.sequence(token_ids, values)
        return {key: value for key, value in given.items() if key != "position_ids"}


def gap_at_trainers_positions(scene: Scene) -> float:
    """The log-prob gap of a long clip when transformers counts the positions."""
    shown = [medium("video", 0)]
    result = scene.generate(shown)
    aligned = scene.align(Exchange(result=result, shown=tuple(shown), first=0, offset=0))
    assert aligned.tensors is not None
    family = scene.policy.family
    scene.policy.family = OwnPositions(family)  # type: ignore[assignment]
    try:
        return scene.gap(result, aligned.tensors.values)
    finally:
        scene.policy.family = family
