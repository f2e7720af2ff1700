# SPDX-License-Identifier: Apache-2.0
"""What happens to a rollout where it is collected: static media, marks, static checks, metrics.

Each function makes the replacement of one function of NeMo-RL out of the original, which still does its work.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import replace
from typing import Any

from nemo_rl_ext.align.turn import AlignedTurn
from nemo_rl_ext.align.verdict import MediaAlignmentError, Reason, TurnReport
from nemo_rl_ext.config.media_alignment import MediaAlignmentConfig
from nemo_rl_ext.integration.record import RolloutRecord
from nemo_rl_ext.integration.refusal import raise_if_asked
from nemo_rl_ext.integration.rollout_result import RECORD_KEY, mask_sample
from nemo_rl_ext.integration.static_check import check_static_turn
from nemo_rl_ext.rollout.broker import broker_handle
from nemo_rl_ext.rollout.errors import MaskedFractionError
from nemo_rl_ext.rollout.metrics import AlignmentMetrics, MaskedWindow
from nemo_rl_ext.rollout.packed import share_segments
from nemo_rl_ext.rollout.provenance import (
    ROLLOUT_MATCHED_MEDIA_KEY,
    VIEWS,
    attach_rollout_media,
    marks_respected,
    media_of,
)

logger = logging.getLogger(__name__)

Message = dict[str, Any]


def reattach_respecting_marks(original: Callable[..., None]) -> Callable[..., None]:
    """For `rollouts._reattach_static_multimodal_payloads_to_result`: one call visits both views of a rollout."""

    def reattach(
        result: dict[str, Any], source_message_log: list[Message], *args: Any, **options: Any
    ) -> None:
        with marks_respected([result[view] for view in VIEWS if result.get(view)]):
            original(result, source_message_log, *args, **options)
            record: RolloutRecord | None = result.get(RECORD_KEY)
            if record is not None:
                _check_static(result, record, source_message_log)

    return reattach


def attach_respecting_marks(original: Callable[..., None]) -> Callable[..., None]:
    """For `rollout_manager.attach_static_multimodal_payload`, which the single controller calls once per view.

    The prompt's view shares its message with the first completion, and comes first; marks are consumed with the
    view that also holds answers.
    """

    def attach(
        target_message_log: list[Message], source_message_log: list[Message], *args: Any, **options: Any
    ) -> None:
        is_last = any(message.get("role") == "assistant" for message in target_message_log)
        with marks_respected([target_message_log], consume=is_last):
            original(target_message_log, source_message_log, *args, **options)
        if broker_handle() is not None:
            share_segments(target_message_log)

    return attach


def _check_static(result: dict[str, Any], record: RolloutRecord, source_message_log: list[Message]) -> None:
    """Judge the turns that just got static media; a turn that does not fit becomes neutral, and says why."""
    num_static = sum(
        message.get("role") == "user" and bool(media_of(message)) for message in source_message_log
    )
    if not num_static and not record.has_video:
        return
    users = [message for message in result["message_log"] if message.get("role") == "user"]
    neutral_media = record.neutral_media
    reports = list(record.reports)
    judged = {(report.turn, report.neutral) for report in reports}
    for turn, message in enumerate(users[: max(num_static, 1)]):
        if message.get(ROLLOUT_MATCHED_MEDIA_KEY):
            continue
        report = check_static_turn(
            message,
            family=neutral_media.family,
            temporal_patch_size=record.temporal_patch_size,
            row_id=record.row_id,
            turn=turn,
        )
        if report is None:
            continue
        if report.neutral:
            _raise_if_asked(report, record.settings)
            attach_rollout_media(
                message, neutral_media.of_turn(message["token_ids"], clip=record.has_video and turn == 0)
            )
            mask_sample(result)
            reports = [item for item in reports if item.turn != turn]
        if report.neutral or (turn, False) not in judged:
            reports.append(report)
    judged_record = replace(record, reports=tuple(reports))
    if judged_record.neutral and neutral_media.one_size:
        neutral_media.fill_row(result["message_log"])
    result[RECORD_KEY] = judged_record


def _raise_if_asked(report: TurnReport, settings: MediaAlignmentConfig) -> None:
    try:
        raise_if_asked([report], settings)
    except MediaAlignmentError as error:
        from nemo_rl.experience.failures import RolloutDataFailure

        raise RolloutDataFailure(str(error)) from None


class RowLedger:
    """Counts rows in one process: metrics per prompt group, the masked share over a window."""

    def __init__(self, settings: MediaAlignmentConfig) -> None:
        # Verdicts that the settings want raised were raised where they arose, in the actor.
        self.metrics = AlignmentMetrics()
        self.window = MaskedWindow(size=settings.masked_window, max_fraction=settings.max_masked_fraction)
        # Prompt groups end in threads of their own; one must not flush what another has half counted.
        self._lock = threading.Lock()

    def add(self, records: Sequence[RolloutRecord]) -> dict[str, float]:
        """The metrics of one prompt group.

        Raises:
            MaskedFractionError: when too many of the last rows are masked.
        """
        with self._lock:
            flat = self._count(records)
        flat["alignment/bytes_shipped"] = float(sum(record.bytes_shipped for record in records))
        # NeMo-RL averages each key over the prompt groups that have it: a reason must be there when it is zero.
        return {f"alignment/reason/{reason.value}": 0.0 for reason in Reason} | flat

    def _count(self, records: Sequence[RolloutRecord]) -> dict[str, float]:
        for record in records:
            turns = [
                AlignedTurn(tensors=None, report=report, changed=report.repaired) for report in record.reports
            ]
            masked = self.metrics.add_row(turns)
            reasons = [reason for report in record.reports if report.neutral for reason in report.reasons()]
            self.window.add(reasons, masked=masked)
        return self.metrics.flush()


def group_with_metrics(original: Callable[..., Any]) -> Callable[..., Any]:
    """For `rollouts._postprocess_single_nemo_gym_group`: add the metrics, and zero neutral rows where flags are off.

    A masked share above the limit leaves it as NeMo-RL's data failure, which is not retried as if the fleet were at
    fault.
    """
    ledger: RowLedger | None = None

    def postprocess(
        nemo_gym_rows: list[dict[str, Any]], results: list[dict[str, Any]], *args: Any, **kwargs: Any
    ) -> Any:
        nonlocal ledger
        records: list[RolloutRecord | None] = [result.pop(RECORD_KEY, None) for result in results]
        group = original(nemo_gym_rows, results, *args, **kwargs)
        known = [record for record in records if record is not None]
        if not known:
            return group
        if any(record.shares for record in known):
            share_segments(message for log in group.final_batch["message_log"] for message in log)
        if not kwargs.get("mask_env_flagged_samples", True):
            _zero_loss(group.final_batch, [record is not None and record.neutral for record in records])
        if ledger is None:
            ledger = RowLedger(known[0].settings)
        try:
            group.rollout_metrics.update(ledger.add(known))
        except MaskedFractionError as error:
            from nemo_rl.experience.failures import RolloutDataFailure

            raise RolloutDataFailure(str(error)) from None
        return group

    return postprocess


def with_sums(original: Callable[..., Any]) -> Callable[..., Any]:
    """For `grpo.aggregate_rollout_metrics`: counts of a step's prompt groups, which it averages, are summed as well.

    `alignment/<name>/sum` is what the embedded run calls `alignment/<name>`.
    """

    def aggregate(per_group_metrics: Mapping[str, Sequence[float]], *args: Any, **options: Any) -> Any:
        aggregated = original(per_group_metrics, *args, **options)
        for key, values in per_group_metrics.items():
            if key.startswith("alignment/"):
                aggregated[f"{key}/sum"] = float(sum(values))
        return aggregated

    return aggregate


def _zero_loss(batch: MutableMapping[str, Any], neutral: Sequence[bool]) -> None:
    if any(neutral):
        multiplier = batch["loss_multiplier"].clone()
        multiplier[list(neutral)] = 0
        batch["loss_multiplier"] = multiplier
