# SPDX-License-Identifier: Apache-2.0
"""From Gym results to aligned message logs: plans, what travels, what is raised, and what is left behind."""

import asyncio
import gc
import logging
import weakref
from concurrent.futures import Future

import numpy as np
import pytest
import torch
from PIL import Image

from nemo_rl_ext.align.verdict import Reason, Verdict
from nemo_rl_ext.config.media_alignment import MediaAlignmentConfig
from nemo_rl_ext.integration.actor_alignment import ActorAlignment
from nemo_rl_ext.integration.neutral import NeutralMedia
from nemo_rl_ext.integration.rollout_result import PLAN_KEY, RECORD_KEY
from nemo_rl_ext.integration.settings import ACTOR_KEY
from nemo_rl_ext.receipts.receipt import read_receipt
from nemo_rl_ext.rollout.provenance import ROLLOUT_MATCHED_MEDIA_KEY, media_of


@pytest.fixture
def alignment(family, pool):
    def make(*, one_size=False, **settings):
        return ActorAlignment(
            neutral=NeutralMedia(family=family, counters=("num_patches",), one_size=one_size),
            pool=pool,
            settings=MediaAlignmentConfig(enabled=True, **settings),
            max_model_len=16384,
        )

    return make


def plan(alignment, row, result, *, static_attached=False):
    return asyncio.run(alignment.plan(row, result, static_attached=static_attached))


def num_features(message):
    return sum(h * w for h, w in message["imgs_sizes"].as_tensor().tolist()) // (16 * 16 * 4)


def test_a_matched_turn_gets_the_processors_tensors_unless_the_trainer_holds_them(alignment, rows):
    row = rows.row([rows.url(160, 320)])
    (turn,) = plan(alignment(), row, rows.result(row, [50])).user
    assert not turn.changed and turn.tensors.values.keys() >= {"pixel_values", "num_patches"}
    held = plan(alignment(), row, rows.result(row, [50]), static_attached=True)
    assert held.user[0].tensors is None and not held.keeps_initial and held.record.bytes_shipped == 0


def test_a_repaired_turn_comes_back_marked_with_every_key_of_the_processor(alignment, rows):
    row = rows.row([rows.url(160, 320)] * 2, id="row")
    found = plan(alignment(), row, rows.result(row, [18, 18]), static_attached=True)
    assert found.keeps_initial and found.record.num_changed == 1
    assert found.record.bytes_shipped == found.user[0].tensors.num_bytes
    assert found.record.row_id == "row, rollout 0"
    message = {"role": "user"}
    result = {"message_log": [message, {"role": "assistant"}], "full_result": {}}
    assert found.apply(result)[RECORD_KEY] is found.record
    assert message[ROLLOUT_MATCHED_MEDIA_KEY] and num_features(message) == 36
    assert media_of(message).keys() == {"pixel_values", "imgs_sizes", "num_frames", "num_patches"}
    assert "instance_config" not in result["full_result"]


def test_a_row_that_nothing_explains_is_masked_and_stays(alignment, rows):
    row = rows.row([rows.url(160, 320)], _ng_task_index=7)
    found = plan(alignment(), row, rows.result(row, [49]))
    assert found.record.neutral and found.record.row_id == "task 7, rollout 0"
    result = {"message_log": [{"role": "user"}, {"role": "assistant"}], "full_result": {}}
    found.apply(result)
    assert result["full_result"]["instance_config"] == {"mask_sample": True}
    assert num_features(result["message_log"][0]) == 49


