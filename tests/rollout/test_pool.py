# SPDX-License-Identifier: Apache-2.0
"""Real Ray actors, real files, a real image processor."""

import os
import signal

import numpy as np
import pytest
import torch
from PIL import Image

from nemo_rl_ext.align.verdict import Reason, Verdict
from nemo_rl_ext.media.policy import MediaPolicy
from nemo_rl_ext.media.reader import MediaSource
from nemo_rl_ext.rollout.aligner import AlignerConfig
from nemo_rl_ext.rollout.fitting import TurnRequest

pytestmark = pytest.mark.engine

SIZES = {"a.png": (480, 640), "b.png": (1024, 300), "c.png": (1024, 300)}


@pytest.fixture(scope="module")
def media_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("media")
    rng = np.random.default_rng(0)
    for name, (height, width) in SIZES.items():
        coarse = Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8))
        coarse.resize((width, height)).save(folder / name)
    (folder / "half.png").write_bytes((folder / "a.png").read_bytes()[:900])
    return folder


@pytest.fixture(scope="module")
def config(tiny_checkpoint, media_dir):
    return AlignerConfig(
        model_dir=tiny_checkpoint, media_policy=MediaPolicy(roots=(media_dir,)), base_dir=media_dir
    )


@pytest.fixture(scope="module")
def pool(config, cluster):
    from nemo_rl_ext.rollout.pool import AlignerPool

    pool = AlignerPool(config, 2)
    yield pool
    pool.shutdown()


def request(family, lengths, names, row="r", **kwargs):
    grammar = family.grammar
    ids = [40]
    for length in lengths:
        ids += [grammar.start_id, *[grammar.context_id] * length, grammar.end_id]
    media = tuple(MediaSource(ref=name, where=f"row {row}") for name in names)
    return TurnRequest(row_id=row, turn=0, token_ids=np.array(ids, np.int32), media=media, **kwargs)


def test_static_tensors_come_from_the_checkpoints_own_processor(pool):
    (turn,) = pool.submit_static([tuple(MediaSource(ref=name) for name in SIZES)]).result()
    assert [grid.num_tokens() for grid in turn.tensors.grids] == [252, 232, 232]
    assert turn.tensors.values["pixel_values"].shape == (716 * 4, 768)


def test_our_arithmetic_and_pixels_are_the_processors_own(pool, config):
    from nemo_rl_ext.rollout.aligner import RolloutAligner

    local = RolloutAligner(config)
    (turn,) = pool.submit_static([tuple(MediaSource(ref=name) for name in SIZES)]).result()
    items = [local.reader.measure(MediaSource(ref=name)) for name in SIZES]
    grids = local.family.static_grids(items)
    assert grids == turn.tensors.grids
    ours = torch.cat([local.family.render(item, grid) for item, grid in zip(items, grids, strict=True)])
    assert torch.allclose(ours, turn.tensors.values["pixel_values"], atol=2e-6)


def test_matched_turns_ship_no_tensors_and_equal_repairs_are_one_object(pool):
    (static,) = pool.submit_static([tuple(MediaSource(ref=name) for name in SIZES)]).result()
    grids = static.tensors.grids
    requests = [request(pool.family, (165, 144, 144), SIZES, f"r{i}", static_grids=grids) for i in range(4)]
    requests.append(request(pool.family, (252, 232, 232), SIZES, "r4", static_grids=grids))
    aligned = pool.submit_align(requests).result()
    assert len({id(turn.tensors) for turn in aligned[:4]}) == 1
    assert aligned[0].report.repaired
    assert aligned[0].tensors.num_features(2) == 453
    assert aligned[4].tensors is None
    assert not aligned[4].changed
    assert [item.verdict for item in aligned[4].report.media] == [Verdict.MATCHED] * 3


def test_a_broken_file_is_a_neutral_turn_that_names_it(pool):
    aligned = pool.submit_align([request(pool.family, (165,), ["half.png"], "row-9")]).result()[0]
    assert aligned.report.reasons() == (Reason.DECODE_FAILED,)
    assert aligned.tensors.num_features(2) == 165
    assert "half.png" in str(aligned.report)
    assert "row-9" in str(aligned.report)


