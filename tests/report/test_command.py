# SPDX-License-Identifier: Apache-2.0
"""`inspect` and `report` as a shell calls them, on rollouts in Gym's own form with real media and a real tokenizer."""

import base64
import io
import json
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from nemo_rl_ext.align.families.nemotron import NemotronFamily
from nemo_rl_ext.align.runs import Grammar
from nemo_rl_ext.media.identity import pixel_digest
from nemo_rl_ext.media.policy import MediaPolicy
from nemo_rl_ext.models.tokenizer import IMAGE_ID, SPECIAL_TOKENS
from nemo_rl_ext.receipts.receipt import ItemReceipt, Receipt, prompt_digest
from nemo_rl_ext.report.inspection import InspectConfig, Inspector
from nemo_rl_ext.report.stored_rows import StoredRow, stored_rows

GRAMMAR = Grammar(SPECIAL_TOKENS.index("<img>"), IMAGE_ID, SPECIAL_TOKENS.index("</img>"))


@pytest.fixture(scope="module")
def family(checkpoint):
    return NemotronFamily.from_pretrained(checkpoint)


def data_url(width, height, seed=0):
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def prompt(family, lengths):
    grammar = family.grammar
    ids = [40, 41]
    for length in lengths:
        ids += [grammar.start_id, *[grammar.context_id] * length, grammar.end_id, 42]
    return ids


def generated(prompt_ids, answer=(43, 44)):
    return {
        "role": "assistant",
        "type": "message",
        "content": [{"type": "output_text", "text": "x", "annotations": []}],
        "prompt_token_ids": list(prompt_ids),
        "generation_token_ids": list(answer),
        "generation_log_probs": [-0.1] * len(answer),
    }


def row(urls, output, index=0):
    content = [{"type": "input_text", "text": "look"}]
    content += [{"type": "input_image", "image_url": url, "detail": "auto"} for url in urls]
    return {
        "responses_create_params": {"input": [{"role": "user", "content": content}]},
        "response": {"output": output},
        "reward": 1.0,
        "_ng_task_index": index,
        "_ng_rollout_index": 0,
    }


WIDE, SMALL = (1024, 300), (200, 220)


@pytest.fixture
def rows(family):
    """A matched, a repaired and a masked rollout, and one of two turns whose second brings an image from a tool."""

    def tokens(size, budget=None):
        height_width = (size[1], size[0])
        tiler = family.tiler
        grid = tiler.static_grid(height_width) if budget is None else tiler.grid(height_width, budget)
        return grid.num_tokens()

    wide, small = data_url(*WIDE), data_url(*SMALL)
    first = prompt(family, [tokens(SMALL)])
    second = [*first, 43, 44, *prompt(family, [tokens(WIDE, 600)])]
    tool = {
        "type": "function_call_output",
        "call_id": "c",
        "output": [{"type": "input_image", "image_url": wide, "detail": "auto"}],
    }
    return {
        "matched": row([small], [generated(first)], 0),
        "repaired": row([wide], [generated(prompt(family, [tokens(WIDE, 600)]))], 1),
        "masked": row([wide, small], [generated(prompt(family, [tokens(WIDE)]))], 2),
        "two turns": row([small], [generated(first), tool, generated(second)], 3),
    }


def write(path, rows):
    path.write_text("".join(json.dumps(entry) + "\n" for entry in rows))
    return path


def inspected(path, checkpoint, **settings):
    config = InspectConfig(
        model_dir=checkpoint, policy=MediaPolicy(roots=(path.parent,)), base_dir=path.parent, **settings
    )
    return list(Inspector(config).rows(path))


def test_rows_are_judged_as_a_run_would(rows, tmp_path, checkpoint):
    results = inspected(write(tmp_path / "r.jsonl", rows.values()), checkpoint)
    assert [result.outcome for result in results] == ["matched", "repaired", "masked", "repaired"]
    assert [result.row_id for result in results] == ["0#0", "1#0", "2#0", "3#0"]
    repaired = results[1].turns[0].media[0]
    assert repaired.grid != repaired.static_grid and repaired.found != repaired.expected
    assert results[2].turns[0].reason.value == "run_count"
    assert [turn.turn for turn in results[3].turns] == [0, 1]
    assert [item.verdict.value for turn in results[3].turns for item in turn.media] == ["matched", "repaired"]


@pytest.mark.parametrize("server", ["sav_tracks", "caption_qa"])
def test_rollouts_that_gyms_own_collection_recorded_from_a_real_engine_are_matched(server, checkpoint):
    path = (
        Path(__file__).parents[2] / "gym_resources/resources_servers" / server / "data/example_rollouts.jsonl"
    )
    results = inspected(path, checkpoint)
    assert [result.outcome for result in results] == ["matched"] * 5
    # Not vacuous: every row brought frames, and their runs were found.
    assert all(item.found for result in results for turn in result.turns for item in turn.media)
    assert sum(len(turn.media) for result in results for turn in result.turns) >= 10


