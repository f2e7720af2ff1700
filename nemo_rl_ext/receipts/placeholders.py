# SPDX-License-Identifier: Apache-2.0
"""vLLM's own account of a request's media: `prompt_token_ids` and `mm_placeholders` in its answers (RFC #51472).

`/inference/v1/generate` returns both with `return_token_ids` since 0.32. They tell how many media of which kind a
request had and where each lies, and nothing of pixels, geometry or frames. Masks of features within a range are lost on
that way (vLLM #54548), so that ranges count only as far as they agree with the ids (`evidence.evidence_of`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nemo_rl_ext.receipts.receipt import ItemReceipt, Receipt, prompt_digest


def receipt_of_placeholders(prompt_token_ids: Sequence[int], mm_placeholders: Mapping[str, Any]) -> Receipt:
    """A receipt of places alone, from the ids int [tokens] and `{kind: [{"offset": ..., "length": ...}, ...]}`.

    Raises:
        ValueError: for what is no such account, or whose ranges overlap or lie beyond the ids.
    """
    places: list[tuple[int, int, str]] = []
    for kind, ranges in mm_placeholders.items():
        for place in ranges:
            try:
                places.append((int(place["offset"]), int(place["length"]), str(kind)))
            except (KeyError, TypeError, ValueError):
                raise ValueError(f"mm_placeholders: expected offset and length, found {place!r}") from None
    places.sort()
    end = 0
    for offset, length, kind in places:
        if offset < end or length < 1 or offset + length > len(prompt_token_ids):
            raise ValueError(
                f"mm_placeholders: {length} tokens of {kind} from token {offset} on do not fit behind token {end} of "
                f"{len(prompt_token_ids)}"
            )
        end = offset + length
    items = tuple(
        ItemReceipt(kind=kind, range=(offset, length), runs=((offset, length),))
        for offset, length, kind in places
    )
    return Receipt(prompt_tokens=len(prompt_token_ids), prompt=prompt_digest(prompt_token_ids), items=items)
