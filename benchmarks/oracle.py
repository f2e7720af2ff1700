# SPDX-License-Identifier: Apache-2.0
"""Counts wrong proofs: random requests, sized by the engine's own arithmetic, judged with and without its receipts.

A request has one to eight media over one to three turns: near-square images, ordinary ones and slivers, clips beside
images, text that is taken off the budget, a processor cache that is off, cold or warm, media in another order than the
row's, files that were rewritten. What the engine chose is known, so every proof can be held against it.

    python -m benchmarks oracle --family nemotron --requests 100000
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.oracle_engines import ENGINES, Engine, Served
from nemo_rl_ext.align.evidence import EngineRequest, Evidence
from nemo_rl_ext.align.families.family import MediaFamily
from nemo_rl_ext.align.items import MediaItem
from nemo_rl_ext.align.turn import verify_turn
from nemo_rl_ext.align.verdict import MediaReport, Verdict

MODES = ("runs", "runs of our own request", "receipts")
PROVEN = (Verdict.MATCHED, Verdict.REPAIRED)


@dataclass(frozen=True, kw_only=True)
class OracleTurn:
    """One turn as training sees it: its ids, the row's media, and what the engine had in their places."""

    token_ids: np.ndarray
    items: tuple[MediaItem, ...]
    served: tuple[Served, ...]
    evidence: tuple[Evidence, ...]
    request: EngineRequest | None
    swapped: bool


def conversation(engine: Engine, rng: np.random.Generator) -> Iterator[OracleTurn]:
    """The turns of one random conversation, a restarted one as the single turn that training makes of it."""
    total = int(rng.integers(1, 9))
    cuts = sorted(rng.integers(1, total + 1, int(rng.integers(0, 3))).tolist())
    spans = [(first, last) for first, last in zip([0, *cuts], [*cuts, total], strict=True) if last > first]
    items = [engine.draw(rng, place) for place in range(total)]
    order = order_shown(rng, spans)
    shown = [items[place] for place in order]
    rewritten = [engine.rewritten(item) if rng.random() < 0.02 else item for item in items]
    session = engine.session(rng)
    before: list[Served] = []
    for first, last in spans:
        served = session.request(shown[:last])
        if served is None:
            return
        restarts = [one.runs for one in served[:first]] != [one.runs for one in before]
        start = 0 if restarts else first
        own = slice(start, last)
        yield OracleTurn(
            token_ids=engine.write(served[own], rng),
            items=tuple(rewritten[own]),
            served=tuple(served[own]),
            evidence=tuple(_said(one, rng) for one in served[own]),
            request=_request(session.shares_one_budget, session.max_model_len, items[:last], served, start),
            swapped=order[own] != list(range(start, last)),
        )
        before = list(served)


def order_shown(rng: np.random.Generator, spans: Sequence[tuple[int, int]]) -> list[int]:
    """Places of a row's media as the engine is shown them; a fifth of the conversations shuffles them within turns."""
    order = list(range(spans[-1][1]))
    if rng.random() < 0.2:
        for first, last in spans:
            part = order[first:last]
            rng.shuffle(part)
            order[first:last] = part
    return order


def _request(
    shares: bool, max_model_len: int, items: Sequence[MediaItem], served: Sequence[Served], start: int
) -> EngineRequest | None:
    if not shares or any(item.kind == "video" for item in items):
        return None
    return EngineRequest(
        max_model_len=max_model_len,
        sizes=tuple(item.size for item in items),
        first=start,
        lengths=tuple(one.runs[0] for one in served),
    )


def _said(one: Served, rng: np.random.Generator) -> Evidence:
    """The receipt of one medium; a client named one in fifty."""
    return Evidence(
        grid=one.geometry.grid,
        tubelets=one.geometry.tubelets,
        frames=one.item.frame_indices or None,
        served=one.item.digest,
        named=bool(rng.random() < 0.02),
    )


def judge(family: MediaFamily, turn: OracleTurn, mode: str) -> Counter[str]:
    """Outcomes of one turn in one mode; `wrong ...` counts proofs that what the engine had contradicts."""
    report = verify_turn(
        turn.token_ids,
        turn.items,
        family=family,
        evidence=turn.evidence if mode == "receipts" else None,
        request=turn.request if mode != "runs" else None,
        ordered=mode == MODES[1] and not turn.swapped,
    )
    counts: Counter[str] = Counter({"turns": 1, "media": len(turn.items)})
    counts["masked turns"] += report.neutral
    as_they_were = all(
        one.item.digest == item.digest for one, item in zip(turn.served, turn.items, strict=True)
    )
    counts["turns as they were"] += as_they_were
    counts["masked as they were"] += report.neutral and as_they_were
    for reason in set(report.reasons()) if as_they_were and report.neutral else ():
        counts[f"masked as they were: {reason.value}"] += 1
    for reason in set(report.reasons()):
        counts[f"reason {reason.value}"] += 1
    if report.neutral:
        return counts
    for judged, item, one in zip(report.media, turn.items, turn.served, strict=True):
        assert judged.verdict in PROVEN
        counts[judged.verdict.value] += 1
        if item.content_hash != one.item.content_hash:
            counts[_kind_of_stranger(judged, item, one, mode)] += 1
        elif judged.grid != one.geometry.grid:
            counts["wrong geometry"] += 1
        elif (judged.frames or item.frame_indices) != one.item.frame_indices:
            # Times are written with one or two digits: frames that read the same are not seen without a receipt.
            counts["wrong frames" if mode == "receipts" else "unseen: frames of the same times"] += 1
    return counts


def _kind_of_stranger(judged: MediaReport, item: MediaItem, one: Served, mode: str) -> str:
    """Other content in an item's place: without a receipt only what leaves the runs as they are can get there."""
    if mode == "receipts" and judged.content_proven:
        return "wrong content"
    same = judged.static_grid is not None and judged.found == one.runs and judged.found == judged.expected
    own = one.item.source == item.source
    return (
        "unseen: rewritten file"
        if own
        else "unseen: alike runs"
        if _alike(judged, one, same)
        else "wrong order"
    )


def _alike(judged: MediaReport, one: Served, same: bool) -> bool:
    return same or judged.found == one.runs


def run(family: str, requests: int, seed: int, *, report_every: int = 0) -> dict[str, Counter[str]]:
    """Judge `requests` conversations of a family in every mode."""
    rng = np.random.default_rng(seed)
    engines = ENGINES[family](rng)
    totals: dict[str, Counter[str]] = {mode: Counter() for mode in MODES}
    for number in range(requests):
        engine = engines[number % len(engines)]
        for turn in conversation(engine, rng):
            for mode in MODES:
                totals[mode].update(judge(engine.family, turn, mode))
        for counts in totals.values():
            counts["requests"] += 1
        if report_every and (number + 1) % report_every == 0:
            print(json.dumps({"requests": number + 1, **summary(totals)}), flush=True)
    return totals


def summary(totals: dict[str, Counter[str]]) -> dict[str, object]:
    """Shares of masked turns, and every wrong or unseen thing, by mode."""
    return {
        mode: {
            "masked": round(counts["masked turns"] / max(counts["turns"], 1), 4),
            "masked as they were": round(
                counts["masked as they were"] / max(counts["turns as they were"], 1), 4
            ),
            **{name: count for name, count in sorted(counts.items()) if name.startswith(("wrong", "unseen"))},
        }
        for mode, counts in totals.items()
    }


def main(arguments: Sequence[str] | None = None) -> dict[str, object]:
    """Print what became of the requests; a wrong proof ends the run with a failure."""
    parser = argparse.ArgumentParser(prog="benchmarks oracle", description=__doc__.splitlines()[0])
    parser.add_argument("--family", choices=sorted(ENGINES), default="nemotron")
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    started = time.perf_counter()
    totals = run(options.family, options.requests, options.seed, report_every=max(1, options.requests // 10))
    result = {
        "family": options.family,
        "seconds": round(time.perf_counter() - started, 1),
        "modes": {mode: dict(sorted(counts.items())) for mode, counts in totals.items()},
    }
    print(json.dumps(result, indent=1))
    wrong = sum(
        count for counts in totals.values() for name, count in counts.items() if name.startswith("wrong")
    )
    if wrong:
        raise SystemExit(f"{wrong} wrong proofs")
    return result


if __name__ == "__main__":
    main()
