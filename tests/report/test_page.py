# SPDX-License-Identifier: Apache-2.0
import base64
import html
import io
import json
import re
import shutil
import sys

import pytest
import yaml
from PIL import Image

from nemo_rl_ext.align.verdict import Reason
from nemo_rl_ext.report import page
from nemo_rl_ext.report.comparison import write_comparison
from nemo_rl_ext.report.page import write_report
from nemo_rl_ext.report.run_files import read_run
from nemo_rl_ext.report.summary import row_stories, summarize
from nemo_rl_ext.report.wording import WHY


def body(run_dir) -> str:
    """The page without its scripts and styles."""
    text = write_report(run_dir).read_text(encoding="utf-8")
    return re.sub(r"<(script|style)\b.*?</\1>", "", text, flags=re.DOTALL)


def test_a_newcomer_reads_which_rows_were_repaired_and_why(run_dir):
    text = body(run_dir)
    assert "Of 297 images and videos" in text and "108 (36%)" in text
    assert "9 of 288 rollouts could not be proven and were kept with zero loss (run_count 9)" in text
    row = re.search(r"<tr[^>]*><td[^>]*><b>row-7</b>.*?</tr>", text, re.DOTALL).group()
    assert WHY[Reason.RESIZED].replace("'", "&#39;") in row
    assert "14x72 → 12x60" in row and "252 → 180" in row and "2, 5" in row
    assert ">16<" in row, "rollouts of equal turns are added up"
    masked = re.search(r"<tr[^>]*><td[^>]*><b>row-9</b>.*?</tr>", text, re.DOTALL).group()
    assert "1 runs expected, 2 found" in masked and "not proven" in masked
    assert text.index("row-9</b>") < text.index("row-7</b>"), "masked rows come first"


def test_thumbnails_show_both_grids_at_one_scale_and_a_missing_file_says_so(run_dir):
    text = body(run_dir)
    pictures = [base64.b64decode(match) for match in re.findall(r"data:image/jpeg;base64,([^\"]+)", text)]
    static, engine = (Image.open(io.BytesIO(data)).size for data in pictures)
    assert static == (384, 75) and engine == (320, 64), "1152 x 224 and 960 x 192, both a third"
    assert "training processor: 14x72 patches, 1152 x 224 px, 252 tokens" in text
    assert "engine: 12x60 patches, 960 x 192 px, 180 tokens" in text
    assert "not shown: " in text and "gone.png" in text


def test_the_page_fetches_nothing_and_runs_only_its_own_scripts(run_dir):
    text = write_report(run_dir).read_text(encoding="utf-8")
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', text).group(1)
    assert html.unescape(policy).startswith("default-src 'none'; img-src data: blob:;")
    assert not re.findall(
        r'(?:src|href)="(?!data:)', re.sub(r"<script>.*?</script>", "", text, flags=re.DOTALL)
    )


def test_text_of_manifests_and_rollouts_is_escaped(run_dir):
    hostile = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"
    path = run_dir / "turns.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    for record in records:
        record |= {"row_id": hostile, "detail": hostile, "reasons": [hostile]}
        record["media"][0] |= {"source": hostile}
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    occurrences = run_dir / "offences.jsonl"
    occurrences.write_text(
        occurrences.read_text().replace("the whole story", hostile).replace("run_count", hostile)
    )
    text = write_report(run_dir).read_text(encoding="utf-8")
    assert "<script>alert" not in text and "<img src=x" not in text
    data = re.search(r'id="charts-data">(.*?)</script>', text, flags=re.DOTALL).group(1)
    assert hostile in json.dumps(json.loads(data)), "the charts' data survive"


def test_a_run_that_was_killed_mid_line_still_has_a_report(run_dir):
    with open(run_dir / "metrics.jsonl", "a") as handle:
        handle.write('{"step": 10, "train/rew')
    (run_dir / "turns.jsonl").unlink()
    (run_dir / "config.yaml").write_text("{ not yaml")
    assert "This run wrote no turns.jsonl." in body(run_dir)
    assert len(read_run(run_dir).steps) == 10


