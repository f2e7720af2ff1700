# SPDX-License-Identifier: Apache-2.0
"""Makes `grpo.media_alignment` work in a NeMo-RL that is started without the launcher.

Put this directory on PYTHONPATH: Python then runs this file at every start. It watches for one module of NeMo-RL and
does nothing else; `nemo_rl_ext.integration.plain_start` takes over when a script loads its recipe. A `sitecustomize`
of the environment's own is run as before.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from types import ModuleType

_HERE = os.path.dirname(os.path.abspath(__file__))
_WATCHED = "nemo_rl.utils.config"


class _Watch(importlib.abc.MetaPathFinder):
    """Finds the watched module as everybody else does, and has its functions replaced once it is loaded."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != _WATCHED:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                load(module)
                root = os.path.dirname(os.path.dirname(os.path.dirname(_HERE)))
                if root not in sys.path:
                    sys.path.append(root)
                from nemo_rl_ext.integration.plain_start import watch_recipe

                watch_recipe(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _run_the_environments_own() -> None:
    others = [entry for entry in sys.path if os.path.abspath(entry or ".") != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


sys.meta_path.insert(0, _Watch())
_run_the_environments_own()