def test_an_image_that_shrank_in_a_later_turn_is_told(rows, family, tmp_path, checkpoint):
    wide = data_url(*WIDE)
    tiler = family.tiler
    full = tiler.static_grid((WIDE[1], WIDE[0])).num_tokens()
    less = tiler.grid((WIDE[1], WIDE[0]), 600).num_tokens()
    first = prompt(family, [full])
    second = [*prompt(family, [less]), 43, 44, *prompt(family, [less])]
    more = {"role": "user", "content": [{"type": "input_image", "image_url": wide, "detail": "auto"}]}
    path = write(tmp_path / "r.jsonl", [row([wide], [generated(first), more, generated(second)])])
    (result,) = inspected(path, checkpoint)
    assert result.outcome == "repaired"
    assert result.resizes == (f"media 0 had {full} tokens in turn 0 and {less} in turn 1",)


def as_nemo_rl_stores(rollout, family):
    """The row as NeMo-RL's trajectory collection writes it: ids are popped, their text takes their place."""
    stored = json.loads(json.dumps(rollout))
    for item in stored["response"]["output"]:
        if "prompt_token_ids" in item:
            item["prompt_str"] = family.decode(item.pop("prompt_token_ids"))
            item["generation_str"] = family.decode(item.pop("generation_token_ids"))
            del item["generation_log_probs"]
    return stored


def test_text_in_the_place_of_token_ids_leads_to_the_same_verdicts(rows, family, tmp_path, checkpoint):
    by_ids = inspected(write(tmp_path / "ids.jsonl", rows.values()), checkpoint)
    stored = [as_nemo_rl_stores(rollout, family) for rollout in rows.values()]
    by_text = inspected(write(tmp_path / "text.jsonl", stored), checkpoint)
    assert [result.to_json() for result in by_text] == [result.to_json() for result in by_ids]
    assert [result.outcome for result in by_text] == ["matched", "repaired", "masked", "repaired"]


def test_a_later_prompt_goes_on_from_the_ids_of_the_earlier_text(rows, family, tmp_path):
    """However the tokenizer would cut the whole: one sequence, as it was generated."""
    path = write(tmp_path / "r.jsonl", [as_nemo_rl_stores(rows["two turns"], family)])

    def encode(text):
        # A tokenizer that merges over every boundary: one id for any text.
        return [hash(text) % 1000]

    (row,) = stored_rows(path, encode, (GRAMMAR,))
    first, second = row.turns
    seen = [*first.prompt_token_ids, *first.token_ids]
    assert second.prompt_token_ids.tolist()[: len(seen)] == seen and len(second.prompt_token_ids) > len(seen)


def test_lines_without_a_rollout_are_told_apart_and_do_not_end_the_check(rows, tmp_path, checkpoint):
    bare = json.loads(json.dumps(rows["matched"]))
    del bare["response"]["output"][0]["prompt_token_ids"]
    broken = json.loads(json.dumps(rows["matched"]))
    broken["response"]["output"][0]["prompt_token_ids"] = [1, "two"]
    path = tmp_path / "r.jsonl"
    lines = [json.dumps(bare), "{ not json", "[]", "{}", json.dumps(broken), "", json.dumps(rows["matched"])]
    path.write_text("\n".join(lines) + "\n")
    results = inspected(path, checkpoint)
    assert [result.outcome for result in results] == ["unreadable"] * 5 + ["matched"]
    assert "return_token_id_information" in results[0].problem
    assert [result.line for result in results] == [1, 2, 3, 4, 5, 7]


def test_a_missing_file_masks_its_row_and_names_itself(family, tmp_path, checkpoint):
    path = write(tmp_path / "r.jsonl", [row(["gone.png"], [generated(prompt(family, [64]))])])
    (result,) = inspected(path, checkpoint)
    assert result.outcome == "masked"
    assert "gone.png" in result.turns[0].media[0].detail


