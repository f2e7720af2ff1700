# SPDX-License-Identifier: Apache-2.0
"""Loads the compiled kernels, for those who gain from them.

numba takes a second to import, and some seconds to compile once per machine, so nothing does so unasked: aligners call
`load` when they start, and everything else takes the kernels where they are loaded. It works without them, too, and
gives the same values.
"""

from __future__ import annotations

import logging
import threading
from types import ModuleType

from nemo_rl_ext.disk import private_folder

logger = logging.getLogger(__name__)

_lock = threading.Lock()
_tried = False
_kernels: ModuleType | None = None


def load() -> ModuleType | None:
    """`align.kernels`, compiled; None where numba is missing, switched off or cannot compile them."""
    global _tried, _kernels
    with _lock:
        if not _tried:
            _kernels, _tried = _import(), True
        return _kernels


def loaded() -> ModuleType | None:
    """`align.kernels` where `load` has brought them into this process."""
    return _kernels


def _import() -> ModuleType | None:
    try:
        import numba

        if numba.config.DISABLE_JIT:
            return None
        _own_no_dunder_names()
        try:
            from nemo_rl_ext.align import kernels
        except RuntimeError as error:
            if "cannot cache" not in str(error):
                raise
            # Neither the package's directory nor the user's cache can be written to.
            numba.config.CACHE_DIR = str(private_folder("nemo-rl-ext-kernels"))
            from nemo_rl_ext.align import kernels
    except ImportError as error:
        logger.info("no compiled kernels, resizing takes three times as long: %s", error)
        return None
    # Whatever a compiler may raise: numpy and torch do the work as well.
    except Exception as error:
        logger.warning("no compiled kernels, resizing takes three times as long: %s", error)
        return None
    return kernels


def _own_no_dunder_names() -> None:
    """Let llvmlite's library object claim functions of the library alone.

    It answers every name, `__dict__` too, with a function. vLLM 0.32 on a CPU looks into the `__dict__` of whatever
    is loaded when an engine starts, and would end there.
    """
    from llvmlite.binding import ffi

    claims = type(ffi.lib).__getattr__

    def __getattr__(self: object, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return claims(self, name)

    type(ffi.lib).__getattr__ = __getattr__
