# SPDX-License-Identifier: Apache-2.0
import base64
import io
import json
import re
import sys

import pytest
from PIL import Image

from nemo_rl_ext.align.verdict import Reason
from nemo_rl_ext.report import page
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
    row = re.search(r"<tr[^>]*><td[^>]*><b>row-7</b>.*?</tr>", text).group()
    assert WHY[Reason.RESIZED].replace("'", "&#x27;") in row
    assert "14x72 → 12x60" in row and "252 → 180" in row and "2, 5" in row
    assert ">16<" in row, "rollouts of equal turns are added up"
    masked = re.search(r"<tr[^>]*><td[^>]*><b>row-9</b>.*?</tr>", text).group()
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
    assert policy.startswith("default-src 'none'; img-src data: blob:;")
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
    offences = run_dir / "offences.jsonl"
    offences.write_text(
        offences.read_text().replace("the whole story", hostile).replace("run_count", hostile)
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
    monkeypatch.setattr(page, "render", lambda run: "\ud800 cannot be written")
    with pytest.raises(UnicodeEncodeError):
        write_report(run_dir)
    assert (run_dir / "report.html").read_text(encoding="utf-8") == before
    assert not [path for path in run_dir.iterdir() if "tmp" in path.name]


def test_without_plotly_everything_but_the_charts_is_there(run_dir, monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    text = body(run_dir)
    assert "row-7" in text and "nemo-rl-ext[report]" in text


def test_every_reason_is_told_in_plain_words():
    assert set(WHY) == set(Reason)


def test_rows_are_told_once_per_outcome_and_sums_leave_out_the_first_evaluation(run_dir):
    run = read_run(run_dir)
    assert [(story.row_id, story.outcome, story.rollouts) for story in row_stories(run.turns)] == [
        ("row-9", "masked", 8),
        ("row-7", "repaired", 16),
    ]
    summary = summarize(run)
    assert (summary.num_steps, summary.accuracy_first, summary.accuracy_last) == (9, 0.4, 0.8)
    assert summary.repair_share == pytest.approx(0.01)
