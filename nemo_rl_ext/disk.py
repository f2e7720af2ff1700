# SPDX-License-Identifier: Apache-2.0
"""Faults of the file system as one sentence that names the path, the moment and what to do; homes that are none."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

logger = logging.getLogger(__name__)

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


def private_folder(name: str) -> Path:
    """A folder of this user alone among the temporary files: what lies in it is trusted.

    Raises:
        OSError: it is somebody else's, or cannot be made.
    """
    folder = Path(tempfile.gettempdir()) / f"{name}-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise PermissionError(
            f"{folder} is not this user's own; remove it, or set TMPDIR to another directory"
        )
    return folder


def require_home() -> None:
    """Give this process, and those that it starts, another home where theirs cannot be written to, and say so once.

    Ray, vLLM, transformers and numba keep a token, settings and caches there, and end or warn one by one without.
    """
    home = os.environ.get("HOME", "")
    try:
        with tempfile.TemporaryFile(dir=home or Path.home()):
            return
    except (OSError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
    folder = private_folder("nemo-rl-ext-home")
    os.environ["HOME"] = str(folder)
    os.environ.pop("XDG_CACHE_HOME", None)
    logger.warning(
        "the home directory %s cannot be written to (%s): this run keeps its caches in %s; set HOME to a directory "
        "that lasts, to keep them",
        home or "of this user",
        reason,
        folder,
    )
