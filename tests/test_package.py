# SPDX-License-Identifier: Apache-2.0
"""What importing a part of the package may load, and what its metadata say."""

import json
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

import nemo_rl_ext

REPOSITORY = Path(__file__).parent.parent
HEAVY = {"torch", "ray", "transformers", "nemo_rl", "vllm", "torchvision"}


def modules_loaded_by(statement: str) -> set[str]:
    """Top-level modules in a fresh interpreter after a statement."""
    script = (
        f"{statement}\nimport json, sys\nprint(json.dumps([name.partition('.')[0] for name in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize(
    "statement",
    [
        "import nemo_rl_ext",
        "import nemo_rl_ext.align.runs, nemo_rl_ext.align.grids",
        "import nemo_rl_ext.grpo.config",
        "import nemo_rl_ext.cli; nemo_rl_ext.cli.build_app()",
    ],
)
def test_light_imports_load_nothing_heavy(statement):
    assert modules_loaded_by(statement) & HEAVY == set()


def test_runs_and_grids_need_numpy_alone():
    standard = set(sys.stdlib_module_names) | {"__main__", "nemo_rl_ext", "numpy"}
    at_start = modules_loaded_by("")
    assert (
        modules_loaded_by("import nemo_rl_ext.align.runs, nemo_rl_ext.align.grids") - standard - at_start
        == set()
    )


def test_turn_alignment_knows_no_ray_engine_or_nemo_rl():
    loaded = modules_loaded_by("import nemo_rl_ext.align.turn, nemo_rl_ext.align.pixels")
    assert loaded & {"ray", "vllm", "nemo_rl"} == set()


def test_interpreter_start_with_the_cure_for_cpu_wheels_imports_nothing_more():
    cured = modules_loaded_by("from nemo_rl_ext.cpu_wheels import activate; activate()")
    assert cured - modules_loaded_by("import nemo_rl_ext") == set()


def test_installed_metadata_match_the_source():
    assert metadata.version("nemo-rl-ext") == nemo_rl_ext.__version__
    scripts = metadata.distribution("nemo-rl-ext").entry_points.select(group="console_scripts")
    assert {script.name: script.value for script in scripts} == {"nemo-rl-ext": "nemo_rl_ext.cli:main"}


def test_lock_satisfies_every_requirement_of_the_project():
    packaging = pytest.importorskip("packaging.requirements")
    canonical = pytest.importorskip("packaging.utils").canonicalize_name
    lines = (REPOSITORY / "requirements" / "engine-cpu-py311.txt").read_text().splitlines()
    locked = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    locked = {canonical(name): version for name, version in locked.items()}
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    # The API reference is written by an environment of its own; `demo` names this project's other extras.
    extras = {name: needs for name, needs in project["optional-dependencies"].items() if name != "docs"}
    wanted = [*project["dependencies"], *sum(extras.values(), [])]
    wanted = [requirement for requirement in wanted if not requirement.startswith(project["name"])]
    for requirement in map(packaging.Requirement, wanted):
        version = locked.get(canonical(requirement.name))
        assert version is not None, f"{requirement.name} is not in the lock"
        assert requirement.specifier.contains(version), f"{requirement} is not satisfied by {version}"


def test_every_python_file_carries_the_licence():
    files = [path for folder in ("nemo_rl_ext", "tests") for path in (REPOSITORY / folder).rglob("*.py")]
    unmarked = [
        str(path.relative_to(REPOSITORY))
        for path in files
        if path.read_text(encoding="utf-8").strip()
        and not path.read_text(encoding="utf-8").startswith("# SPDX-License-Identifier: Apache-2.0\n")
    ]
    assert unmarked == []