@pytest.mark.parametrize("one_size", [False, True])
def test_where_resizing_is_to_be_prevented_a_resized_image_masks_its_row(alignment, rows, one_size):
    row = rows.row([rows.url(160, 320)] * 2)
    prevented = alignment(prevent=True, one_size=one_size)
    assert not plan(prevented, row, rows.result(row, [50, 50])).record.neutral
    found = plan(prevented, row, rows.result(row, [18, 18]), static_attached=True)
    assert found.record.neutral and found.keeps_initial
    assert set(found.record.reports[0].reasons()) == {Reason.PREVENTION_FAILED}
    result = {
        "message_log": [
            {"role": "user", "token_ids": torch.tensor(rows.prompt([18, 18]))},
            {"role": "assistant", "token_ids": torch.tensor([11, 12])},
        ],
        "full_result": {},
    }
    found.apply(result)
    assert result["full_result"]["instance_config"] == {"mask_sample": True}
    assert num_features(result["message_log"][0]) == 36
    with pytest.raises(ValueError, match="prevention_failed"):
        plan(alignment(prevent=True, on_unalignable="raise"), row, rows.result(row, [18, 18]))


@pytest.mark.parametrize(
    ("runs", "setting"), [([49], "on_unalignable"), ([50, 50], "on_unalignable"), ([240], "on_ambiguous")]
)
def test_a_verdict_that_shall_be_raised_is_raised_with_its_report(alignment, rows, runs, setting):
    size = (500, 500) if runs == [240] else (160, 320)
    row = rows.row([rows.url(*size)])
    with pytest.raises(ValueError, match=r"row 'unnamed, rollout 0', turn 0: .* placeholder runs?"):
        plan(alignment(**{setting: "raise"}), row, rows.result(row, runs))


def test_receipts_settle_a_tie_and_their_absence_is_reported_once(alignment, rows, caplog):
    row = rows.row([rows.url(500, 500)])
    with_receipts = alignment(evidence="receipt")
    with caplog.at_level(logging.INFO):
        found = plan(with_receipts, row, rows.result(row, [240], grids=[[32, 30]]))
        plan(with_receipts, row, rows.result(row, [240], grids=[[32, 30]]))
    (judged,) = found.record.reports[0].media
    assert (judged.verdict, judged.content_proven) == (Verdict.REPAIRED, True)
    assert caplog.text.count("media receipts arrive") == 1
    with caplog.at_level(logging.WARNING):
        missing = plan(alignment(evidence="receipt"), row, rows.result(row, [240]))
    assert missing.record.reports[0].reasons() == (Reason.AMBIGUOUS_GRID,)
    assert "came without a receipt" in caplog.text


def test_a_request_with_other_media_than_the_row_s_is_masked_by_name(alignment, rows):
    row, other = rows.row([rows.url(160, 320)]), rows.row([rows.url(160, 320, 7)])
    gone, changed = rows.result(row, [50], grids=[]), rows.result(row, [50])
    (theirs,) = rows.result(other, [50], grids=[[10, 20]])["response"]["output"]
    changed["response"]["output"][0]["media_receipt"] = theirs["media_receipt"]
    for reason, result in ((Reason.MEDIA_GONE, gone), (Reason.CONTENT_CHANGED, changed)):
        found = plan(alignment(evidence="receipt"), row, result)
        assert found.record.neutral and reason in found.record.reports[0].reasons()


class StoreStandIn:
    """The store's actor at the edge of this process: it answers every key with one receipt."""

    def __init__(self, receipt):
        self.get, self._receipt = self, receipt

    def remote(self, keys):
        self._keys = keys
        return self

    def future(self):
        done = Future()
        done.set_result([self._receipt] * len(self._keys))
        return done


@pytest.mark.parametrize("stored", [False, True])
def test_the_engines_own_places_count_where_nothing_better_is_stored(alignment, rows, stored):
    row = rows.row([rows.url(160, 320)])
    result = rows.result(row, [50])
    (item,) = result["response"]["output"]
    item |= {
        "generation_log_probs": [-1.0, -1.0],
        "mm_placeholders": {"image": [{"offset": 1, "length": 52}]},
    }
    (full,) = rows.result(row, [50], grids=[[10, 20]])["response"]["output"]
    found = alignment(evidence="receipt")
    found._store = StoreStandIn(read_receipt(full["media_receipt"]) if stored else None)
    (report,) = plan(found, row, result).record.reports
    assert report.media[0].verdict is Verdict.MATCHED and report.media[0].content_proven == stored
    item["mm_placeholders"]["image"].append({"offset": 53, "length": 1})
    report = plan(found, row, result).record.reports[0]
    assert (Reason.MEDIA_ADDED in report.reasons()) != stored


