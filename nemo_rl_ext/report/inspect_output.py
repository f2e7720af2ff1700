# SPDX-License-Identifier: Apache-2.0
"""How `inspect` shows its results: a table for people, JSON Lines for machines."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import TracebackType
from typing import TextIO

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn
from rich.table import Table
from rich.text import Text

from nemo_rl_ext.align.verdict import TurnReport
from nemo_rl_ext.align.wording import counted
from nemo_rl_ext.report.inspection import RowResult, Totals
from nemo_rl_ext.report.wording import advice, why

STYLES = {"matched": "green", "repaired": "blue", "masked": "red", "unreadable": "red"}
MAX_RUNS = 8


class JsonOutput:
    """One object per row as soon as it is judged, and one with the sums at the end (`totals`)."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout

    def __enter__(self) -> JsonOutput:
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.flush()

    def row(self, path: Path, result: RowResult) -> None:
        self._write({"file": str(path), **result.to_json()})

    def totals(self, totals: Totals) -> None:
        self._write({"totals": totals.to_json()})

    def _write(self, value: object) -> None:
        self._stream.write(json.dumps(value) + "\n")


class TableOutput:
    """The first rows that did not match, then the sums; memory stays bounded however long the file is."""

    def __init__(self, *, show: int, console: Console | None = None) -> None:
        self.show, self.console = show, console or Console()
        self._shown: list[RowResult] = []
        self._num_rows = self._num_hidden = 0
        self._progress = Progress(
            SpinnerColumn(), TextColumn("{task.description}"), console=Console(stderr=True), transient=True
        )
        self._task = self._progress.add_task("reading")

    def __enter__(self) -> TableOutput:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._progress.stop()

    def row(self, path: Path, result: RowResult) -> None:
        self._num_rows += 1
        self._progress.update(self._task, description=f"{path.name}: checked {self._num_rows} rows")
        if result.outcome == "matched":
            return
        if len(self._shown) < self.show:
            self._shown.append(result)
        else:
            self._num_hidden += 1

    def totals(self, totals: Totals) -> None:
        self._progress.stop()
        if self._shown:
            self.console.print(self._table())
        if self._num_hidden:
            self._say(f"... {self._num_hidden} more rows; --show N prints them, --json all of them")
        for reason, count in totals.reasons.most_common():
            if count:
                self._say(f"{reason} x{count}: {why(reason)} {advice(reason)}".rstrip())
        rows = ", ".join(f"{totals.rows[name]} {name}" for name in STYLES if totals.rows[name]) or "none"
        media = ", ".join(f"{count} {name}" for name, count in totals.media.most_common()) or "none"
        self._say(f"{counted(totals.rows.total(), 'row')}: {rows}; media: {media}")

    def _say(self, line: str) -> None:
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _table(self) -> Table:
        table = Table(show_lines=True)
        for heading in (
            "row",
            "outcome",
            "turn",
            "expected runs",
            "found runs",
            "media: grid, what would be done",
        ):
            table.add_column(heading, overflow="fold")
        for result in self._shown:
            outcome = Text(result.outcome, STYLES[result.outcome])
            name = Text(f"{result.row_id}\n(line {result.line})")
            if not result.turns:
                table.add_row(name, outcome, "", "", "", Text(result.problem))
            for turn in result.turns:
                table.add_row(
                    name,
                    outcome,
                    str(turn.turn),
                    _lengths(turn.expected),
                    _lengths(turn.found),
                    Text(_media(turn)),
                )
                name = outcome = Text("")
        return table


def _lengths(values: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, values[:MAX_RUNS]))
    return shown + (f" and {len(values) - MAX_RUNS} more" if len(values) > MAX_RUNS else "")


def _media(turn: TurnReport) -> str:
    lines = [f"{turn.reason.value}: {turn.detail}"] if turn.reason is not None else []
    for item in turn.media:
        height, width = item.size
        grid = f"{item.static_grid} -> {item.grid}" if item.grid is not None else f"{item.static_grid} -> ?"
        reason = f" ({item.reason.value})" if item.reason is not None else ""
        detail = f"; by {item.evidence}" if item.evidence else ""
        detail += f"; {item.detail}" if item.detail else ""
        lines.append(
            f"{item.kind} {item.index}, {width}x{height} px: {grid}, {item.verdict.value}{reason}{detail}"
        )
    return "\n".join(lines)
