# SPDX-License-Identifier: Apache-2.0
"""Faults and differences of engines and trainers that the alignment of a family has to live with: the one list."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Upstream:
    """One of them: whose media it touches, what it is, where it is described, and what becomes of it here."""

    families: tuple[str, ...]
    what: str
    reference: str
    here: str


KNOWN: tuple[Upstream, ...] = (
    Upstream(
        families=("qwen3_vl",),
        what="the prompt's own vision delimiters stay around the delimited runs of a clip",
        reference="vLLM #46817",
        here="read as they stand; trained on as sampled",
    ),
    Upstream(
        families=("qwen2_5_vl",),
        what="the text behind a long clip starts at another position than in the engine",
        reference="transformers 5.19, `get_rope_index`",
        here="the engine's positions are passed",
    ),
    Upstream(
        families=("qwen2_5_vl",),
        what="positions of a clip's patches were wrong",
        reference="transformers #45381 (5.3)",
        here="the engine's positions are passed",
    ),
    Upstream(
        families=("qwen2_5_vl",),
        what="fractions of a second between tubelets were cut off",
        reference="transformers #48669",
        here="the engine's positions are passed",
    ),
    Upstream(
        families=("qwen2_5_vl",),
        what="positions of still images were scaled by `tokens_per_second`",
        reference="transformers #45325 (5.3)",
        here="the engine's positions are passed",
    ),
    Upstream(
        families=("internvl",),
        what="the engine writes `<video>` where the forward counts `<IMG_CONTEXT>`",
        reference="vLLM 0.32 `interns1.py`, transformers `modeling_internvl.py`",
        here="mapped for the forward alone",
    ),
    Upstream(
        families=("internvl",),
        what="`InternVLChatModel` resizes with Pillow, transformers' model with torchvision: up to 15/255 apart",
        reference="vLLM `processors/internvl.py`",
        here="config.json says which",
    ),
    Upstream(
        families=("nemotron",),
        what="all images of a request share one budget, so a later turn can re-size an earlier image",
        reference="vLLM `nano_nemotron_vl.py`",
        here="two sequences, each on its own prompt",
    ),
    Upstream(
        families=("nemotron",),
        what="two clips of different sizes in one request are refused: their frames are concatenated",
        reference="vLLM 0.32 `nano_nemotron_vl.py`",
        here="the row is refused by the engine, by name",
    ),
    Upstream(
        families=("nemotron",),
        what="a string prompt's text is taken off that budget",
        reference="vLLM 0.25.1; not 0.32.0",
        here="receipts, or every budget must agree",
    ),
)