def test_a_matched_row_is_proven_by_its_file_alone(alignment, rows):
    row = rows.row([rows.url(160, 320)])
    (report,) = plan(
        alignment(evidence="receipt"), row, rows.result(row, [50], grids=[[10, 20]])
    ).record.reports
    assert report.media[0].content_proven and report.media[0].verdict is Verdict.MATCHED


def test_tool_images_sampled_media_tokens_and_text(alignment, rows):
    row = rows.row([rows.url(160, 320)])
    tool = rows.result(row, [50], tool=(rows.url(480, 640, 3), [120]), sampled=(11, 5))
    found = plan(alignment(), row, tool)
    assert [turn.changed for turn in found.user] == [False, True]
    assert found.assistant[0].report.reason is Reason.SAMPLED_CONTEXT and found.assistant[1] is None
    text = rows.row([])
    assert plan(alignment(), text, rows.result(text, [])) is None


def test_a_videos_first_turn_is_left_to_the_trainer(alignment, rows):
    row = rows.row([])
    row["responses_create_params"]["input"][0]["content"] = [{"type": "input_video", "video_url": "a.mp4"}]
    found = plan(alignment(), row, rows.result(row, [15, 15]))
    assert found.user == (None,) and found.record.has_video and found.record.reports == ()


def log_of(rows, *runs):
    return [{"role": role, "token_ids": torch.tensor(rows.prompt(run))} for role, run in runs]


@pytest.mark.parametrize("runs", [[49], [50, 120]], ids=["infeasible", "two sizes"])
def test_a_backend_of_one_size_gets_neutral_rows_of_one_size(alignment, rows, runs):
    row = rows.row([rows.url(*size) for size in ((160, 320), (480, 640))[: len(runs)]])
    sampled = (5, 11) if len(runs) == 1 else (11, 12)
    found = plan(alignment(one_size=True), row, rows.result(row, runs, sampled=sampled))
    assert found.record.neutral
    story = str(found.record.reports[0])
    assert ("this backend takes images of one size" in story) == (len(runs) == 2)
    log = [*log_of(rows, ("user", runs)), {"role": "assistant", "token_ids": torch.tensor(sampled)}]
    result = {"message_log": log, "full_result": {}}
    found.apply(result)
    media = [message["imgs_sizes"].as_tensor().tolist() for message in log if "imgs_sizes" in message]
    sizes = [tuple(size) for found in media for size in found]
    assert len(set(sizes)) == 1 and num_features(log[0]) == sum(runs) and "num_patches" in log[0]
    assert ("imgs_sizes" in log[1]) == (5 in sampled)


def test_equal_repairs_are_kept_on_a_backend_of_one_size(alignment, rows):
    row = rows.row([rows.url(160, 320, seed) for seed in range(2)])
    found = plan(alignment(one_size=True), row, rows.result(row, [18, 18]))
    assert not found.record.neutral and found.record.num_changed == 1


def test_neutral_media_have_the_processors_keys_wherever_they_are_made(alignment, rows):
    row = rows.row([rows.url(160, 320)])
    found = plan(alignment(), row, rows.result(row, [49], sampled=(11, 5)))
    for turn in (*found.user, *found.assistant):
        assert len(turn.tensors.values["num_patches"]) == len(turn.tensors.values["imgs_sizes"])