def test_a_missing_file_is_no_static_tensors_but_an_error(pool):
    (turn,) = pool.submit_static([(MediaSource(ref="none.png", where="data.jsonl:3"),)]).result()
    assert turn.tensors is None
    assert "none.png" in turn.error
    assert "data.jsonl:3" in turn.error


def test_a_killed_aligner_is_replaced_and_its_work_done_again(pool):
    deaths = pool.deaths
    victims = pool.pids()
    futures = [pool.submit_align([request(pool.family, (165,), ["a.png"], f"r{i}")]) for i in range(12)]
    for pid in victims:
        os.kill(pid, signal.SIGKILL)
    assert [future.result()[0].report.row_id for future in futures] == [f"r{i}" for i in range(12)]
    assert pool.deaths > deaths
    assert not set(pool.pids()) & set(victims)


def test_a_row_that_ends_every_aligner_becomes_neutral_and_its_group_is_kept(config, pool):
    from nemo_rl_ext.rollout import pool as pool_module

    class Poisoned(pool_module.RolloutAligner):
        """A real aligner that a certain row ends, as a decoder crash would."""

        def align(self, turns):
            if any(turn.row_id == "poison" for turn in turns):
                os._exit(1)
            return super().align(turns)

    poisoned = pool_module.AlignerPool(config, 1, aligner_class=Poisoned)
    try:
        requests = [request(pool.family, (165,), ["a.png"], row) for row in ("r0", "poison", "r1")]
        aligned = poisoned.submit_align(requests).result()
        assert [turn.report.row_id for turn in aligned] == ["r0", "poison", "r1"]
        assert [turn.report.neutral for turn in aligned] == [False, True, False]
        assert aligned[1].report.reasons() == (Reason.WORKER_DIED,)
        assert aligned[1].tensors.num_features(2) == 165
    finally:
        poisoned.shutdown()


def test_aligners_that_died_idle_are_no_rows_fault(pool):
    for _ in range(3):
        for pid in pool.pids():
            os.kill(pid, signal.SIGKILL)
        (turn,) = pool.submit_align([request(pool.family, (165,), ["a.png"], "r103")]).result()
        assert turn.report.repaired and not turn.report.neutral


def lost(kind):
    """An error as Ray raises it when work is lost."""
    from ray import exceptions

    if kind == "argument":
        cause = exceptions.ObjectReconstructionFailedError("ab" * 28)
        return exceptions.RayTaskError("f", "traceback", cause)
    made = {
        "ObjectReconstructionFailedError": ("ab" * 28,),
        "OwnerDiedError": ("ab" * 28, "127.0.0.1:1", "f"),
        "ObjectLostError": ("ab" * 28, "127.0.0.1:1", "f"),
        "NodeDiedError": ("node died",),
        "OutOfMemoryError": ("out of memory",),
        "OutOfDiskError": ("disk full",),
    }
    return getattr(exceptions, kind)(*made.get(kind, ()))


KINDS = (
    "argument",
    "ObjectReconstructionFailedError",
    "OwnerDiedError",
    "ObjectLostError",
    "NodeDiedError",
    "OutOfMemoryError",
    "OutOfDiskError",
    "WorkerCrashedError",
    "ActorDiedError",
)


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_ray_loses_the_work_is_done_and_the_pool_is_whole(pool, monkeypatch, kind):
    """Both actors of the pool lose a call in this way; none of them may be missing afterwards."""
    errors = [lost(kind), lost(kind)]
    wait = pool.result_of

    def losing(result):
        done = wait(result)
        if isinstance(done, list) and errors:
            raise errors.pop()
        return done

    monkeypatch.setattr(pool, "result_of", losing)
    (turn,) = pool.submit_align([request(pool.family, (165,), ["a.png"], "r1")]).result(timeout=120)
    assert turn.report.repaired and not turn.report.neutral and not errors
    assert pool.num_idle == 2 and len(set(pool.pids())) == 2


def test_more_aligners_than_cpus_are_refused_with_what_to_do(config, cluster):
    from nemo_rl_ext.rollout.pool import AlignerPool

    with pytest.raises(
        ValueError, match=r"99 aligners ask Ray for 1 CPUs each.*num_aligners.*aligner_cpus=0"
    ):
        AlignerPool(config, 99)
