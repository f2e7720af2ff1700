# SPDX-License-Identifier: Apache-2.0
"""Not looking must not pay: the table of the README, and captions for all rows through the whole scoring."""

import asyncio
import itertools
import json
import re
from pathlib import Path

import pytest
from resources_servers.caption_qa import baselines
from resources_servers.caption_qa.questions import CANNOT_ANSWER, Question
from resources_servers.caption_qa.scoring import score_caption
from resources_servers.caption_qa.validate import read_rows

README = Path(__file__).parents[1] / "README.md"


def question(answer, choices=("yes", "no")):
    return Question(id="q", text="?", choices=tuple(choices), answer=answer)


def test_a_constant_caption_knows_the_most_frequent_answer_of_equal_choices():
    rows = [[question(0)]] * 12 + [[question(1)]] * 4 + [[question(0, ("no", "yes"))]] * 4
    found = baselines.baselines(rows)
    assert found["constant"]["accuracy"] == 12 / 20
    assert found["constant"]["net"] == pytest.approx((12 - 3 * 8) / 20)
    rare = baselines.baselines([[question(0, ("a", "b"))]] * 9)
    assert rare["constant"] == rare["guess"] == pytest.approx({"accuracy": 0.5, "net": -1.0, "reward": -0.8})


def test_the_command_warns_where_not_looking_pays(tmp_path, make_row, capsys):
    path = tmp_path / "rows.jsonl"
    rows = [make_row(2, row_id=f"r{i}") for i in range(6)]
    path.write_text("".join(json.dumps({"verifier_metadata": row}) + "\n" for row in rows))
    assert baselines.main([str(path)]) == 1
    assert "constant earns more than silence" in capsys.readouterr().out
    with pytest.raises(SystemExit) as caught:
        baselines.main([str(tmp_path / "none")])
    assert caught.value.code == 2


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """The 24 synthetic videos of the README's table."""
    from resources_servers.caption_qa import convert

    synthetic = pytest.importorskip(
        "resources_servers.sav_tracks.synthetic", reason="uses sav_tracks' converter"
    )
    pytest.importorskip("decord", reason="reads videos (pip install decord2)")
    pytest.importorskip("cv2", reason="writes the synthetic video")
    folder = tmp_path_factory.mktemp("set")
    synthetic.main([str(folder), "--num-videos", "24", "--num-shapes", "3"])
    out = folder / "rows.jsonl"
    convert.main(
        [str(folder), "--names", str(folder / "names.json"), "--frame-side", "32", "--out", str(out)]
    )
    return out


@pytest.mark.slow
def test_the_readme_s_table_is_what_the_command_prints(converted, capsys):
    capsys.readouterr()
    assert baselines.main([str(converted)]) == 0
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert printed and "\n".join(printed[1:]) in README.read_text(encoding="utf-8")
    rewards = {name: values["reward"] for name, values in _baselines(converted).items()}
    assert rewards["oracle"] == 1.0 > rewards["silent"] == 0.1 > rewards["empty"] == 0.0
    assert rewards["empty"] > max(rewards["guess"], rewards["constant"])


def _baselines(path):
    return baselines.baselines([row.questions for row in read_rows(path)])


class FakeReadingJudge:
    """Stands in for a judge that makes no mistake: finds the answer in captions of the forms written here."""

    async def __call__(self, prompt):
        caption = re.search(r"\n\[(\w+)\]\n(.*?)\n\[\1\]\n", prompt, re.DOTALL).group(2)
        asked = re.search(r"^Question: (.*)$", prompt, re.MULTILINE).group(1)
        options = dict(line.split(". ", 1) for line in prompt.splitlines() if re.match(r"[A-I]\. ", line))
        said = self.answer(caption, asked, list(options.values()))
        return "Answer: " + next(letter for letter, text in options.items() if text == said)

    def answer(self, caption, asked, options):
        if asked.startswith("Is the"):
            if "Everything is hidden once." in caption:
                return "Yes, for part of the time"
            return "No, it is always visible" if "Nothing is ever hidden." in caption else CANNOT_ANSWER
        if asked.startswith("In which"):
            moved = re.search(r"Everything moves (.*?)\.", caption)
            return next((text for text in options if moved and text.lower() == moved.group(1)), CANNOT_ANSWER)
        names = sorted(text for text in options if text != CANNOT_ANSWER)
        order = re.search(r"From left to right: (alphabetical|reverse)", caption)
        return CANNOT_ANSWER if not order else names[0 if order.group(1) == "alphabetical" else -1]


@pytest.mark.slow
def test_no_caption_for_all_rows_earns_more_than_silence(converted):
    rows = [json.loads(line)["verifier_metadata"] for line in converted.read_text().splitlines()]
    captions = itertools.product(
        ("", "Everything is hidden once.", "Nothing is ever hidden."),
        (
            "",
            *(f"Everything moves {way}." for way in ("to the left", "to the right", "upwards", "downwards")),
        ),
        ("", "From left to right: alphabetical.", "From left to right: reverse."),
    )

    async def rewards(caption):
        scores = await asyncio.gather(*(score_caption(caption, row, FakeReadingJudge()) for row in rows))
        assert not any(score.error for score in scores)
        return sum(score.reward for score in scores) / len(scores)

    found = {parts: asyncio.run(rewards("A video. " + " ".join(parts))) for parts in captions}
    silent = found.pop(("", "", ""))
    assert silent == pytest.approx(0.1) and len(found) == 44
    assert max(found.values()) < silent, max(found, key=found.get)
