# SPDX-License-Identifier: Apache-2.0
"""Receipts between the engine and whoever aligns its rollouts, under a key made of what survives on the way.

An agent framework hands on token ids and log-probs and drops every field that it does not know. Inside NeMo-RL a
`ReceiptStore` lives in a named Ray actor; beside the embedded engine it is a plain object.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np

from nemo_rl_ext.receipts.receipt import Receipt

logger = logging.getLogger(__name__)

ACTOR_NAME = "nemo_rl_ext.receipts"
CAPACITY = 65536


def rollout_key(
    prompt_token_ids: Sequence[int] | np.ndarray,
    token_ids: Sequence[int] | np.ndarray,
    logprobs: Sequence[float] | np.ndarray,
) -> str:
    """One sample of one request: prompt ids int [tokens], sampled ids int [sampled] and their log-probs [sampled].

    Log-probs are taken as float32, which is what the engine computes and what a JSON number gives back exactly.
    """
    digest = hashlib.sha256()
    for values, dtype in ((prompt_token_ids, "<i4"), (token_ids, "<i4"), (logprobs, "<f4")):
        array = np.asarray(values, dtype=dtype)
        digest.update(f"{len(array)}:".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


T = TypeVar("T")


class SampleStore(Generic[T]):
    """Keeps something about samples by key, the newest `capacity` of them. Thread-safe.

    Two samples that share a key have equal ids and equal log-probs. Where what is kept of them differs all the same,
    the key says nothing and gives nothing.
    """

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._capacity = capacity
        self._kept: OrderedDict[str, T | None] = OrderedDict()
        self._lock = threading.Lock()

    def put(self, keys: Sequence[str], value: T) -> None:
        """Keep one thing under the keys of some samples."""
        with self._lock:
            for key in keys:
                known = self._kept.pop(key, value)
                agrees = known is not None and self.facts(known) == self.facts(value)
                self._kept[key] = value if agrees else None
            while len(self._kept) > self._capacity:
                self._kept.popitem(last=False)

    def get(self, keys: Sequence[str]) -> list[T | None]:
        """What is kept of each key; None where nothing is known. It stays, for whoever asks again after a retry."""
        with self._lock:
            return [self._kept.get(key) for key in keys]

    def facts(self, value: T) -> Any:
        """What must agree between two samples of one key."""
        return value


class ReceiptStore(SampleStore[Receipt]):
    """The receipts of requests, by the keys of their samples."""

    def facts(self, value: Receipt) -> Any:
        """All but whether an item came from the cache, which is history."""
        items = tuple(msgspec.structs.replace(item, cached=False) for item in value.items)
        return msgspec.structs.replace(value, items=items)


def actor_handle(*, create: bool = False) -> Any:
    """The cluster's `ReceiptStore` actor; None where Ray or the actor is not there and is not to be made.

    It takes no CPU and is found by its name from every process of the job's namespace.
    """
    import ray

    if not ray.is_initialized():
        return None
    if create:
        options = dict(name=ACTOR_NAME, get_if_exists=True, num_cpus=0, max_restarts=-1)
        return ray.remote(ReceiptStore).options(**options).remote()
    try:
        return ray.get_actor(ACTOR_NAME)
    except ValueError:
        return None
