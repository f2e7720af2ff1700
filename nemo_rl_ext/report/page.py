# SPDX-License-Identifier: Apache-2.0
"""The report of a run: one HTML file that needs nothing else, no network and no server.

What a run writes down comes from manifests and rollouts, which are not to be trusted: everything is escaped, and
the page's own Content-Security-Policy lets only its own scripts run and nothing be fetched.
"""

from __future__ import annotations

import base64
import datetime
import hashlib
import html
import json
import os
from collections.abc import Iterable, Sequence
from importlib import resources
from pathlib import Path

from nemo_rl_ext.report.charts import Chart, charts
from nemo_rl_ext.report.run_files import Record, RunFiles, read_run
from nemo_rl_ext.report.summary import RowStory, Summary, row_stories, summarize
from nemo_rl_ext.report.thumbnails import ThumbnailMaker, Thumbnails
from nemo_rl_ext.report.wording import REPAIRS, advice, why

REPORT_FILE = "report.html"
FIRST_ROWS, MAX_ROWS, MAX_SLOWEST, MAX_OFFENCES, MAX_THUMBNAILS = 8, 300, 10, 40, 6


def write_report(run_dir: str | Path, output: Path | None = None) -> Path:
    """Write the report of a finished or running run into its directory, whole or not at all; returns its path.

    Raises:
        ValueError: when `run_dir` is no run directory.
    """
    run = read_run(run_dir)
    target = Path(output) if output is not None else run.run_dir / REPORT_FILE
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(render(run), encoding="utf-8")
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
    return target


def render(run: RunFiles) -> str:
    """The page as text."""
    summary = summarize(run)
    figures = charts(run)
    plotly = _plotly()
    script = _asset("page.js")
    data = [
        {"name": chart.name, "traces": chart.traces, "layout": chart.layout}
        for chart in (figures if plotly else ())
    ]
    scripts = "".join(f"<script>{text}</script>" for text in (plotly, script) if text)
    body = "".join(
        [
            _head(run, summary),
            _rows(row_stories(run.turns)),
            _offences(run),
            _charts(figures, bool(plotly)),
            _slowest(run.turns),
        ]
    )
    return (
        '<!doctype html>\n<html lang="en" data-theme="light"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_policy(plotly, script)}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<link rel="icon" href="data:,"><title>{_text(run.run_dir.name)}: run report</title>'
        f"<style>{_asset('page.css')}</style></head><body><main>{body}</main>"
        f'<script type="application/json" id="charts-data">{_json(data)}</script>{scripts}</body></html>\n'
    )


def _policy(*scripts: str) -> str:
    hashes = " ".join(
        f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
        for text in scripts
        if text
    )
    return f"default-src 'none'; img-src data: blob:; style-src 'unsafe-inline'; script-src {hashes}"