def test_a_truncated_picture_is_found_when_media_are_decoded_whole(rows, tmp_path, checkpoint):
    url = data_url(*SMALL)
    head, _, payload = url.partition(",")
    data = base64.b64decode(payload)
    cut = head + "," + base64.b64encode(data[: len(data) // 2]).decode()
    rows["matched"]["responses_create_params"]["input"][0]["content"][1]["image_url"] = cut
    path = write(tmp_path / "r.jsonl", [rows["matched"]])
    assert inspected(path, checkpoint)[0].outcome == "matched", "headers alone do not tell"
    assert inspected(path, checkpoint, decode=True)[0].outcome == "masked"


def test_rows_are_read_one_at_a_time(rows, tmp_path):
    path = write(tmp_path / "r.jsonl", [rows["matched"]])
    with open(path, "a") as handle:
        handle.write(json.dumps(rows["repaired"]) + "\n")
    reading = stored_rows(path, encode=list, grammars=(GRAMMAR,))
    assert isinstance(next(reading), StoredRow)
    with open(path, "a") as handle:
        handle.write(json.dumps(rows["masked"]) + "\n")
    assert len(list(reading)) == 2, "a line that is written while the file is read is still seen"


def test_the_command_prints_json_lines_and_an_exit_code_for_ci(rows, tmp_path, checkpoint, command):
    path = write(tmp_path / "all.jsonl", rows.values())
    done = command("inspect", path, "--model", checkpoint, "--json")
    assert done.returncode == 1, done.stderr
    *each, last = [json.loads(line) for line in done.stdout.splitlines()]
    assert [entry["outcome"] for entry in each] == ["matched", "repaired", "masked", "repaired"]
    assert each[1]["turns"][0]["media"][0]["would_repair"] is True
    assert last["totals"]["rows"] == {"matched": 1, "repaired": 2, "masked": 1}
    fine = write(tmp_path / "fine.jsonl", [rows["matched"], rows["repaired"]])
    assert command("inspect", fine, "--model", checkpoint).returncode == 0
    assert command("inspect", fine, "--model", checkpoint, "--strict").returncode == 1


def test_the_table_names_rows_reasons_and_what_to_do(rows, tmp_path, checkpoint, command):
    path = write(tmp_path / "r.jsonl", rows.values())
    done = command("inspect", path, "--model", checkpoint, "--show", "2")
    assert "4 rows: 1 matched, 2 repaired, 1 masked" in done.stdout
    assert "... 1 more rows" in done.stdout
    assert "run_count x1" in done.stdout and "chat template" in done.stdout


def test_a_wrong_checkpoint_or_file_is_one_line(rows, tmp_path, checkpoint, command):
    path = write(tmp_path / "r.jsonl", rows.values())
    done = command("inspect", path, "--model", tmp_path)
    assert done.returncode == 2 and "\n" not in done.stderr.strip(), done.stderr
    done = command("inspect", tmp_path / "none.jsonl", "--model", checkpoint)
    assert done.returncode == 2 and "none.jsonl" in done.stderr


def test_report_prints_where_the_page_is(run_dir, command):
    done = command("report", run_dir)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(run_dir / "report.html")
    done = command("report", run_dir.parent)
    assert done.returncode == 2 and "metrics.jsonl" in done.stderr


def test_the_page_about_looking_at_a_run_names_options_that_exist(command):
    page = (Path(__file__).parents[2] / "docs" / "report.md").read_text(encoding="utf-8")
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", page))
    assert {"--json", "--strict", "--version", "--quiet"} <= named
    helps = "".join(
        command(*arguments).stdout
        for arguments in (("--help",), ("inspect", "--help"), ("report", "--help"), ("grpo", "--help"))
    )
    assert sorted(named - set(re.findall(r"--[a-z][a-z-]+", helps))) == []


def receipt_for(ids, url, grid, run):
    pixels = np.asarray(Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))).convert("RGB"))
    start = ids.index(IMAGE_ID)
    item = ItemReceipt(
        kind="image",
        pixels=pixel_digest(pixels),
        served=pixel_digest(pixels),
        range=(start - 1, run + 2),
        runs=((start, run),),
        geometry={"imgs_sizes": [16 * grid[0], 16 * grid[1]]},
    )
    return Receipt(prompt_tokens=len(ids), prompt=prompt_digest(ids), items=(item,)).as_dict()


def test_stored_receipts_settle_ties_and_name_what_each_verdict_rests_on(checkpoint, family, tmp_path):
    path = tmp_path / "rollouts.jsonl"
    tie, other = data_url(500, 500), data_url(500, 500, seed=1)
    ids = prompt(family, [240])
    with_receipt = generated(ids) | {"media_receipt": receipt_for(ids, tie, (32, 30), 240)}
    rewritten = generated(ids) | {"media_receipt": receipt_for(ids, other, (32, 30), 240)}
    rows = [row([tie], [generated(ids)]), row([tie], [with_receipt]), row([tie], [rewritten])]
    path.write_text("".join(json.dumps(value) + "\n" for value in rows))
    inspector = Inspector(InspectConfig(model_dir=checkpoint, policy=MediaPolicy(), base_dir=tmp_path))
    results = list(inspector.rows(path))
    assert [result.outcome for result in results] == ["masked", "repaired", "masked"]
    (proven,) = results[1].to_json()["turns"][0]["media"]
    assert (proven["grid"], proven["evidence"]) == ([32, 30], "receipt")
    assert results[2].to_json()["turns"][0]["reasons"] == ["content_changed"]


def test_a_tool_s_bare_url_is_an_image_where_the_ids_hold_a_run_for_it(checkpoint, family, tmp_path):
    path = tmp_path / "rollouts.jsonl"
    first = prompt(family, [16])
    tool = {"type": "function_call_output", "call_id": "1", "output": data_url(128, 128, seed=2)}
    shown = [*first, 43, 44, *prompt(family, [16])]
    as_text = [*first, 43, 44, 45]
    rows = [row([data_url(128, 128)], [generated(first), tool, generated(ids)]) for ids in (shown, as_text)]
    path.write_text("".join(json.dumps(value) + "\n" for value in rows))
    inspector = Inspector(InspectConfig(model_dir=checkpoint, policy=MediaPolicy(), base_dir=tmp_path))
    assert [result.outcome for result in inspector.rows(path)] == ["matched", "matched"]
