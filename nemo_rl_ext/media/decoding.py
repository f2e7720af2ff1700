# SPDX-License-Identifier: Apache-2.0
"""The parent's side of the decoding child: one per process, replaced when it hangs or dies."""

from __future__ import annotations

import atexit
import json
import logging
import os
import select
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO, Any

import numpy as np

logger = logging.getLogger(__name__)

_PIPE_CHUNK = 1 << 20


class DecoderFailure(Exception):
    """A clip could not be decoded; one string that says how: what the library said, a crash, or a timeout."""


class DecoderMissing(Exception):
    """The chosen decoding library is not installed or does not load; one string."""


class DecoderProcess:
    """A child that decodes one clip at a time. Thread-safe; starts when first used."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """Process id of the running child."""
        return self._child.pid if self._child else None

    def request(self, message: dict[str, Any], timeout_s: float) -> tuple[dict[str, Any], np.ndarray | None]:
        """The child's reply, and uint8 frames `[frames, height, width, 3]` where it has any.

        Raises `DecoderFailure`, after which the child may have been replaced, or `DecoderMissing`.
        """
        with self._lock:
            child = self._running()
            try:
                reply, frames = self._exchange(child, message | {"timeout_s": timeout_s}, timeout_s)
            except (OSError, ValueError) as error:
                code = self._kill()
                if isinstance(error, TimeoutError):
                    raise DecoderFailure(f"the decoder gave no answer within {timeout_s:g} s") from None
                raise DecoderFailure(f"the decoder process died (exit code {code})") from None
        if "missing" in reply:
            raise DecoderMissing(f"{message['backend']} cannot be used: {reply['error']}")
        if "error" in reply:
            raise DecoderFailure(reply["error"])
        return reply, frames

    def close(self) -> None:
        """End the child; the next request starts another."""
        with self._lock:
            self._kill()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._child is None or self._child.poll() is not None:
            package_root = str(Path(__file__).resolve().parents[2])
            paths = [package_root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
            self._child = subprocess.Popen(
                [sys.executable, "-m", "nemo_rl_ext.media.decode_worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                # FFmpeg comments on every damaged packet; what matters comes back in the reply.
                stderr=subprocess.DEVNULL,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
            )
        return self._child

    def _exchange(
        self, child: subprocess.Popen[bytes], message: dict[str, Any], timeout_s: float
    ) -> tuple[dict[str, Any], np.ndarray | None]:
        deadline = time.monotonic() + timeout_s
        requests, replies = _pipes(child)
        requests.write(json.dumps(message).encode() + b"\n")
        requests.flush()
        received = bytearray()
        while (end := received.find(b"\n")) < 0:
            received += _receive(replies, deadline, _PIPE_CHUNK)
        reply = json.loads(received[:end])
        if "shape" not in reply:
            return reply, None
        frames = np.empty(reply["shape"], np.uint8)
        target = memoryview(frames.data).cast("B")
        filled = len(received) - end - 1
        target[:filled] = received[end + 1 :]
        while filled < len(target):
            chunk = _receive(replies, deadline, min(_PIPE_CHUNK, len(target) - filled))
            target[filled : filled + len(chunk)] = chunk
            filled += len(chunk)
        return reply, frames

    def _kill(self) -> int | None:
        child, self._child = self._child, None
        if child is None:
            return None
        child.kill()
        code = child.wait()
        requests, replies = _pipes(child)
        replies.close()
        try:
            requests.close()
        except OSError:
            logger.debug("the request to the decoder was still in its pipe when it ended")
        return code


def _pipes(child: subprocess.Popen[bytes]) -> tuple[IO[bytes], IO[bytes]]:
    assert child.stdin is not None and child.stdout is not None, (
        "a decoder is asked and answers through pipes"
    )
    return child.stdin, child.stdout


def _receive(replies: IO[bytes], deadline: float, limit: int) -> bytes:
    ready, _, _ = select.select([replies], [], [], max(0.0, deadline - time.monotonic()))
    if not ready:
        raise TimeoutError
    chunk = os.read(replies.fileno(), limit)
    if not chunk:
        raise OSError("the decoder closed its output")
    return chunk


_decoders: dict[int, DecoderProcess] = {}


def decoder() -> DecoderProcess:
    """This process's decoder; a forked process gets its own."""
    pid = os.getpid()
    if pid not in _decoders:
        _decoders.clear()
        _decoders[pid] = DecoderProcess()
        atexit.register(_decoders[pid].close)
    return _decoders[pid]
