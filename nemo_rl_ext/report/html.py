# SPDX-License-Identifier: Apache-2.0
"""One HTML file that needs nothing else, no network and no server.

What a run writes down comes from manifests and rollouts, which are not to be trusted: templates escape everything,
and the page's own Content-Security-Policy lets only its own scripts run and nothing be fetched.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import os
from collections.abc import Callable, Sequence
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, PackageLoader

from nemo_rl_ext.report.wording import advice, why

if TYPE_CHECKING:
    from nemo_rl_ext.report.charts import Chart


def render(template: str, *, make_charts: Callable[[], Sequence[Chart]], **context: Any) -> str:
    """A page as text; ``make_charts`` is called only where Bokeh, the `report` extra, is installed."""
    script, library = _asset("page.js"), ""
    figures: Sequence[Chart] = ()
    data: list[dict[str, Any]] = []
    if find_spec("bokeh") is not None:
        from bokeh.core.types import ID
        from bokeh.embed import json_item
        from bokeh.resources import INLINE

        figures = make_charts()
        library = INLINE.js_raw[0]
        data = [dict(json_item(chart.figure, ID(f"chart-{chart.name}"))) for chart in figures]
    environment = Environment(
        loader=PackageLoader(__package__), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"why": why, "advice": advice, "short_name": short_name}
    return environment.get_template(template).render(
        policy=_policy(script, library),
        css=_asset("page.css"),
        script=script,
        # A third of the size; the browser unpacks it, and the policy knows the hash of what it unpacks to.
        library=base64.b64encode(gzip.compress(library.encode(), mtime=0)).decode() if library else "",
        chart_data=_json(data),
        figures=figures,
        **context,
    )


def write_whole(target: Path, text: str) -> Path:
    """Write a file whole or not at all; returns its path.

    Raises:
        ValueError: the place cannot be written to.
    """
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, target)
    except OSError as error:
        raise ValueError(
            f"{target}: cannot be written ({error.strerror}); make room there, or name another place with --output"
        ) from None
    finally:
        temporary.unlink(missing_ok=True)
    return target


def short_name(source: object) -> str:
    """A media reference as a reader names it: the file, or what kind of data URL."""
    text = str(source or "")
    short = text.partition(",")[0] if text.startswith("data:") else text.rpartition("/")[2]
    return short if len(short) <= 40 else f"…{short[-39:]}"


def _policy(*scripts: str) -> str:
    hashes = " ".join(
        f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
        for text in scripts
        if text
    )
    return f"default-src 'none'; img-src data: blob:; style-src 'unsafe-inline'; script-src {hashes}"


def _asset(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _json(value: object) -> str:
    # "</script>" or "<!--" inside a string would end or comment out the element.
    text = json.dumps(value, ensure_ascii=True)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
