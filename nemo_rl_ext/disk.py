# SPDX-License-Identifier: Apache-2.0
"""Faults of the file system as one sentence that names the path, the moment and what to do."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Iterator
from pathlib import Path

_FULL = (errno.ENOSPC, errno.EDQUOT)


@contextlib.contextmanager
def explained_disk_faults(place: Path, moment: str, advice: Callable[[], str]) -> Iterator[None]:
    """Turn what the file system raises into a `ValueError`; `advice` is asked for only then.

    `place` is named where the fault names no path of its own.

    Raises:
        ValueError: no room, no permission, or any other fault of the file system.
    """
    try:
        yield
    except Exception as error:
        # safetensors raises an error of its own, with the system's in its text.
        if not isinstance(error, OSError) and type(error).__name__ != "SafetensorError":
            raise
        full = getattr(error, "errno", None) in _FULL or "No space left" in str(error)
        what = "the disk is full" if full else (getattr(error, "strerror", None) or str(error))
        path = getattr(error, "filename", None) or place
        raise ValueError(f"{path}: cannot be written {moment}: {what}; {advice()}") from error