def test_what_nemo_rl_reads_otherwise_is_refused(alignment, rows):
    row = rows.row([rows.url(160, 320)])
    held = plan(alignment(), row, rows.result(row, [50]), static_attached=True)
    with pytest.raises(ValueError, match="NeMo-RL found 2 turns, alignment 1"):
        held.apply({"message_log": [{"role": "user"}] * 2, "full_result": {}})
    with pytest.raises(ValueError, match="wants the first turn's media back"):
        held.apply({"message_log": [{"role": "user"}, {"role": "assistant"}], "full_result": {}})


def test_local_images_become_data_urls_once_each(alignment, rows, tmp_path):
    path = tmp_path / "image.png"
    Image.fromarray(np.zeros((32, 32, 3), dtype=np.uint8)).save(path)
    row = rows.row([str(path), "https://example.com/a.png"])
    row["responses_create_params"]["input"][0]["content"] += [
        {"type": "input_image", "image_url": {"path": str(path)}},
        {"type": "input_text", "text": "look"},
        {"type": "input_image"},
    ]
    asyncio.run(alignment().encode_local_images([row, {"responses_create_params": {"input": "plain"}}]))
    parts = row["responses_create_params"]["input"][0]["content"]
    assert parts[0]["image_url"].startswith("data:image/png;base64,")
    assert parts[2]["image_url"] == parts[0]["image_url"]
    assert parts[1]["image_url"] == "https://example.com/a.png"
    asyncio.run(alignment().encode_local_images([rows.row([rows.url(8, 8)])]))


class Edge:
    """Stands where NeMo-Gym's rollout helper would call servers."""

    marker = "the helper's own"

    def __init__(self, results):
        self.results = results

    def run_examples(self, examples, head_server_config):
        async def answer(row):
            await asyncio.sleep(0)
            return row, self.results[row["_rowidx"]]

        return (answer(row) for row in examples)


@pytest.fixture
def actor(nemo_rl_shapes, alignment, monkeypatch):
    """The actor's class in this process; only its pool is this process's."""
    from nemo_rl_ext.integration.actor import AlignedNemoGym

    def make(results, **settings):
        made = alignment(**settings)
        monkeypatch.setattr(ActorAlignment, "start", lambda settings, **context: made)
        gym = {ACTOR_KEY: {"enabled": True, "context": {"max_model_len": 16384}}, "kept": 1}
        cfg = {"tokenizer_config": {"name": "tiny"}, "initial_global_config_dict": gym}
        actor = AlignedNemoGym(cfg)
        assert actor.cfg["initial_global_config_dict"] == {"kept": 1} and ACTOR_KEY in gym
        actor.rch = Edge(results)
        return actor

    return make


def collect(actor, examples, dedup=False):
    async def run():
        return [item async for item in actor.run_rollouts(examples, "t", dedup)]

    return sorted(asyncio.run(run()), key=lambda item: item[0])


def test_rollouts_come_back_aligned_and_the_helper_stays_nemo_gyms(actor, rows):
    examples = [rows.row([rows.url(160, 320)], index) for index in range(3)]
    results = [rows.result(row, [run]) for row, run in zip(examples, (50, 18, 49), strict=True)]
    made = actor(results)
    edge = made.rch
    found = [result for _, result, _ in collect(made, examples, dedup=True)]
    assert made.rch is edge
    first = [result["message_log"][0] for result in found]
    assert "pixel_values" not in first[0] and [num_features(message) for message in first[1:]] == [18, 49]
    assert found[2]["full_result"]["instance_config"]["mask_sample"]
    assert not any(PLAN_KEY in result["full_result"] for result in found)


def test_calls_side_by_side_keep_their_own_settings(actor, rows):
    examples = [rows.row([rows.url(160, 320)], index) for index in range(2)]
    made = actor([rows.result(row, [50]) for row in examples])

    async def run(row, dedup):
        return [item async for item in made.run_rollouts([row], "t", dedup)]

    async def both():
        return await asyncio.gather(run(examples[0], True), run(examples[1], False))

    (shared,), (own,) = asyncio.run(both())
    assert "pixel_values" not in shared[1]["message_log"][0]
    assert num_features(own[1]["message_log"][0]) == 50


