# SPDX-License-Identifier: Apache-2.0
"""The parent's side of the decoding child: one per process, replaced when it hangs or dies."""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import threading
from multiprocessing import BufferTooShort, Pipe
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

_MAX_REPLY = 1 << 24
_LIVES = 2


class DecoderFailure(Exception):
    """A clip could not be decoded; one string that says how: what the library said, a crash, or a timeout."""


class DecoderMissing(Exception):
    """The chosen decoding library is not installed or does not load; one string."""


class DecoderProcess:
    """A child that decodes one clip at a time. Thread-safe; starts when first used."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None

    @property
    def pid(self) -> int | None:
        """Process id of the running child."""
        return self._child.pid if self._child else None

    def request(
        self, message: dict[str, Any], clip: BinaryIO, timeout_s: float
    ) -> tuple[dict[str, Any], np.ndarray | None]:
        """The child's reply, and uint8 frames `[frames, height, width, 3]` where it has any.

        `clip` is the open file: the child reads this very file and opens none itself. A child that dies is replaced and
        the clip tried once more, as something else may have killed it. Raises `DecoderFailure`, after which the child
        may have been replaced, or `DecoderMissing`.
        """
        with self._lock:
            reply, frames = self._tried(message | {"timeout_s": timeout_s}, clip, timeout_s)
        if "missing" in reply:
            raise DecoderMissing(f"{message['backend']} cannot be used: {reply['error']}")
        if "error" in reply:
            raise DecoderFailure(reply["error"])
        return reply, frames

    def close(self) -> None:
        """End the child; the next request starts another."""
        with self._lock:
            self._kill()

    def _tried(
        self, message: dict[str, Any], clip: BinaryIO, timeout_s: float
    ) -> tuple[dict[str, Any], np.ndarray | None]:
        codes: list[int | None] = []
        while len(codes) < _LIVES:
            child, connection = self._running()
            late = threading.Event()

            def end(child: subprocess.Popen[bytes] = child, late: threading.Event = late) -> None:
                late.set()
                child.kill()

            watch = threading.Timer(timeout_s, end)
            watch.daemon = True
            watch.start()
            try:
                return self._exchange(child, connection, message, clip)
            except (OSError, EOFError, ValueError, BufferTooShort):
                codes.append(self._kill())
                if late.is_set():
                    raise DecoderFailure(f"the decoder gave no answer within {timeout_s:g} s") from None
            finally:
                watch.cancel()
        raise DecoderFailure(f"the decoder process died {len(codes)} times (exit code {codes[-1]})")

    def _running(self) -> tuple[subprocess.Popen[bytes], Connection]:
        if self._child is None or self._connection is None or self._child.poll() is not None:
            self._kill()
            package_root = str(Path(__file__).resolve().parents[2])
            paths = [package_root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
            self._connection, theirs = Pipe()
            self._child = subprocess.Popen(
                [sys.executable, "-m", "nemo_rl_ext.media.decode_worker", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
            )
            theirs.close()
        return self._child, self._connection

    @staticmethod
    def _exchange(
        child: subprocess.Popen[bytes], connection: Connection, message: dict[str, Any], clip: BinaryIO
    ) -> tuple[dict[str, Any], np.ndarray | None]:
        connection.send_bytes(json.dumps(message).encode())
        send_handle(connection, clip.fileno(), child.pid)
        # JSON and plain bytes: nothing that a child gone astray could send is executed here.
        reply = json.loads(connection.recv_bytes(_MAX_REPLY))
        if "shape" not in reply:
            return reply, None
        frames = np.empty(reply["shape"], np.uint8)
        connection.recv_bytes_into(frames.data.cast("B"))
        return reply, frames

    def _kill(self) -> int | None:
        child, self._child = self._child, None
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if child is None:
            return None
        child.kill()
        return child.wait()


_decoders: dict[int, DecoderProcess] = {}


def decoder() -> DecoderProcess:
    """This process's decoder; a forked process gets its own."""
    pid = os.getpid()
    if pid not in _decoders:
        _decoders.clear()
        _decoders[pid] = DecoderProcess()
        atexit.register(_decoders[pid].close)
    return _decoders[pid]
