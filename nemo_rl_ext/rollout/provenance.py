# SPDX-License-Identifier: Apache-2.0
"""Which turns carry the rollout's own media, and the reattach that respects it.

A prompt group shares one set of static tensors, which the driver attaches again after a rollout came back
without them. Turns whose tensors the aligner changed are marked, and the reattach must leave them alone. A
rollout has two views, `input_message_log` and `message_log`, whose first messages are the same dict (also after
a Ray hop), so the mark may be consumed only after both views were visited.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from nemo_rl_ext.align.families.family import MediaTensors
from nemo_rl_ext.rollout.packed import is_packed, pack

ROLLOUT_MATCHED_MEDIA_KEY = "_rollout_matched_media"
"""Set on exactly those messages whose media the aligner changed; consumed by the reattach."""

VIEWS = ("input_message_log", "message_log")

Message = dict[str, Any]


def attach_rollout_media(message: Message, tensors: MediaTensors | None) -> None:
    """Give a message the media that its own tokens call for, and mark it."""
    detach_media(message)
    if tensors is not None:
        for key, value in tensors.values.items():
            message[key] = pack(key, value)
    message[ROLLOUT_MATCHED_MEDIA_KEY] = True


def detach_media(message: Message) -> None:
    """Remove every media value of a message; text, tokens and log-probs stay."""
    for key in [key for key, value in message.items() if is_packed(value)]:
        del message[key]


def media_of(message: Mapping[str, Any]) -> dict[str, Any]:
    """The media values of a message."""
    return {key: value for key, value in message.items() if is_packed(value)}


@contextlib.contextmanager
def marks_respected(logs: Sequence[Sequence[Message]], *, consume: bool = True) -> Iterator[None]:
    """Let media be attached to messages inside the block: what a mark protects is put back, then marks are consumed.

    `logs` are all the views of a rollout that the block visits; they may share messages. A mark never reaches a
    forward: pass `consume=False` only where a later call visits the same messages again.
    """
    protected = [
        (message, media_of(message))
        for log in logs
        for message in log
        if message.get(ROLLOUT_MATCHED_MEDIA_KEY)
    ]
    yield
    for message, media in protected:
        detach_media(message)
        message.update(media)
    if consume:
        consume_marks(message for log in logs for message in log)


def consume_marks(messages: Iterable[Message]) -> int:
    """Remove the mark from every message, so that it never reaches a forward; returns how many were marked."""
    return sum(message.pop(ROLLOUT_MATCHED_MEDIA_KEY, False) for message in messages)


def reattach_static_media(rollout: Mapping[str, Any], static_log: Sequence[Mapping[str, Any]]) -> None:
    """Attach a prompt's static media to a rollout's user turns, in place, wherever no mark protects them.

    `static_log` is the prompt's message log as the training side processed it. User turns are paired by their
    ordinal position; turns beyond the prompt (tool results) keep what they have. Afterwards no mark is left in
    any view, so a second call would overwrite repairs: call it once per rollout.

    Raises:
        ValueError: when the rollout has fewer user turns than the prompt.
    """
    sources = [message for message in static_log if message.get("role") == "user"]
    logs = [rollout[view] for view in VIEWS if rollout.get(view)]
    users = [[message for message in log if message.get("role") == "user"] for log in logs]
    found = max((len(targets) for targets in users), default=0)
    if found < len(sources):
        raise ValueError(
            f"a rollout came back with {found} user turns where static media of {len(sources)} turns were to be "
            "attached: they cannot be attached to the right turns; a rollout must not drop prompt messages"
        )
    with marks_respected(logs):
        for targets in users:
            for source, target in zip(sources, targets, strict=False):
                detach_media(target)
                target.update(media_of(source))
