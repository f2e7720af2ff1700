# SPDX-License-Identifier: Apache-2.0
import json
import xml.etree.ElementTree
from pathlib import Path

import pytest

from benchmarks.publish import PLOT_FILE, markdown, scaling_plot, with_costs

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def published():
    path = DOCS / "benchmarks.json"
    if not path.is_file():
        pytest.skip("no results are published yet: make bench ARGS=--publish")
    return json.loads(path.read_text(encoding="utf-8"))


def test_the_page_is_generated_from_its_data_and_not_typed(published):
    assert (DOCS / "benchmarks.md").read_text(encoding="utf-8") == markdown(published)


def test_the_readme_quotes_the_published_results(published):
    readme = (DOCS.parent / "README.md").read_text(encoding="utf-8")
    assert readme == with_costs(readme, published)
    with pytest.raises(ValueError, match="expected the lines"):
        with_costs("# No table here", published)


def test_the_plot_is_drawn_from_its_data_and_is_well_formed(published):
    plot = scaling_plot(published)
    assert (DOCS / PLOT_FILE).read_text(encoding="utf-8") == plot
    drawing = xml.etree.ElementTree.fromstring(plot)
    circles = drawing.findall(".//{http://www.w3.org/2000/svg}circle")
    (section,) = [part for part in published["sections"] if part["name"] == "scaling"]
    assert len(circles) == sum(len(curve) for curve in section["series"].values())


def test_published_results_are_whole_and_name_their_machine(published):
    from benchmarks.__main__ import DEFAULT

    assert [section["name"] for section in published["sections"]] == list(DEFAULT)
    assert not published["quick"]
    assert {"cpu", "cores", "commit", "packages", "load_average"} <= set(published["machine"])


def test_cells_cannot_break_the_table():
    results = {
        "machine": {
            "cpu": "c",
            "cores": 2,
            "memory_gib": 1,
            "system": "s",
            "python": "3",
            "packages": {},
            "commit": "x",
            "load_average": [0.5, 0, 0],
        },
        "sections": [
            {
                "name": "a",
                "title": "A",
                "about": "b",
                "checks": [{"target": "t|t", "measured": "m", "met": False}],
                "tables": [{"columns": ["c"], "rows": [["a|b"]], "caption": ""}],
                "series": {},
                "seconds": 1.0,
                "taken": "now",
                "load_average": [0.5, 0, 0],
            }
        ],
    }
    text = markdown(results)
    assert "| t\\|t | m | no |" in text and "| a\\|b |" in text
    assert scaling_plot(results) is None