def _asset(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _plotly() -> str:
    """plotly.js as one script, or nothing where the `report` extra is not installed."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        return ""
    # A closing tag inside a string of the library would end the script.
    return str(get_plotlyjs()).replace("</script", "<\\/script")


def _text(value: object) -> str:
    return html.escape(str(value), quote=True)


def _json(value: object) -> str:
    # JSON has no NaN, and "</script>" or "<!--" inside a string would end or comment out the element.
    text = json.dumps(_finite(value), ensure_ascii=True, allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _finite(value: object) -> object:
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return None
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    return value


def _head(run: RunFiles, summary: Summary) -> str:
    model = run.setting("policy.model_name", "")
    written = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    about = (
        f"{summary.num_steps} steps" + (f", model {_text(model)}" if model else "") + f", written {written}"
    )
    tiles = [
        (f"{summary.media['matched']:,}", "media matched"),
        (f"{summary.media['repaired']:,}", "media repaired"),
        (f"{summary.rows_masked:,} of {summary.rows:,}", "rollouts masked"),
        (f"{summary.token_delta:,}", "tokens the static sizes were off by"),
    ]
    if summary.reward_last is not None:
        tiles.append(
            (f"{summary.reward_first:.2f} → {summary.reward_last:.2f}", "reward, first and last tenth")
        )
    if summary.accuracy_last is not None:
        tiles.append((f"{summary.accuracy_first:.2f} → {summary.accuracy_last:.2f}", "held-out accuracy"))
    cells = "".join(
        f'<div class="card tile"><b>{value}</b><span>{label}</span></div>' for value, label in tiles
    )
    return (
        f'<header><div><h1>{_text(run.run_dir.name)}</h1><div class="muted">{about}</div></div>'
        f'<button id="theme" type="button">Light / dark</button></header>'
        f'<p class="lead">{_lead(summary)}</p><div class="tiles">{cells}</div>'
    )


def _lead(summary: Summary) -> str:
    """What happened, in the sentences that a newcomer needs first."""
    if not summary.num_steps:
        return "The run wrote no training step yet."
    if not summary.num_media:
        return "No media were aligned in this run: alignment was off, or its rows carry none."
    share = summary.media["repaired"] / summary.num_media
    sentences = [
        f"Of {summary.num_media:,} images and videos that the policy saw while it generated, "
        f"{summary.media['repaired']:,} ({share:.0%}) were of another size than the training side would have made "
        f"them, in {summary.steps_with_repairs} of {summary.num_steps} steps. "
        + ("Their tensors were made again on the engine's own grid." if summary.media["repaired"] else "")
    ]
    if summary.rows_masked:
        masking = ", ".join(
            f"{_text(name)} {count:,}" for name, count in summary.reasons.items() if name not in REPAIRS
        )
        sentences.append(
            f"{summary.rows_masked:,} of {summary.rows:,} rollouts could not be proven and were kept with zero loss"
            + (f" ({masking})." if masking else ".")
        )
    else:
        sentences.append(f"All {summary.rows:,} rollouts were trained on; none had to be masked.")
    sentences.append(
        f"The aligners worked {summary.repair_ms / 1e3:.1f} s for {summary.step_s:,.0f} s of training "
        f"({summary.repair_share:.1%})."
    )
    return " ".join(sentences)


def _badge(outcome: str) -> str:
    return f'<span class="badge {_text(outcome)}">{_text(outcome)}</span>'


def _rows(stories: Sequence[RowStory]) -> str:
    changed = [story for story in stories if story.outcome != "matched"]
    title = "<h2>Which rows were repaired or masked, and why</h2>"
    if not changed:
        missing = "Every turn that was written down matched." if stories else "This run wrote no turns.jsonl."
        return f'{title}<p class="note">{missing}</p>'
    entries = "".join(_row(story, rest=index >= FIRST_ROWS) for index, story in enumerate(changed[:MAX_ROWS]))
    left, shown = len(changed) - MAX_ROWS, min(len(changed), MAX_ROWS)
    more = f" {left:,} more outcomes are in turns.jsonl." if left > 0 else ""
    button = f'<button id="all-rows" type="button">Show all {shown}</button>' if shown > FIRST_ROWS else ""
    return (
        f'{title}<p class="note">A bounded choice of the turns of every step: masked ones first, then the slowest. '
        f"Grids count patches, height x width.{more}</p>"
        '<p><input id="filter" type="search" placeholder="Filter by row, reason, file ..." '
        'aria-label="Filter rows"></p><div class="card scroll"><table id="rows" class="rows"><thead><tr>'
        "<th>Row</th><th>Outcome</th><th>Why</th><th>Media: training grid → engine grid</th>"
        '<th class="number">Tokens</th><th class="number">Rollouts</th><th>Steps</th></tr></thead>'
        f"<tbody>{entries}</tbody></table>{button}</div>"
    )


def _row(story: RowStory, *, rest: bool) -> str:
    reasons = "<br>".join(f"{_text(why(reason))} <code>{_text(reason)}</code>" for reason in story.reasons)
    detail = f'<div class="muted">{_text(story.detail)}</div>' if story.detail else ""
    media = "<br>".join(_medium(item) for item in story.media)
    if story.num_media > len(story.media):
        media += f"<br>and {story.num_media - len(story.media)} more"
    counted = story.num_expected or story.num_found
    tokens = f"{story.num_expected:,} → {story.num_found:,}" if counted else ""
    steps = ", ".join(map(str, story.steps[:6])) + (
        f" and {len(story.steps) - 6} more" if len(story.steps) > 6 else ""
    )
    return (
        f'<tr{" class=rest" if rest else ""}><td data-label=""><b>{_text(story.row_id)}</b>, turn {story.turn}</td>'
        f'<td data-label="">{_badge(story.outcome)}</td><td data-label="Why">{reasons}{detail}</td>'
        f'<td data-label="Media">{media}</td>'
        f'<td class="number" data-label="Tokens">{tokens}</td>'
        f'<td class="number" data-label="Rollouts">{story.rollouts}</td><td data-label="Steps">{steps}</td></tr>'
    )


def _medium(item: Record) -> str:
    static, grid = _grid(item.get("static_grid")), _grid(item.get("grid"))
    change = f"{static} → {grid}" if grid else f"{static} → not proven"
    if grid and grid == static:
        change = f"{static} (same)"
    return f'{_name(item)} {_size(item)}: <b class="change">{change}</b>'


def _size(item: Record) -> str:
    height, width = item.get("size") or (0, 0)
    return f"{width} x {height} px"


def _grid(grid: Sequence[int] | None) -> str:
    return f"{grid[0]}x{grid[1]}" if grid else ""


def _name(item: Record) -> str:
    """The file's name, the whole reference on hovering."""
    source = str(item.get("source", ""))
    short = source.partition(",")[0] if source.startswith("data:") else source.rpartition("/")[2]
    short = short if len(short) <= 40 else f"…{short[-39:]}"
    return f'<code title="{_text(source[:300])}">{_text(short)}</code>'


def _offences(run: RunFiles) -> str:
    title = "<h2>First offences in full</h2>"
    if not run.offences:
        return f'{title}<p class="note">No reason came up in this run.</p>'
    offences = run.offences[:MAX_OFFENCES]
    maker = ThumbnailMaker(run, {str(offence["row_id"]) for offence in offences if "row_id" in offence})
    cards = "".join(_offence(offence, maker) for offence in offences)
    return (
        f'{title}<p class="note">The first time that each reason came up, with the media as the training processor '
        "would have made them and as the engine saw them; a clip by its first frame. Pictures are at their true "
        f"resolution, or shrunk alike.</p>{cards}"
    )


def _offence(offence: Record, maker: ThumbnailMaker) -> str:
    reason, row = str(offence.get("reason")), str(offence.get("row_id", ""))
    media = offence.get("media") or []
    shown = "".join(_offence_medium(item, maker.make(row, item)) for item in media[:MAX_THUMBNAILS])
    if len(media) > MAX_THUMBNAILS:
        shown += f'<p class="note">and {len(media) - MAX_THUMBNAILS} more media</p>'
    place = f"step {_text(offence.get('step'))}" + (
        f", row {_text(row)}, turn {_text(offence.get('turn'))}" if row else ""
    )
    doing = advice(reason)
    return (
        f'<div class="card offence"><h3><code>{_text(reason)}</code></h3><div class="muted">{place}</div>'
        f"<p>{_text(why(reason))}</p>"
        + (f"<p><b>What to do:</b> {_text(doing)}.</p>" if doing else "")
        + f'<details><summary>The whole story</summary><p class="story"><code>{_text(offence.get("story", ""))}</code>'
        f"</p></details>{shown}</div>"
    )


def _offence_medium(item: Record, thumbnails: Thumbnails) -> str:
    figures = "".join(
        f'<figure><img src="{_text(view.data_url)}" alt="{_text(view.title)}">'
        f"<figcaption>{_text(view.title)}: {view.grid} patches, {view.pixels[1]} x {view.pixels[0]} px, "
        f"{_runs(item, view.title)}</figcaption></figure>"
        for view in thumbnails.views
    )
    note = f'<p class="note">{_text(thumbnails.note)}</p>' if thumbnails.note else ""
    return (
        f'<div class="media"><div>{_badge(str(item.get("verdict", "")))} {_name(item)} '
        f'{_text(item.get("kind", ""))}, {_size(item)}</div><div class="views">{figures}</div>{note}</div>'
    )


def _runs(item: Record, title: str) -> str:
    lengths = item.get("found" if title == "engine" else "expected") or []
    return f"{sum(lengths):,} tokens"


def _charts(figures: Sequence[Chart], drawn: bool) -> str:
    if not drawn:
        note = "Charts need plotly: `pip install 'nemo-rl-ext[report]'`, then `nemo-rl-ext report` on this directory."
        return f'<h2>Charts</h2><p class="note">{_text(note)}</p>'
    cards = "".join(
        f'<div class="card"><h3>{_text(chart.title)}</h3><div class="plot" id="chart-{_text(chart.name)}"></div>'
        f'<div class="note">{_text(chart.note)}</div></div>'
        for chart in figures
    )
    return f'<h2>Over the run</h2><div class="charts">{cards}</div>'


def _slowest(turns: Iterable[Record]) -> str:
    timed = sorted(turns, key=lambda turn: -float(turn.get("repair_ms") or 0))[:MAX_SLOWEST]
    timed = [turn for turn in timed if turn.get("repair_ms")]
    if not timed:
        return ""
    rows = "".join(
        f'<tr><td data-label="">{_text(turn.get("row_id"))}, turn {_text(turn.get("turn"))}</td>'
        f'<td class="number" data-label="Time">{float(turn["repair_ms"]):.1f} ms</td>'
        f'<td class="number" data-label="Tensors">{int(turn.get("num_bytes") or 0) / 2**20:.2f} MiB</td>'
        f'<td data-label="Media">{"<br>".join(_medium(item) for item in turn.get("media") or ())}</td>'
        f'<td data-label="Step">{_text(turn.get("step"))}</td></tr>'
        for turn in timed
    )
    return (
        '<h2>Slowest turns</h2><p class="note">Decoding, resizing and packing in one aligner.</p>'
        '<div class="card scroll"><table class="rows"><thead><tr><th>Row</th><th class="number">Time</th>'
        '<th class="number">Tensors</th><th>Media: training grid → engine grid</th><th>Step</th></tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )
