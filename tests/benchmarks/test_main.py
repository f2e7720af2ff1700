# SPDX-License-Identifier: Apache-2.0
"""The command, and every benchmark with small cases: they assert what they compare, so running them is a test."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.__main__ import DEFAULT, studies, with_published

REPOSITORY = Path(__file__).parents[2]


def bench(*arguments):
    command = [sys.executable, "-m", "benchmarks", *arguments]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)


@pytest.mark.slow
def test_light_benchmarks_print_tables_and_write_json(tmp_path):
    path = tmp_path / "results.json"
    done = bench("runs", "grids", "--quick", "--rounds", "3", "--json", str(path))
    assert done.returncode == 0, done.stderr
    assert "Finding runs" in done.stdout and "against baseline" in done.stdout
    results = json.loads(path.read_text())
    assert [section["name"] for section in results["sections"]] == ["runs", "grids"]
    assert results["machine"]["cores"] >= 1


@pytest.mark.engine
def test_every_benchmark_runs_with_small_cases(tmp_path):
    """In one process, which imports the engine once."""
    path = tmp_path / "results.json"
    names = [name for name in DEFAULT if name not in ("runs", "grids")]
    done = bench(*names, "--quick", "--rounds", "1", "--json", str(path))
    assert done.returncode == 0, done.stderr
    sections = json.loads(path.read_text())["sections"]
    assert [section["name"] for section in sections] == names
    for section in sections:
        assert section["tables"] and all(table["rows"] for table in section["tables"])


def test_an_unknown_name_lists_those_that_exist():
    done = bench("nonsense")
    assert done.returncode == 2
    assert "runs" in done.stderr and "arms" in done.stderr


def test_longer_studies_are_found_by_their_file_and_take_their_own_options():
    assert {"arms", "guards_census", "guards_failfast"} <= set(studies())
    done = bench("guards_census", "--help")
    assert done.returncode == 0
    assert "--rows" in done.stdout


def test_a_section_that_is_run_again_replaces_its_published_one_on_the_same_machine(tmp_path):
    path = tmp_path / "benchmarks.json"
    machine = {"cpu": "c", "cores": 2, "packages": {"numpy": "2"}, "commit": "old"}

    def results(*sections, **facts):
        return {"machine": {**machine, **facts}, "sections": [{"name": n, "value": v} for n, v in sections]}

    path.write_text(json.dumps(results(("grids", 1), ("runs", 1))))
    merged = with_published(results(("grids", 2), commit="new"), path)
    assert merged["sections"] == [{"name": "runs", "value": 1}, {"name": "grids", "value": 2}]
    assert with_published(results(("grids", 2), cores=8), path)["sections"] == [{"name": "grids", "value": 2}]
