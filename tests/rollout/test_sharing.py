# SPDX-License-Identifier: Apache-2.0
"""One render for all who ask, in a real object store; what is lost is rendered again."""

import copy
import io
import os
import pickle
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from nemo_rl_ext.media.policy import MediaPolicy
from nemo_rl_ext.media.reader import MediaSource
from nemo_rl_ext.rollout.aligner import AlignerConfig, RolloutAligner
from nemo_rl_ext.rollout.fitting import TurnRequest
from nemo_rl_ext.rollout.sharing import ShapesJoined

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def config(tiny_checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("media")
    rng = np.random.default_rng(0)
    for number in range(6):
        coarse = Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8))
        coarse.resize((640, 480)).save(folder / f"{number}.png")
    return AlignerConfig(
        model_dir=tiny_checkpoint, media_policy=MediaPolicy(roots=(folder,)), base_dir=folder, share=True
    )


@pytest.fixture(scope="module")
def brokers(cluster):
    from nemo_rl_ext.rollout.broker import broker_handle, end_brokers, start_brokers

    handles = start_brokers(max_bytes=64 << 20)
    yield broker_handle
    end_brokers(handles)


@pytest.fixture(scope="module")
def pool(config, brokers):
    from nemo_rl_ext.rollout.pool import AlignerPool

    pool = AlignerPool(config, 2)
    pool.pids()
    yield pool
    pool.shutdown()


def request(family, names, row, lengths=None):
    ids = [40]
    for length in lengths or [165] * len(names):
        ids += [family.grammar.start_id, *[family.grammar.context_id] * length, family.grammar.end_id]
    media = tuple(MediaSource(ref=name, where=f"row {row}") for name in names)
    return TurnRequest(row_id=row, turn=0, token_ids=np.array(ids, np.int32), media=media)


def counts(brokers):
    import ray

    return ray.get(brokers().counts.remote())


def in_process(config, names):
    import dataclasses

    aligner = RolloutAligner(dataclasses.replace(config, share=False))
    (turn,) = aligner.align([request(aligner.family, names, "r")])
    return turn.tensors.values


def test_a_group_over_two_aligners_is_one_render_for_each_item_and_equal_bytes(pool, brokers, config):
    before = counts(brokers)
    futures = [pool.submit_align([request(pool.family, ["0.png", "1.png"], f"r{n}")]) for n in range(12)]
    turns = [future.result()[0] for future in futures]
    assert not turns[0].report.neutral, str(turns[0].report)
    after = counts(brokers)
    assert after["made"] - before["made"] == 2
    assert after["shared"] - before["shared"] <= 2, "an aligner asks once for what it had lately"
    assert [turn.report.row_id for turn in turns] == [f"r{n}" for n in range(12)]
    expected = in_process(config, ["0.png", "1.png"])
    for turn in turns:
        values = turn.tensors.values
        assert torch.equal(torch.cat([values["pixel_values"]]), expected["pixel_values"])
        assert torch.equal(values["image_grid_hw"], expected["image_grid_hw"])
        assert len(pickle.dumps(turn.report)) < 4096
    assert len({turn.tensors.values["pixel_values"] for turn in turns}) == 1, "one object to a batch"