def test_a_run_without_a_step_or_without_media_has_one_too(run_dir):
    (run_dir / "metrics.jsonl").write_text("")
    assert "no training step yet" in body(run_dir)
    (run_dir / "metrics.jsonl").write_text('{"step": 1, "train/reward_mean": NaN, "alignment/rows": 4.0}\n')
    assert "No media were aligned" in body(run_dir)


def test_a_directory_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"holds no metrics.jsonl"):
        write_report(tmp_path)
    with pytest.raises(ValueError, match="not a directory"):
        write_report(tmp_path / "none")


def test_a_report_is_whole_or_not_written(run_dir, monkeypatch):
    before = write_report(run_dir).read_text(encoding="utf-8")
    monkeypatch.setattr(page, "page", lambda run: "\ud800 cannot be written")
    with pytest.raises(UnicodeEncodeError):
        write_report(run_dir)
    assert (run_dir / "report.html").read_text(encoding="utf-8") == before
    assert not [path for path in run_dir.iterdir() if "tmp" in path.name]


def test_a_place_that_cannot_be_written_to_is_named(run_dir, tmp_path):
    with pytest.raises(ValueError, match=r"none/r.html: cannot be written \(No such file.*--output"):
        write_report(run_dir, tmp_path / "none" / "r.html")


def test_without_bokeh_everything_but_the_charts_is_there(run_dir, monkeypatch):
    monkeypatch.setitem(sys.modules, "bokeh", None)
    text = body(run_dir)
    assert "row-7" in text and "nemo-rl-ext[report]" in text


def test_the_page_stays_small(run_dir):
    assert write_report(run_dir).stat().st_size < 1.5 * 2**20


def test_a_failed_run_shows_its_error_configuration_and_versions(run_dir):
    record = {
        "id": "a1",
        "state": "failed",
        "step": 9,
        "versions": {"torch": "2.13.0", "Ray": "2.58.0"},
        "error": {
            "type": "MaskedFractionError",
            "message": "80 of the last 100 rows are masked <b>",
            "traceback": "Traceback (most recent call last):\n  ...",
        },
    }
    (run_dir / "run.json").write_text(json.dumps(record))
    text = body(run_dir)
    assert "The run failed after step 9: MaskedFractionError" in text
    assert "80 of the last 100 rows are masked &lt;b&gt;" in text and "Traceback (most" in text
    assert text.index("The run failed") < text.index("Of 297 images"), "what ended the run comes first"
    assert "torch 2.13.0, Ray 2.58.0" in text and "model_name: checkpoint" in text
    (run_dir / "metrics.jsonl").unlink()
    assert "no training step yet" in body(run_dir), "a run may fail before its first step"


def test_an_interrupted_run_says_how_to_go_on(run_dir):
    (run_dir / "run.json").write_text('{"state": "interrupted", "step": 4}')
    assert "interrupted at step 4; continue it with --resume" in body(run_dir)


def test_rows_that_the_engine_refused_are_not_called_unproven(run_dir):
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    for line in lines[1:]:
        line |= {"alignment/rows_masked": 3.0, "alignment/reason/generation_failed": 2.0}
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    turn = json.loads((run_dir / "turns.jsonl").read_text().splitlines()[-1])
    refused = {**turn, "row_id": "row-8", "reasons": ["generation_failed"], "media": []}
    with open(run_dir / "turns.jsonl", "a") as handle:
        handle.write(json.dumps(refused) + "\n")
    text = body(run_dir)
    assert "18 of 288 rollouts were refused by the engine" in text
    assert "9 of 288 rollouts could not be proven and were kept with zero loss (run_count 9)" in text
    row = re.search(r"<b>row-8</b>.*?</tr>", text, re.DOTALL).group()
    assert ">refused<" in row and "The engine refused this row" in row and "masked" not in row


