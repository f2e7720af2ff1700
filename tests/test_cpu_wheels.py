# SPDX-License-Identifier: Apache-2.0
"""A CPU-only torch beside CUDA builds of torchvision, torchaudio and torchcodec, as installed here."""

import subprocess
import sys
import textwrap
from importlib.util import find_spec
from pathlib import Path

import pytest

from nemo_rl_ext import cpu_wheels

WITHOUT_CURE = (
    "import sys; sys.meta_path[:] = [f for f in sys.meta_path if type(f).__name__ != '_CuringFinder']\n"
)
WITH_CURE = "from nemo_rl_ext.cpu_wheels import activate; activate()\n"


def run(script: str, *flags: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, *flags, "-c", script], capture_output=True, text=True)


def is_mismatched() -> bool:
    """Whether torch is a CPU build and torchvision a CUDA build, read without importing either."""
    versions = []
    for name in ("torch", "torchvision"):
        spec = find_spec(name)
        if spec is None:
            return False
        versions.append((Path(spec.origin).parent / "version.py").read_text(encoding="utf-8"))
    return "+cpu" in versions[0] and "+cu1" in versions[1]


mismatched = pytest.mark.skipif(not is_mismatched(), reason="torchvision matches torch here, nothing to cure")


@pytest.mark.slow
@mismatched
def test_companions_import_with_the_cure():
    done = run(
        WITH_CURE + "import torchvision, torchaudio\n"
        "try:\n import torchcodec\nexcept ImportError: pass\n"
        "import inspect, torchvision.extension as e; inspect.getsource(e)\n"
        "print(type(e.__spec__.loader).__name__, type(e.__loader__).__name__, e._has_ops())"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["SourceFileLoader", "SourceFileLoader", "False"]


@mismatched
def test_without_the_cure_the_import_fails():
    done = run(WITHOUT_CURE + "import torchvision")
    assert "operator torchvision::nms does not exist" in done.stderr


@mismatched
@pytest.mark.parametrize(
    ("module", "message"),
    [("torchvision", "operator torchvision::nms does not exist"), ("torchaudio", "OSError")],
)
def test_beside_a_cuda_torch_a_library_that_fails_still_fails(module, message):
    # There a failed load is a broken installation, and hiding it would only move the error.
    done = run(WITH_CURE + f"import torch; torch.version.cuda = '13.0'\nimport {module}")
    assert message in done.stderr


@pytest.mark.engine
def test_engine_imports_in_a_fresh_interpreter_of_this_environment():
    done = run("import vllm, transformers, ray; from vllm.multimodal.media import audio")
    assert done.returncode == 0, done.stderr


def test_activating_twice_adds_one_finder():
    done = run(
        WITHOUT_CURE + WITH_CURE + "activate()\n"
        "print(sum(type(f).__name__ == '_CuringFinder' for f in sys.meta_path))"
    )
    assert done.stdout.strip() == "1", done.stderr


def test_other_modules_are_left_to_the_other_finders():
    assert cpu_wheels._CuringFinder().find_spec("json") is None


def test_installed_line_activates_at_interpreter_start(tmp_path):
    assert cpu_wheels.install(str(tmp_path)) == str(tmp_path / cpu_wheels.PTH_NAME)
    done = run(
        WITHOUT_CURE + f"import site; site.addsitedir({str(tmp_path)!r})\n"
        "print([type(f).__name__ for f in sys.meta_path].count('_CuringFinder'))"
    )
    assert (done.stdout.strip(), done.stderr) == ("1", "")


def test_installed_line_is_silent_when_the_package_is_gone(tmp_path):
    cpu_wheels.install(str(tmp_path))
    # -S and -I: an interpreter that sees nothing but the standard library.
    done = run(f"import site; site.addsitedir({str(tmp_path)!r}); print('started')", "-S", "-I")
    assert (done.stdout.strip(), done.stderr) == ("started", "")


def test_without_the_line_in_the_environment_the_command_and_the_actors_cure_it_themselves():
    """As where the package came as a wheel: `-S` runs no .pth file."""
    code = textwrap.dedent(f"""
        import sys
        sys.path += {[path for path in sys.path if path]!r}
        cured = lambda: any(type(finder).__name__ == "_CuringFinder" for finder in sys.meta_path)
        assert not cured()
        from nemo_rl_ext import cli
        sys.argv = ["nemo-rl-ext", "--version"]
        try:
            cli.main()
        except SystemExit:
            pass
        assert cured()
        sys.meta_path[:] = [f for f in sys.meta_path if type(f).__name__ != "_CuringFinder"]
        from nemo_rl_ext.grpo.engine.actor import EngineActor
        from nemo_rl_ext.grpo.engine.config import EngineConfig
        EngineActor(EngineConfig(model="nowhere"))
        assert cured()
    """)
    subprocess.run([sys.executable, "-S", "-c", code], check=True, capture_output=True)
