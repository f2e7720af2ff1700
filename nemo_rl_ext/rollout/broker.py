# SPDX-License-Identifier: Apache-2.0
"""One render per distinct item in the whole cluster: who makes it, and where it is.

A broker is a named Ray actor without a CPU. It hands each identity to the first aligner that asks and lets the others
wait; it owns what aligners make, so that none of it dies with them, and opens none of it: the caller of a task owns
what the task returns, so it asks the aligner for what it has made.
A second one owns what could not be had again otherwise: the encoded media of references that carry their own data.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import ray
from cachetools import RRCache
from ray.exceptions import RayError

from nemo_rl_ext.rollout.losses import Loss, loss_of

Value = TypeVar("Value")

BROKER, SPARE = "nemo_rl_ext.media_broker", "nemo_rl_ext.media_sources"
STORE_SHARE = 0.25
"""Of the cluster's object store: what is kept for whoever asks next, beside what is in use."""

ASK_AGAIN_S = 5.0
"""How often a maker is asked whether it is still there, while others wait for what it makes."""


class MediaBroker:
    """Values by identity: each is made once, by the first who claims it.

    What has to go is drawn by lot, as in `rollout.cache`: a group's generations ask for the same items in the same
    order. What is forgotten here lives on as long as anybody refers to it.
    """

    def __init__(self, max_bytes: float) -> None:
        self._values: RRCache[str, tuple[Any, int]] = RRCache(
            max_bytes, choice=random.Random(0).choice, getsizeof=lambda entry: entry[1]
        )
        self._makers: dict[str, tuple[asyncio.Future[Any], Any]] = {}
        self._counts = {"made": 0, "shared": 0, "made_bytes": 0}

    async def claim(self, identity: str, maker: Any) -> tuple[bool, Any]:
        """(True, value), or (False, None) for the one who has to make it: `maker`, an actor that is a `Maker`."""
        while True:
            if identity in self._values:
                self._counts["shared"] += 1
                return True, self._values[identity][0]
            if identity not in self._makers:
                self._makers[identity] = (asyncio.get_running_loop().create_future(), maker)
                return False, None
            delivered, other = self._makers[identity]
            await asyncio.wait([delivered], timeout=ASK_AGAIN_S)
            if delivered.done():
                if delivered.result() is not None:
                    self._counts["shared"] += 1
                    return True, delivered.result()[0]
            elif self._makers.get(identity, (None,))[0] is delivered and not await _makes(other, identity):
                await self.abandon(identity)

    async def adopt(self, identity: str, maker: Any) -> list[Any]:
        """A reference to what the maker keeps under this name, owned here."""
        return [maker.take.remote(identity)]

    async def deliver(self, identity: str, value: Any, num_bytes: int) -> None:
        """Keep a value and give it to those who wait for it."""
        self._counts["made"] += 1
        self._counts["made_bytes"] += num_bytes
        if num_bytes <= self._values.maxsize:
            self._values[identity] = (value, num_bytes)
        self._settle(identity, (value,))

    async def abandon(self, identity: str) -> None:
        """The one who had to make it could not; the next who asks may try."""
        self._settle(identity, None)

    async def forget(self, identity: str) -> None:
        """What was made under this name is lost: the next who asks makes it anew."""
        self._values.pop(identity, None)

    def _settle(self, identity: str, outcome: Any) -> None:
        delivered, _ = self._makers.pop(identity, (None, None))
        if delivered is not None and not delivered.done():
            delivered.set_result(outcome)

    async def pid(self) -> int:
        """The process that this broker is."""
        return os.getpid()

    async def counts(self) -> dict[str, int]:
        """Values made and shared since the start, and the bytes that were made."""
        return dict(self._counts, waiting=len(self._makers), kept=len(self._values))


async def _makes(maker: Any, identity: str) -> bool:
    """Whether an actor is alive and at work on this; one that is too busy to answer is."""
    try:
        return bool(await asyncio.wait_for(maker.makes.remote(identity), timeout=ASK_AGAIN_S))
    except TimeoutError:
        return True
    except RayError as error:
        return loss_of(error) is not Loss.PROCESS


_making: dict[str, Any] = {}
"""What this process makes at this moment, and what of it is ready to be taken."""


class Maker:
    """What an actor in which `made_once` is called has to answer while it works."""

    @ray.method(concurrency_group="aside")
    def take(self, identity: str) -> Any:
        """What was made under this name; it stays until the owner has it."""
        return _making[identity]

    @ray.method(concurrency_group="aside")
    def makes(self, identity: str) -> bool:
        """Whether this is being made here."""
        return identity in _making


CONCURRENCY_GROUPS = {"aside": 2}
"""Of an actor that is a `Maker`."""


def owned(value: Any, name: str, broker: str) -> Any:
    """A reference to a value that the broker of this name owns; one that dies with this process where there is none."""
    handle = broker_handle(broker)
    if handle is None:
        return ray.put(value)
    _making[name] = value
    try:
        (reference,) = ray.get(handle.adopt.remote(name, ray.get_runtime_context().current_actor))
        ray.wait([reference], fetch_local=False)
    finally:
        del _making[name]
    return reference


def start_brokers(*, max_bytes: float | None = None) -> list[Any]:
    """Start the cluster's brokers, or find them. They live as long as somebody holds the handles that this returns."""
    if max_bytes is None:
        resources: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
        max_bytes = STORE_SHARE * resources.get("object_store_memory", 0.0)
    handles = []
    for name in (BROKER, SPARE):
        options: dict[str, Any] = dict(
            name=name,
            get_if_exists=True,
            num_cpus=0,
            max_restarts=-1,
            max_task_retries=-1,
            max_concurrency=1024,
        )
        handles.append(ray.remote(MediaBroker).options(**options).remote(max_bytes))
    return handles


class BrokersHandOver:
    """The job's brokers, held in the driver for as long as the job runs."""

    handles: list[Any] = []

    @classmethod
    def start(cls) -> bool:
        """Start them, once; whether they are there. Without Ray nothing is shared between processes."""
        if not ray.is_initialized():
            return False
        if broker_handle() is None:
            cls.handles = start_brokers()
        return True


def end_brokers(handles: Iterable[Any]) -> None:
    """End brokers, and with them everything that they own."""
    for handle in handles:
        ray.kill(handle)


def broker_handle(name: str = BROKER) -> Any:
    """The broker's actor; None where there is none."""
    try:
        return ray.get_actor(name) if ray.is_initialized() else None
    except ValueError:
        return None


def report_lost(identity: str) -> None:
    """Tell the broker, where there is one, that nobody else should be given what is lost."""
    handle = broker_handle()
    if handle is not None:
        handle.forget.remote(identity)


def made_once(identity: str, num_bytes: Callable[[Value], int], make: Callable[[], Value]) -> Value:
    """What the identity stands for: as the broker has it, else made here and delivered. Runs in an aligner's actor.

    Without a broker, or while it is being replaced, everybody makes their own.
    """
    broker = broker_handle()
    if broker is None:
        return make()
    try:
        found, value = ray.get(broker.claim.remote(identity, ray.get_runtime_context().current_actor))
    except RayError as error:
        if loss_of(error) is None:
            raise
        return make()
    if found:
        return value  # type: ignore[no-any-return]
    _making[identity] = None
    try:
        made = make()
        broker.deliver.remote(identity, made, num_bytes(made))
    except BaseException:
        broker.abandon.remote(identity)
        raise
    finally:
        del _making[identity]
    return made
