# SPDX-License-Identifier: Apache-2.0
"""Local files that need not be read again: what the kernel says of the opened file is what it said before."""

from __future__ import annotations

import os
import time
from typing import BinaryIO, Generic, TypeVar

from cachetools import LRUCache

Facts = TypeVar("Facts")
State = tuple[int, ...]

MAX_FILES = 65536

SETTLED_S = 10.0
"""Age of the last change from which on another one must show: far above the steps of any file system's clock, and
above what the clocks of two machines should differ by."""


class UnchangedFiles(Generic[Facts]):
    """Facts of files by device, inode, size and the times of their last changes; never by a name.

    A write within one step of the file system's clock leaves all of these as they are, so that of a file that changed
    a moment ago nothing is kept. Times of the inode cannot be set back by a program.
    """

    def __init__(self) -> None:
        self._facts: LRUCache[State, Facts] = LRUCache(MAX_FILES)

    def state(self, handle: BinaryIO) -> State | None:
        """Of an opened file, taken before it is read; None for one that changed a moment ago."""
        status = os.fstat(handle.fileno())
        if time.time() - max(status.st_mtime, status.st_ctime) < SETTLED_S:
            return None
        return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns

    def get(self, state: State | None) -> Facts | None:
        """What is known of a file in this state."""
        return None if state is None else self._facts.get(state)

    def keep(self, state: State | None, facts: Facts) -> None:
        """Facts of a file that was read after it was found in this state."""
        if state is not None:
            self._facts[state] = facts
