# SPDX-License-Identifier: Apache-2.0
"""Ray's ways to lose work: a process, a node or an object is gone, and the work itself did nothing wrong."""

from __future__ import annotations

import enum
import socket
from typing import Any

import ray
from ray.exceptions import (
    GetTimeoutError,
    LocalRayletDiedError,
    NodeDiedError,
    ObjectLostError,
    ObjectStoreFullError,
    OutOfDiskError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    RayTaskError,
    WorkerCrashedError,
)

CONNECT_S = 2.0
"""Longest time for a node to take a connection; a machine that is gone does not refuse one."""


class Loss(enum.Enum):
    """What is gone with the work."""

    PROCESS = "process"
    """The actor, or the machine that it ran on."""
    OBJECT = "object"
    """What went in or came out; the actor may well be there."""


_PROCESS = (
    RayActorError,
    WorkerCrashedError,
    NodeDiedError,
    OutOfMemoryError,
    LocalRayletDiedError,
    GetTimeoutError,
)
_OBJECT = (ObjectLostError, OutOfDiskError, ObjectStoreFullError)


def loss_of(error: BaseException) -> Loss | None:
    """What Ray lost, by the error that it raised; None for an error of the work itself.

    A task whose arguments were lost fails with a task error around the loss. An object lost with its owner or its
    node, or that nobody could make again (`OwnerDiedError`, `ObjectReconstructionFailedError`), is an object lost.
    """
    if isinstance(error, RayTaskError) and isinstance(error.cause, RayError):
        error = error.cause
    if isinstance(error, _OBJECT):
        return Loss.OBJECT
    if isinstance(error, _PROCESS):
        return Loss.PROCESS
    return None


def first_line(error: BaseException) -> str:
    """An error in one line; Ray's own run over many, with remote tracebacks."""
    cause = getattr(error, "cause", None) or error
    lines = str(cause).strip().splitlines()
    return f"{type(cause).__name__}: {lines[0]}" if lines else type(cause).__name__


def node_is_gone(node_id: str) -> bool:
    """Whether a node of the cluster has left it, known to Ray or not yet.

    Ray learns of a machine that lost its power by missed heartbeats, long after the actors on it died; until then its
    raylet is asked for a connection.
    """
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    node = next((found for found in nodes if found["NodeID"] == node_id), None)
    if node is None or not node["Alive"]:
        return True
    address = (node["NodeManagerAddress"], node["NodeManagerPort"])
    try:
        with socket.create_connection(address, timeout=CONNECT_S):
            return False
    except OSError:
        return True


def cluster_cpus() -> tuple[float, float]:
    """CPUs of the cluster that are free, and all of them."""
    free: dict[str, float] = ray.available_resources()  # type: ignore[no-untyped-call]
    every: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
    return free.get("CPU", 0.0), every.get("CPU", 0.0)
