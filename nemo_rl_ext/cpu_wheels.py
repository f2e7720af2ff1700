# SPDX-License-Identifier: Apache-2.0
"""Let vLLM and transformers import where torch is a CPU build and its companions are CUDA builds.

The Linux wheels of torchvision, torchaudio and torchcodec that package indexes usually offer link against
CUDA libraries. Beside a CPU-only torch their shared objects cannot be loaded, and three imports die of it:

* ``torchvision/_meta_registrations.py``: ``operator torchvision::nms does not exist``;
* ``torchaudio/_extension/__init__.py``: ``OSError`` (transformers' ``audio_utils`` imports torchaudio);
* ``torchcodec``: ``OSError``, where vLLM's ``multimodal/media/audio.py`` guards only ``ImportError``.

Nothing here uses audio or those two operators, so it is enough that the imports survive. Each cure acts after
the real library was tried and failed, and only beside a CPU-only torch: on a matching installation, or on a
CUDA one, this module changes nothing.

``install()`` writes a one-line ``.pth`` file into the environment (``make setup`` calls it), so that every
interpreter there, Ray workers included, calls ``activate()`` at start. That is why only ``sys`` is imported. Where the
package came as a wheel, the command and the actors that import vLLM or transformers call ``activate()`` themselves.
"""

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType
    from typing import Any

PTH_NAME = "nemo_rl_ext_cpu_wheels.pth"
# Silent when the package has moved away: a broken .pth would print a traceback at every interpreter start.
# site executes only lines that begin with "import", one line at a time, hence the exec.
PTH_LINE = (
    "import sys; exec("
    r'"try:\n from nemo_rl_ext.cpu_wheels import activate\nexcept ImportError:\n pass\nelse:\n activate()"'
    ")\n"
)

_keep_alive: "list[Any]" = []  # torch drops a library's operators when its Library object is collected


def _torch_is_cpu_only() -> bool:
    torch = sys.modules.get("torch")
    version = getattr(torch, "version", None)
    return version is not None and version.cuda is None and getattr(version, "hip", None) is None


def _declare_torchvision_ops(module: "Any") -> None:
    """Declare the two operators that torchvision registers meta kernels for, if its own library did not."""
    if module._has_ops() or not _torch_is_cpu_only():
        return
    import torch

    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _keep_alive.append(library)


def _tolerate_missing_torchaudio_library(module: "Any") -> None:
    """Make torchaudio treat a library that cannot be loaded like one that was not built."""
    load = module._load_lib

    def load_or_skip(lib: str) -> bool:
        try:
            loaded = bool(load(lib))
            if loaded and lib == "_torchaudio":
                # torchaudio raises when the first loads and the second does not; try both before saying yes.
                load("libtorchaudio")
            return loaded
        except OSError:
            if not _torch_is_cpu_only():
                raise
            return False

    module._load_lib = load_or_skip


# Module -> what to do once it has run; None: only turn its OSError into the ImportError that callers expect.
_CURES: "dict[str, Callable[[ModuleType], None] | None]" = {
    "torchvision.extension": _declare_torchvision_ops,
    "torchaudio._extension.utils": _tolerate_missing_torchaudio_library,
    "torchcodec": None,
}


class _CuringLoader:
    """Runs the real loader, then the cure; afterwards the module carries its real loader again."""

    def __init__(self, loader: "Any", cure: "Callable[[ModuleType], None] | None") -> None:
        self._loader = loader
        self._cure = cure

    def __getattr__(self, name: str) -> "Any":
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._loader, name)

    def create_module(self, spec: "Any") -> "Any":
        return self._loader.create_module(spec)

    def exec_module(self, module: "Any") -> None:
        module.__spec__.loader = module.__loader__ = self._loader
        try:
            self._loader.exec_module(module)
        except OSError as error:
            if self._cure is None and _torch_is_cpu_only():
                message = f"{module.__name__} does not load beside a CPU-only torch: {error}"
                raise ImportError(message) from error
            raise
        if self._cure is not None:
            self._cure(module)


class _CuringFinder:
    """Asks the other finders for the few modules in ``_CURES`` and wraps the loader they name."""

    def find_spec(self, name: str, path: "Any" = None, target: "Any" = None) -> "Any":
        if name not in _CURES:
            return None
        for finder in sys.meta_path:
            find_spec = None if finder is self else getattr(finder, "find_spec", None)
            spec = find_spec(name, path, target) if find_spec else None
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _CuringLoader(spec.loader, _CURES[name])
                return spec
        return None


def activate() -> None:
    """Put the finder in front of ``sys.meta_path``; calling it again changes nothing."""
    if not any(type(finder).__name__ == _CuringFinder.__name__ for finder in sys.meta_path):
        sys.meta_path.insert(0, _CuringFinder())


def install(site_packages: str | None = None) -> str:
    """Write the ``.pth`` file into site-packages (default: this interpreter's) and return its path."""
    import os
    import sysconfig

    directory = site_packages or sysconfig.get_paths()["purelib"]
    path = os.path.join(directory, PTH_NAME)
    with open(path, "w", encoding="utf-8") as file:
        file.write(PTH_LINE)
    return path
