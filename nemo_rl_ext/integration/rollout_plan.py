# SPDX-License-Identifier: Apache-2.0
"""The aligned turns of one rollout, from the end of alignment to the message log that NeMo-RL makes of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nemo_rl_ext.align.turn import AlignedTurn
from nemo_rl_ext.integration.record import RolloutRecord
from nemo_rl_ext.integration.rollout_result import RECORD_KEY, mask_sample
from nemo_rl_ext.rollout.packed import pack
from nemo_rl_ext.rollout.provenance import attach_rollout_media


@dataclass(frozen=True, kw_only=True)
class RolloutPlan:
    """The aligned turns of one rollout; `user` and `assistant` hold one entry per trainable turn.

    None in `user` is a turn whose media the trainer holds and this actor cannot judge (a static video). None in
    `assistant` is an answer without media tokens, which is every answer of a policy that cannot sample them.
    """

    user: tuple[AlignedTurn | None, ...]
    assistant: tuple[AlignedTurn | None, ...]
    static_attached: bool
    record: RolloutRecord

    @property
    def keeps_initial(self) -> bool:
        """Whether the first turn's media must come back with the rollout although the trainer holds static ones."""
        return self.static_attached and bool(self.user) and self.user[0] is not None and self.user[0].changed

    def apply(self, result: dict[str, Any]) -> dict[str, Any]:
        """Attach the media to a post-processed rollout, in place, and add the record.

        Raises:
            ValueError: when NeMo-RL wants media back that this plan left to the trainer, or found other turns.
        """
        omitted = result.get("_initial_multimodal_data_omitted", False)
        log = result["message_log"]
        users = [message for message in log if message["role"] == "user"]
        answers = [message for message in log if message["role"] == "assistant"]
        if len(users) != len(self.user):
            raise ValueError(
                f"row {self.record.row_id}: NeMo-RL found {len(users)} turns, alignment {len(self.user)}; the two "
                "must read a Gym result alike"
            )
        for index, (message, turn) in enumerate(zip(users, self.user, strict=True)):
            if turn is None or (index == 0 and omitted and not turn.changed):
                continue
            if index == 0 and self.static_attached and not turn.changed and turn.report.media:
                raise ValueError(
                    f"row {self.record.row_id}: NeMo-RL wants the first turn's media back, although the agent used "
                    "exactly the request's images; the two must read a Gym result alike"
                )
            _attach(message, turn)
        for message, turn in zip(answers, self.assistant, strict=True):
            if turn is not None:
                _attach(message, turn)
        if self.record.neutral:
            mask_sample(result)
            if self.record.neutral_media.one_size:
                self.record.neutral_media.fill_row(log)
        result[RECORD_KEY] = self.record
        return result


def _attach(message: dict[str, Any], turn: AlignedTurn) -> None:
    if turn.changed:
        attach_rollout_media(message, turn.tensors)
    elif turn.tensors is not None:
        message.update({key: pack(key, value) for key, value in turn.tensors.values.items()})
