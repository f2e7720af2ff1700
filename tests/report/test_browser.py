# SPDX-License-Identifier: Apache-2.0
"""The report in a real headless browser. Any Chromium does: `apt-get install chromium`, or one on the PATH."""

import re
import shutil
import subprocess

import numpy as np
import pytest
from PIL import Image

from nemo_rl_ext.report.comparison import write_comparison
from nemo_rl_ext.report.page import write_report

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
BROWSER = next(filter(None, map(shutil.which, NAMES)), None)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        BROWSER is None, reason="no browser found; install chromium to look at the report in a test"
    ),
]


def browse(page, tmp_path, *options: str) -> subprocess.CompletedProcess:
    """Open a page with the network cut off; the console's messages come on stderr."""
    command = [
        BROWSER,
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        "--host-resolver-rules=MAP * ~NOTFOUND",
        f"--user-data-dir={tmp_path / 'profile'}",
        "--enable-logging=stderr",
        "--virtual-time-budget=10000",
        *options,
        page.as_uri(),
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, errors="replace")


def console(done: subprocess.CompletedProcess) -> list[str]:
    return [line for line in done.stderr.splitlines() if "CONSOLE" in line]


@pytest.mark.parametrize(
    ("name", "size", "dark"),
    [("desktop", (1280, 2400), False), ("phone", (390, 2400), False), ("dark", (1280, 2400), True)],
)
def test_the_report_is_drawn_without_a_console_message(run_dir, tmp_path, name, size, dark):
    page = write_report(run_dir)
    shot = tmp_path / f"{name}.png"
    options = [f"--screenshot={shot}", f"--window-size={size[0]},{size[1]}"]
    if dark:
        options.append("--blink-settings=preferredColorScheme=0")
    done = browse(page, tmp_path, *options)
    assert console(done) == []
    image = np.asarray(Image.open(shot).convert("RGB"))
    background = image[2, 2].astype(int)
    drawn = (np.abs(image.astype(int) - background).sum(axis=2) > 60).mean()
    assert drawn > 0.02, "the page is blank"
    assert (background.sum() < 150) == dark
    assert len(np.unique(image.reshape(-1, 3), axis=0)) > 500, "no picture and no chart was drawn"


def probed(page, script: str):
    """The page with a script of the test's; its own policy refuses any other, so it is taken out."""
    text = re.sub(r"<meta http-equiv[^>]+>", "", page.read_text(encoding="utf-8"))
    target = page.with_name("probe.html")
    target.write_text(text.replace("</body>", f"<script>{script}</script></body>"), encoding="utf-8")
    return target


MEASURE = """
const root = document.documentElement;
new MutationObserver(() => {
  if (root.dataset.ready !== "yes" || root.dataset.overflow) return;
  root.dataset.overflow = root.scrollWidth - innerWidth;
  const canvases = (node) => [...node.querySelectorAll("*")].reduce(
    (sum, child) => sum + (child.tagName === "CANVAS") + (child.shadowRoot ? canvases(child.shadowRoot) : 0), 0);
  root.dataset.drawn = [...document.querySelectorAll(".plot")].filter((plot) => canvases(plot)).length;
}).observe(root, {attributes: true});
"""


@pytest.mark.parametrize("compare", [False, True])
def test_every_chart_is_drawn_and_the_page_fits_a_phone(run_dir, tmp_path, compare):
    page = write_comparison(run_dir, run_dir) if compare else write_report(run_dir)
    done = browse(probed(page, MEASURE), tmp_path, "--dump-dom", "--window-size=500,900")
    assert 'data-ready="yes"' in done.stdout
    assert int(re.search(r'data-overflow="(-?\d+)"', done.stdout).group(1)) <= 0
    charts = re.findall(r'id="chart-(\w+)"', done.stdout)
    if not compare:
        assert charts == ["rewards", "verdicts", "gaps", "reasons", "delta", "sizes", "time"]
    assert int(re.search(r'data-drawn="(\d+)"', done.stdout).group(1)) == len(charts) == 7


def test_a_script_that_is_not_the_pages_own_does_not_run(run_dir, tmp_path):
    page = write_report(run_dir)
    text = page.read_text(encoding="utf-8").replace(
        "</body>", "<script>document.title = 'taken over'</script></body>"
    )
    page.write_text(text, encoding="utf-8")
    done = browse(page, tmp_path, "--dump-dom")
    assert "<title>demo: run report</title>" in done.stdout
    assert any("Content Security Policy" in line for line in console(done))
