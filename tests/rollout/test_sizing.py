# SPDX-License-Identifier: Apache-2.0
"""Sizes are arithmetic over measured costs; the command prints them, and refuses what it cannot read."""

import dataclasses
import json

import pytest

from nemo_rl_ext.rollout.sizing import BUSY, Costs, Workload, needs

COSTS = Costs(
    render_s=0.1,
    image_bytes=2**20,
    rollout_s=0.001,
    image_s=0.0005,
    collect_s=0.002,
    collect_bytes=2**10,
    claim_s=0.001,
    aligner_mib=512.0,
)


def test_a_render_is_paid_once_for_each_distinct_image_and_a_look_up_by_every_rollout():
    work = Workload(prompts=256, gpus=64, generations=16, images=16)
    found = needs(work, COSTS)
    assert work.distinct == 256 * 16
    assert found.aligner_cpu_s == pytest.approx(4096 * 0.1 + 4096 * (0.001 + 16 * 0.0005))
    assert found.alone_cpu_s == pytest.approx(16 * 4096 * 0.1 + 4096 * 0.009)
    assert found.aligners * work.step_s * BUSY >= found.aligner_cpu_s
    assert (found.aligners - 1) * work.step_s * BUSY < found.aligner_cpu_s
    assert found.store_gib == pytest.approx(4096 * 2 / 1024 / 0.75)


def test_images_of_a_rollouts_own_cost_as_many_renders_as_there_are_rollouts():
    shared = Workload(prompts=8, gpus=8, generations=16, images=4)
    own = dataclasses.replace(shared, own_images=4)
    assert own.distinct == 16 * shared.distinct
    assert needs(own, COSTS).aligner_cpu_s == pytest.approx(needs(own, COSTS).alone_cpu_s)


def test_an_image_travels_to_every_node_that_one_of_its_generations_is_trained_on():
    one = Workload(prompts=64, gpus=8, generations=16, images=16)
    many = dataclasses.replace(one, gpus=512)
    assert needs(many, COSTS).network_gib == pytest.approx(16 * needs(one, COSTS).network_gib)
    # A replica over four nodes opens its pixels on each of them; there are no more nodes than there are.
    wide = dataclasses.replace(one, gpus=256, gpus_per_replica=32)
    assert needs(wide, COSTS).network_gib == pytest.approx(32 * needs(one, COSTS).network_gib)
    own = dataclasses.replace(many, own_images=16)
    assert needs(own, COSTS).network_gib == pytest.approx(16 * needs(one, COSTS).network_gib)


def test_nothing_to_repair_renders_nothing():
    found = needs(Workload(prompts=64, gpus=8, repaired=0.0), COSTS)
    assert found.store_gib == found.network_gib == 0 and found.aligners == 1


def test_more_own_images_than_images_are_refused():
    with pytest.raises(ValueError, match="at most 2 images"):
        Workload(prompts=1, gpus=8, images=2, own_images=3)


def test_the_command_prints_a_row_per_size_from_an_earlier_measurement(command, tmp_path):
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(dataclasses.asdict(COSTS)))
    done = command("size", "--costs", path, "--prompts", "64,256", "--gpus", "8,512")
    assert done.returncode == 0, done.stderr
    rows = [line for line in done.stdout.splitlines() if line.startswith("| ")]
    assert len(rows) == 5 and rows[4].startswith("| 256 | 512 | 446 |")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "a checkpoint to measure with, or --costs"),
        (("--costs", "none.json"), "none.json: expected what --save-costs writes"),
        (("--costs", "costs.json", "--gpus", "8,x"), "--gpus: expected whole numbers"),
        (("--costs", "costs.json", "--image-size", "big"), "--image-size: expected WIDTHxHEIGHT"),
        (("--costs", "half.json"), "half.json: expected what --save-costs writes"),
    ],
)
def test_what_the_command_cannot_use_is_one_sentence(command, tmp_path, monkeypatch, arguments, said):
    (tmp_path / "costs.json").write_text(json.dumps(dataclasses.asdict(COSTS)))
    (tmp_path / "half.json").write_text('{"render_s": 0.1}')
    monkeypatch.chdir(tmp_path)
    done = command("size", *arguments)
    assert done.returncode == 2 and said in done.stderr, done.stderr
