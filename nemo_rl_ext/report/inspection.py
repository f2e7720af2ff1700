# SPDX-License-Identifier: Apache-2.0
"""The offline check of stored rollouts: a verdict per media item, without pixels, an engine or Ray."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nemo_rl_ext.align.evidence import EngineRequest
from nemo_rl_ext.align.families.registry import family_of
from nemo_rl_ext.align.items import MediaItem
from nemo_rl_ext.align.runs import has_context
from nemo_rl_ext.align.turn import verify_turn
from nemo_rl_ext.align.verdict import MediaReport, TurnReport, Verdict
from nemo_rl_ext.media.policy import MediaPolicy
from nemo_rl_ext.media.reader import MediaReader, MediaSource
from nemo_rl_ext.media.video import Backend
from nemo_rl_ext.receipts.evidence import evidence_of
from nemo_rl_ext.report.stored_rows import StoredRow, stored_rows
from nemo_rl_ext.rollout.segments import Segment, to_segments

MAX_CACHED_ITEMS = 4096


@dataclass(frozen=True, kw_only=True)
class InspectConfig:
    """What a check needs to know of the run that stored the rollouts.

    `max_model_len` settles ties between grids by the engine's joint budget, where it is given. `decode` also decodes
    every medium, so that a broken file is found before a repair needs it; headers alone are read otherwise.
    """

    model_dir: Path
    policy: MediaPolicy
    base_dir: Path
    max_model_len: int | None = None
    num_frames: int = 8
    video_backend: Backend = "opencv"
    decode: bool = False


@dataclass(frozen=True, kw_only=True)
class RowResult:
    """What alignment would conclude about one stored rollout.

    `outcome` is `matched`, `repaired`, `masked`, or `unreadable` for a line without a rollout, which `problem` tells.
    """

    row_id: str
    line: int
    outcome: str
    turns: tuple[TurnReport, ...] = ()
    resizes: tuple[str, ...] = ()
    problem: str = ""

    def to_json(self) -> dict[str, Any]:
        """A flat description for machines."""
        return {
            "row_id": self.row_id,
            "line": self.line,
            "outcome": self.outcome,
            "problem": self.problem,
            "resizes": list(self.resizes),
            "turns": [_turn_json(turn) for turn in self.turns],
        }


@dataclass(kw_only=True)
class Totals:
    """Counts over a whole file."""

    rows: Counter[str] = field(default_factory=Counter)
    media: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)

    def add(self, result: RowResult) -> None:
        """Count one row."""
        self.rows[result.outcome] += 1
        for turn in result.turns:
            self.media.update(item.verdict.value for item in turn.media)
            self.reasons.update(reason.value for reason in turn.reasons())
        self.reasons["earlier_turn_resized"] += len(result.resizes)

    def failed(self, *, strict: bool) -> bool:
        """Whether a row would be masked or could not be read; strict: or repaired."""
        bad = self.rows["masked"] + self.rows["unreadable"] + (self.rows["repaired"] if strict else 0)
        return bad > 0 or not self.rows.total()

    def to_json(self) -> dict[str, Any]:
        """The sums by name."""
        reasons = {name: count for name, count in self.reasons.items() if count}
        return {"rows": dict(self.rows), "media": dict(self.media), "reasons": reasons}


class Inspector:
    """Judges stored rollouts with a checkpoint's own grammar and arithmetic."""

    def __init__(self, config: InspectConfig) -> None:
        self.config = config
        self.family = family_of(config.model_dir)
        self._reader = MediaReader(
            policy=config.policy,
            base_dir=config.base_dir,
            num_frames=config.num_frames,
            frames_per_tubelet=self.family.frames_per_tubelet(),
            backend=config.video_backend,
        )
        # The rollouts of a prompt group lie next to each other and share their media.
        self._items: dict[MediaSource, MediaItem] = {}
        self._tokenizer: Any = None

    def _encode(self, text: str) -> list[int]:
        """Text that NeMo-RL stored in the place of token ids."""
        if self._tokenizer is None:
            from transformers import AutoTokenizer

            self._tokenizer = AutoTokenizer.from_pretrained(str(self.config.model_dir), local_files_only=True)
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def rows(self, path: Path) -> Iterator[RowResult]:
        """Judge every line of a file, streaming."""
        for row in stored_rows(path, self._encode, self.family.grammars):
            if isinstance(row, StoredRow):
                yield self.row(row)
            else:
                line, problem = row
                yield RowResult(row_id=f"line-{line}", line=line, outcome="unreadable", problem=problem)

    def row(self, row: StoredRow) -> RowResult:
        """Judge one rollout the way a run would: turn by turn, split where an earlier image changed."""
        items = [self._item(source) for turn in row.media for source in turn]
        segments = to_segments(row.turns, self.family.grammars)
        reports = tuple(report for segment in segments for report in self._segment(row, segment, items))
        resizes = tuple(str(resize) for segment in segments for resize in segment.resizes)
        if any(report.neutral for report in reports):
            outcome = "masked"
        elif any(report.repaired for report in reports):
            outcome = "repaired"
        else:
            outcome = "matched"
        return RowResult(row_id=row.row_id, line=row.line, outcome=outcome, turns=reports, resizes=resizes)

    def _segment(self, row: StoredRow, segment: Segment, items: list[MediaItem]) -> Iterator[TurnReport]:
        users = {turn.message: turn for turn in segment.user_turns}
        for place, message in enumerate(segment.message_log):
            ids = message["token_ids"].numpy()
            user = users.get(place)
            media = items[user.first_media : user.last_media] if user is not None else []
            if not media and not has_context(ids, self.family.grammars):
                continue
            turn = user.turn if user is not None else segment.user_turns[-1].turn
            evidence = None
            if user is not None and user.receipt is not None:
                # A receipt names pixels; only decoding tells whether the files still hold them.
                media = [item.identified_if_readable() for item in media]
                evidence = evidence_of(user.receipt, media, ids, self.family)
            yield verify_turn(
                ids,
                media,
                family=self.family,
                request=self._request(items, row, user),
                evidence=evidence,
                row_id=row.row_id,
                turn=turn,
            )

    def _request(self, items: list[MediaItem], row: StoredRow, user: Any) -> EngineRequest | None:
        """The engine request that a turn's runs come from, for breaking ties."""
        if self.config.max_model_len is None or user is None:
            return None
        seen = items[: row.turns[user.turn].num_media]
        if any(item.error or item.kind != "image" for item in seen):
            return None
        return EngineRequest(
            max_model_len=self.config.max_model_len,
            sizes=tuple(item.size for item in seen),
            first=user.first_media,
        )

    def _item(self, source: MediaSource) -> MediaItem:
        found = self._items.get(source)
        if found is None:
            found = self._measure(source)
            if len(self._items) >= MAX_CACHED_ITEMS:
                for oldest in list(itertools.islice(self._items, MAX_CACHED_ITEMS // 2)):
                    del self._items[oldest]
            self._items[source] = found
        return found

    def _measure(self, source: MediaSource) -> MediaItem:
        if self.config.decode:
            try:
                facts, _ = self._reader.decode(source)
                return self._reader.item(source, facts)
            except (ValueError, OSError) as error:
                return MediaItem(kind=source.kind, size=(1, 1), source=source.name, error=str(error))
        return self._reader.measure(source)


def _turn_json(turn: TurnReport) -> dict[str, Any]:
    return {
        "turn": turn.turn,
        "neutral": turn.neutral,
        "expected": list(turn.expected),
        "found": list(turn.found),
        "reasons": sorted({reason.value for reason in turn.reasons()}),
        "detail": turn.detail,
        "media": [_media_json(item) for item in turn.media],
    }


def _media_json(item: MediaReport) -> dict[str, Any]:
    return {
        "kind": item.kind,
        "source": item.source,
        "size": list(item.size),
        "verdict": item.verdict.value,
        "reason": None if item.reason is None else item.reason.value,
        "detail": item.detail,
        "expected": list(item.expected),
        "found": list(item.found),
        "static_grid": None if item.static_grid is None else list(item.static_grid),
        "grid": None if item.grid is None else list(item.grid),
        "evidence": item.evidence,
        "would_repair": item.verdict is Verdict.REPAIRED,
    }