@pytest.mark.parametrize(
    ("name", "line", "message"),
    [
        ("metrics.jsonl", b"\x89PNG\r\n", "no line that a run writes"),
        ("metrics.jsonl", b"[1, 2]", "a JSON object is expected, found list"),
        ("metrics.jsonl", b'{"train/loss": 1.0}', "'step' must be a whole number, found None"),
        ("metrics.jsonl", b'{"step": "3"}', "found '3'"),
        ("metrics.jsonl", b'{"step": true}', "found True"),
        (
            "metrics.jsonl",
            b'{"step": 3, "train/reward_mean": "high"}',
            "'train/reward_mean' must be a number",
        ),
        ("metrics.jsonl", b'{"step": 3, "train/reward_mean": {}}', "must be a number"),
        ("metrics.jsonl", b"[" * 100_000, "no line that a run writes"),
        ("turns.jsonl", b'{"step": 3, "media": 7}', "media"),
        ("turns.jsonl", b'{"step": 3, "media": [{"size": [1]}]}', "size"),
        ("turns.jsonl", b'{"step": 3, "repair_ms": "long"}', "repair_ms"),
        ("offences.jsonl", b'{"reason": 5}', "reason"),
    ],
)
def test_garbage_is_an_error_with_its_line(run_dir, name, line, message):
    lines = (run_dir / name).read_bytes().splitlines(keepends=True)
    (run_dir / name).write_bytes(lines[0] + line + b"\n" + b"".join(lines[1:]))
    with pytest.raises(ValueError, match=rf"{name}:2: no line that a run writes") as error:
        write_report(run_dir)
    assert message in str(error.value)


def test_numbers_that_are_not_finite_leave_the_rest_readable(run_dir):
    with open(run_dir / "metrics.jsonl", "a") as handle:
        handle.write(
            '{"step": 10, "train/reward_mean": NaN, "alignment/rows": Infinity, "alignment/reason/resized": NaN}\n'
        )
    assert "Of 297 images and videos" in body(run_dir)


def test_two_runs_side_by_side(run_dir, tmp_path):
    other = tmp_path / "elsewhere" / "demo"
    shutil.copytree(run_dir, other)
    config = yaml.safe_load((other / "config.yaml").read_text())
    config["grpo"] = {"media_alignment": {"enabled": False}}
    (other / "config.yaml").write_text(yaml.safe_dump(config))
    written = write_comparison(run_dir, other)
    assert written == run_dir / "compare-demo.html" and written.stat().st_size < 1.5 * 2**20
    text = re.sub(r"<(script|style)\b.*?</\1>", "", written.read_text(), flags=re.DOTALL)
    assert "runs/demo against elsewhere/demo" in text
    assert re.search(r"media repaired</td><td class=.number.>108</td><td class=.number.>108<", text)
    assert re.search(r"gap, repaired \(mean\)</td><td class=.number.>0.0020<", text)
    assert re.search(
        r"<code>grpo.media_alignment.enabled</code></td><td><code>-</code></td><td><code>False<", text
    )
    assert "policy.model_name" not in text, "only what differs"
    assert re.findall(r'id="chart-(\w+)"', text) == [
        "reward",
        "accuracy",
        "gap",
        "repairs",
        "masked",
        "step",
        "aligners",
    ]


def test_a_distillation_run_is_refused_by_name(run_dir):
    (run_dir / "run.json").write_text('{"fingerprint": {}}')
    with pytest.raises(ValueError, match="is a distillation run's"):
        write_report(run_dir)


def test_every_reason_has_plain_words():
    assert set(WHY) == set(Reason)


def test_rows_are_listed_once_per_outcome_and_sums_leave_out_the_first_evaluation(run_dir):
    run = read_run(run_dir)
    assert [(story.row_id, story.outcome, story.rollouts) for story in row_stories(run.turns)] == [
        ("row-9", "masked", 8),
        ("row-7", "repaired", 16),
    ]
    summary = summarize(run)
    assert (summary.num_steps, summary.accuracy_first, summary.accuracy_last) == (9, 0.4, 0.8)
    assert summary.repair_share == pytest.approx(0.01)
