# SPDX-License-Identifier: Apache-2.0
"""A million damaged rollouts through alignment: none lost, none misattached, every neutral one with a reason.

Runs, frames and grids are judged by a second opinion that shares no code with alignment. A smaller number goes on
to tensors and through transformers' real forward, whose count of features against placeholder tokens must hold.

    python -m benchmarks fuzz --rollouts 1000000 --with-tensors 20000
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import multiprocessing
import os
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from benchmarks.fuzz_rollouts import Rollouts, Turn, fault
from nemo_rl_ext.align.families.nemotron import Layout, NemotronFamily
from nemo_rl_ext.align.turn import align_turn, verify_turn
from nemo_rl_ext.align.verdict import TurnReport

PER_TASK, PER_FORWARD = 5_000, 50


def tiny_family(folder: Path) -> Path:
    """A tiny checkpoint whose images stay small: 1 to 16 tokens."""
    from nemo_rl_ext.models.checkpoint import build_tiny_checkpoint

    return build_tiny_checkpoint(folder / "checkpoint", min_num_patches=4, max_num_patches=64)


def outcome(report: TurnReport) -> str:
    """What became of a turn."""
    return "neutral" if report.neutral else "repaired" if report.repaired else "matched"


def judge_numbers(model_dir: Path, seed: int, count: int) -> Counter[str]:
    """Verdicts of `count` rollouts from runs, labels and grids alone; no pixel is touched."""
    source = Rollouts(NemotronFamily.from_pretrained(model_dir, layout=Layout.NATIVE), seed)
    counts: Counter[str] = Counter()
    for _ in range(count):
        for turn in source.rollout():
            report = verify_turn(
                turn.token_ids, turn.media, family=source.family, captured=turn.captured, request=turn.request
            )
            _count(counts, turn, report, source)
        counts["rollouts"] += 1
    return counts


def _count(counts: Counter[str], turn: Turn, report: TurnReport, source: Rollouts) -> None:
    counts["turns"] += 1
    counts["damaged"] += bool(turn.damage)
    counts[outcome(report)] += 1
    for reason in set(report.reasons()):
        counts[f"reason {reason.value}"] += 1
    problem = fault(turn, report, source)
    if problem:
        raise AssertionError(f"{problem}; damage {turn.damage}, ids {turn.token_ids.tolist()}, {report}")


def judge_tensors(model_dir: Path, seed: int, count: int) -> Counter[str]:
    """`count` rollouts to their tensors and through the policy's forward, one row per turn."""
    from nemo_rl_ext.grpo.training.batch import PolicyRow, collate
    from nemo_rl_ext.grpo.training.policy import Policy

    source = Rollouts(
        NemotronFamily.from_pretrained(model_dir, layout=Layout.NATIVE), seed, broken_share=0.02
    )
    policy = Policy.from_pretrained(model_dir)
    counts: Counter[str] = Counter()
    rows: list[PolicyRow] = []

    def forward() -> None:
        # Rows of one length together, so that little of a batch is padding.
        rows.sort(key=lambda row: len(row.token_ids))
        for first in range(0, len(rows), PER_FORWARD):
            batch = rows[first : first + PER_FORWARD]
            with torch.no_grad():
                logprobs = policy.forward_logprobs(collate(batch, pad_token_id=0))
            assert len(logprobs) == len(batch) and torch.isfinite(logprobs).all()
            counts["rows forwarded"] += len(batch)
        rows.clear()

    for _ in range(count):
        for turn in source.rollout():
            # A forward needs a token before and after whatever the damage left.
            turn.token_ids = np.concatenate(([20], turn.token_ids, [20]))
            aligned = align_turn(
                turn.token_ids, turn.media, family=source.family, captured=turn.captured, request=turn.request
            )
            _count(counts, turn, aligned.report, source)
            values = aligned.tensors.values if aligned.tensors is not None else None
            rows.append(PolicyRow(token_ids=turn.token_ids, media=() if values is None else (values,)))
        counts["rollouts"] += 1
        if len(rows) >= 10 * PER_FORWARD:
            forward()
    if rows:
        forward()
    assert counts["rows forwarded"] == counts["turns"], "a row was lost"
    return counts


def main(arguments: Sequence[str] | None = None) -> dict:
    """Run both levels and print what became of the turns, and how many rollouts a second were judged."""
    parser = argparse.ArgumentParser(prog="benchmarks fuzz", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--rollouts", type=int, default=1_000_000, help="rollouts judged by runs, frames and grids"
    )
    parser.add_argument(
        "--with-tensors", type=int, default=20_000, help="rollouts taken through the real forward"
    )
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, default=None, help="write the results here as JSON")
    options = parser.parse_args(arguments)
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        model_dir = tiny_family(Path(folder))
        for name, judge, total in (
            ("numbers", judge_numbers, options.rollouts),
            ("tensors", judge_tensors, options.with_tensors),
        ):
            if total:
                results[name] = _run(name, judge, total, model_dir, options)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return results


def _run(name: str, judge, total: int, model_dir: Path, options: argparse.Namespace) -> dict:
    sizes = [min(PER_TASK, total - first) for first in range(0, total, PER_TASK)]
    level = ["numbers", "tensors"].index(name)
    started, cpu = time.perf_counter(), 0.0
    counts: Counter[str] = Counter()
    with concurrent.futures.ProcessPoolExecutor(
        options.workers,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=torch.set_num_threads,
        initargs=(1,),
    ) as pool:
        tasks = [
            pool.submit(_timed, judge, model_dir, (options.seed * 2 + level) * 1_000_000 + number, size)
            for number, size in enumerate(sizes)
        ]
        for task in concurrent.futures.as_completed(tasks):
            if error := task.exception():
                pool.shutdown(wait=False, cancel_futures=True)
                raise error
            part, seconds = task.result()
            counts.update(part)
            cpu += seconds
            if counts["rollouts"] * 10 // total > (counts["rollouts"] - part["rollouts"]) * 10 // total:
                print(
                    f"{name}: {counts['rollouts']} of {total} rollouts, {counts['rollouts'] / cpu:.0f} per CPU second",
                    flush=True,
                )
    wall = time.perf_counter() - started
    assert counts["rollouts"] == total, "a rollout was lost"
    result = {
        **counts,
        "wall_s": wall,
        "cpu_s": cpu,
        "rollouts_per_cpu_s": total / cpu,
        "rollouts_per_s": total / wall,
    }
    print(
        f"{name}: {json.dumps({key: round(value, 1) for key, value in sorted(result.items())})}", flush=True
    )
    return result


def _timed(judge, model_dir: Path, seed: int, count: int) -> tuple[Counter[str], float]:
    started = time.process_time()
    return judge(model_dir, seed, count), time.process_time() - started


if __name__ == "__main__":
    # Worker processes look the functions up under the module's own name.
    from benchmarks import fuzz

    fuzz.main()