def test_joining_what_is_stored_loads_nothing_of_torchs_compiler():
    """torch's own `cat` of shapes loads 800 modules, in every aligner, at the first repair of two media."""
    script = (
        "import sys, torch\n"
        "from nemo_rl_ext.rollout.sharing import ShapesJoined\n"
        "with ShapesJoined():\n"
        "    joined = torch.cat([torch.empty(2, 3, device='meta'), torch.empty(4, 3, device='meta')])\n"
        "assert joined.shape == (6, 3) and joined.is_meta and 'sympy' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_shapes_that_do_not_fit_are_joined_no_better_than_by_torch():
    with ShapesJoined(), pytest.raises(RuntimeError, match="Sizes of tensors must match"):
        torch.cat([torch.empty(2, 3, device="meta"), torch.empty(2, 4, device="meta")])


def test_what_stands_in_for_a_tensor_answers_like_it(pool, config):
    (turn,) = pool.submit_align([request(pool.family, ["2.png"], "r")]).result()
    stored, real = turn.tensors.values["pixel_values"], in_process(config, ["2.png"])["pixel_values"]
    assert (stored.shape, stored.dtype, stored.ndim) == (real.shape, real.dtype, real.ndim)
    assert stored.numel() * stored.element_size() == real.nbytes and stored.is_floating_point()
    assert copy.deepcopy(stored) is stored
    half = stored.to("cpu", dtype=torch.bfloat16)
    assert torch.equal(torch.cat([half]), real.to(torch.bfloat16))
    assert torch.equal(torch.nn.functional.pad(stored, (0, 1)), torch.nn.functional.pad(real, (0, 1)))


def test_a_file_holds_the_pixels_and_each_once(pool, config):
    """A checkpoint of a replay buffer outlives the object store."""
    turns = [pool.submit_align([request(pool.family, ["3.png"], f"r{n}")]).result()[0] for n in range(8)]
    buffer = io.BytesIO()
    torch.save([turn.tensors.values["pixel_values"] for turn in turns], buffer)
    real = in_process(config, ["3.png"])["pixel_values"]
    assert buffer.tell() < 1.1 * real.nbytes
    buffer.seek(0)
    assert all(torch.equal(loaded, real) for loaded in torch.load(buffer, weights_only=False))


def test_a_lost_object_is_rendered_again_where_it_is_missed(pool, brokers, config, caplog):
    import dataclasses

    import ray

    from nemo_rl_ext.rollout.stored import StoredTensor

    @ray.remote(num_cpus=0)
    class Mortal:
        def put(self):
            return [ray.put(np.zeros(1 << 20, np.uint8))]

    # An object whose owner died is lost for good, however Ray looks for it.
    mortal = Mortal.remote()
    (gone,) = ray.get(mortal.put.remote())
    ray.kill(mortal)
    with pytest.raises(ray.exceptions.ObjectLostError):
        while True:
            ray.get(gone)
    (turn,) = pool.submit_align([request(pool.family, ["1.png"], "r")]).result()
    stored = turn.tensors.values["pixel_values"]
    (blob,) = stored.blobs
    stored = StoredTensor([dataclasses.replace(blob, ref=gone)], stored.shape)
    kept = counts(brokers)["kept"]
    assert torch.equal(torch.cat([stored]), in_process(config, ["1.png"])["pixel_values"])
    assert "rendered again" in caplog.text
    assert counts(brokers)["kept"] == kept - 1, "nobody else is given what is lost"


@pytest.mark.parametrize("victim", ["aligner", "broker"])
def test_killed_with_references_outstanding_nothing_is_lost(pool, brokers, config, victim):
    import ray

    names = ["4.png", "5.png"]
    (turn,) = pool.submit_align([request(pool.family, names, "r")]).result()
    if victim == "aligner":
        for pid in pool.pids():
            os.kill(pid, signal.SIGKILL)
    else:
        ray.kill(brokers(), no_restart=False)
    stored = turn.tensors.values["pixel_values"]
    assert torch.equal(torch.cat([stored]), in_process(config, names)["pixel_values"])
    (again,) = pool.submit_align([request(pool.family, names, "r2")]).result()
    assert torch.equal(torch.cat([again.tensors.values["pixel_values"]]), torch.cat([stored]))


def test_bfloat16_in_the_store_is_the_trainers_own_cast(brokers, config):
    import dataclasses

    aligner = RolloutAligner(dataclasses.replace(config, dtype=torch.bfloat16, share=False))
    (turn,) = aligner.align([request(aligner.family, ["0.png", "1.png"], "r")])
    cast = in_process(config, ["0.png", "1.png"])["pixel_values"].to(torch.bfloat16)
    assert torch.equal(turn.tensors.values["pixel_values"], cast)

    import ray

    from nemo_rl_ext.rollout.stored import Blob, as_array

    blob = Blob(
        identity="x", ref=ray.put(as_array(cast)), shape=tuple(cast.shape), dtype=cast.dtype, remake=list
    )
    assert torch.equal(blob.open(), cast)