def test_five_results_collected_and_closed_leave_no_plan_behind(actor, alignment, rows):
    from nemo_rl_ext.integration.actor import AligningCollection

    examples = [rows.row([rows.url(160, 320, index)], index) for index in range(5)]
    edge = Edge([rows.result(row, [18]) for row in examples])
    collection = AligningCollection(edge, alignment(), static_attached=False)
    assert collection.marker == "the helper's own"
    plans = []

    async def run():
        for task in collection.run_examples(examples, head_server_config=None):
            _, result = await task
            plans.append(weakref.ref(result[PLAN_KEY]))
        collection.close()

    asyncio.run(run())
    # As when a sibling's failure ended the stream: nobody post-processed them.
    edge.results.clear()
    gc.collect()
    held = sum(plan() is not None for plan in plans)
    assert len(plans) == 5 and held == 0, f"five results collected and closed: {held} plans held; right: none"


def test_a_failed_rollout_ends_its_siblings(actor, rows, nemo_rl_shapes):
    from nemo_rl.experience.failures import RolloutDataFailure

    examples = [rows.row([rows.url(160, 320)], index) for index in range(3)]
    made = actor([rows.result(row, [49]) for row in examples], on_unalignable="raise")
    with pytest.raises(RolloutDataFailure, match="infeasible_length"):
        collect(made, examples)


def test_what_is_no_result_is_nemo_rls_business(actor, rows):
    row = rows.row([rows.url(160, 320)])
    made = actor([{"error": "no response"}])
    with pytest.raises(KeyError, match="response"):
        collect(made, [row])


def test_a_file_that_cannot_be_sent_is_a_data_failure(actor, rows, nemo_rl_shapes):
    from nemo_rl.experience.failures import RolloutDataFailure

    made = actor([])
    with pytest.raises(RolloutDataFailure, match="outside"):
        collect(made, [rows.row(["/etc/hostname"])])


def test_disagreement_after_post_processing_is_a_data_failure(actor, rows, nemo_rl_shapes, monkeypatch):
    from nemo_rl.experience.failures import RolloutDataFailure

    row = rows.row([rows.url(160, 320)])
    made = actor([])
    result = rows.result(row, [50])
    result[PLAN_KEY] = plan(made._alignment, row, result, static_attached=True)
    with pytest.raises(RolloutDataFailure, match="wants the first turn's media back"):
        made._postprocess_nemo_gym_to_nemo_rl_result(row, result, None)


def test_without_settings_or_processor_the_actor_is_nemo_rls(nemo_rl_shapes, rows):
    from nemo_rl_ext.integration.actor import AlignedNemoGym

    row = rows.row([rows.url(160, 320)])
    for cfg in ({"tokenizer_config": {"name": "tiny"}}, {"initial_global_config_dict": {ACTOR_KEY: {}}}):
        plain = AlignedNemoGym(cfg)
        plain.rch = Edge([rows.result(row, [18])])
        ((_, result, _),) = collect(plain, [row])
        assert RECORD_KEY not in result and "pixel_values" not in result["message_log"][0]


def test_an_alignment_starts_its_own_pool(nemo_rl_shapes, processor, monkeypatch, caplog):
    from nemo_rl_ext.integration import actor_alignment

    started = []
    monkeypatch.setattr(
        actor_alignment, "AlignerPool", lambda config, count, **kw: started.append((config, count))
    )
    with caplog.at_level(logging.INFO):
        made = ActorAlignment.start(
            MediaAlignmentConfig(enabled=True, num_aligners=3, evidence="runs", media_roots=["/m"]),
            processor=processor,
            tokenizer_config={"name": "tiny"},
            max_model_len=512,
        )
    ((config, count),) = started
    assert count == 3 and str(config.media_policy.roots[0]) == "/m" and made.max_model_len == 512
    assert "3 aligners, patch grids from the placeholder runs" in caplog.text
