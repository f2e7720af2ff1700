# SPDX-License-Identifier: Apache-2.0
"""What prompt groups whose rollouts are all repaired cost each of NeMo-RL's processes; one JSON line per path.

    PYTHONPATH=CHECKOUT:NEMO_RL python tests/nemo_rl/measure_group.py [NUM_IMAGES] [NUM_GENERATIONS]

Real NemoGym actor, collector, replay buffer and batch types, answered at the network edge; a policy worker that takes
its shard apart into micro-batches. Without the brokers every rollout's repair travels as tensors of its own. Memory is
the highest private memory over that before the collection, so views of the object store are not in it. Two groups are
collected, and the first of them is trained on.
"""

import asyncio
import base64
import gc
import hashlib
import io
import json
import os
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import ray
import torch
from PIL import Image

sys.path.insert(0, str(Path(__file__).parent))

import conftest
import driving
import gym_edge

SIZE = (1080, 2400)
MIB = 1 << 20
GROUPS = 2
"""That NeMo-RL collects before the first step: one for it, and one that may be a step older."""


def private(pid):
    status = Path(f"/proc/{pid}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("RssAnon")).split()[1]) / 1024


class Watch:
    """Private memory and CPU of processes, by name."""

    def __init__(self, pids):
        self.pids = pids
        self.base = {name: private(pid) for name, pid in pids.items()}
        self.cpu = {name: self._cpu(pid) for name, pid in pids.items()}
        self.peak = dict(self.base)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    @staticmethod
    def _cpu(pid):
        return sum(psutil.Process(pid).cpu_times()[:2])

    def _run(self):
        while not self._ended.wait(0.02):
            for name, pid in self.pids.items():
                self.peak[name] = max(self.peak[name], private(pid))

    def end(self):
        self._ended.set()
        self._thread.join()
        return {
            name: {
                "mib": round(self.peak[name] - self.base[name], 1),
                "cpu_s": round(self._cpu(pid) - self.cpu[name], 2),
            }
            for name, pid in self.pids.items()
        }


@ray.remote(num_cpus=0)
class Worker:
    """Where a policy worker of NeMo-RL would be: it opens one micro-batch after another."""

    def pid(self):
        return os.getpid()

    def digests(self, shard):
        shard.to("cpu")
        found = []
        for batch in shard.make_microbatch_iterator(1):
            media = batch.get_multimodal_dict(as_tensors=True, device=torch.device("cpu"))
            pixels = media["pixel_values"]
            content = hashlib.sha256(pixels.contiguous().view(torch.uint8).numpy().data)
            found.append((str(pixels.dtype), tuple(pixels.shape), content.hexdigest()))
        return found


def picture_url(seed):
    coarse = Image.fromarray(np.random.default_rng(seed).integers(0, 256, (27, 60, 3), dtype=np.uint8))
    buffer = io.BytesIO()
    coarse.resize((SIZE[1], SIZE[0])).save(buffer, "JPEG", quality=90)
    return f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def shrunk_run(checkpoint):
    """A run's length that an image of SIZE can have got on one grid alone, and that is not its static one."""
    from nemo_rl_ext.align.families.family import Layout
    from nemo_rl_ext.align.families.registry import family_of

    tiler = family_of(checkpoint, layout=Layout.REMOTE).tiler
    static = tiler.static_grid(SIZE)
    for patches in range(int(static.num_patches * 0.9), 0, -64):
        tokens = tiler.grid(SIZE, patches).num_tokens()
        if len(tiler.feasible_grids(SIZE, tokens)) == 1:
            return tokens
    raise AssertionError("no run admits one grid alone")


def training_shards(trajectories):
    """Two shards of one batch, made as NeMo-RL's driver makes them."""
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict

    logs, flat = driving.training_batch(trajectories)
    data = BatchedDataDict({"input_ids": flat["token_ids"], "sample_mask": torch.ones(len(logs))})
    data.update(flat.get_multimodal_dict(as_tensors=False, pixel_dtype=torch.bfloat16))
    data.to("cpu")
    return data.shard_by_batch_size(2, batch_size=len(logs))


def measure(root, checkpoint, rows, generations, file, *, shared):
    from nemo_rl_ext.integration.in_process import uninstall
    from nemo_rl_ext.integration.install import install_driver
    from nemo_rl_ext.rollout.broker import BrokersHandOver, end_brokers

    length = 65536
    own = lambda self: os.getpid()  # noqa: E731
    config = driving.image_recipe(root, checkpoint, rows, dedup=False, generations=generations, repeat=20)
    config.grpo.num_prompts_per_step = 1
    config.policy["max_total_sequence_length"] = length
    config.policy["generation"]["vllm_cfg"]["max_model_len"] = length
    worker = Worker.remote()
    with pytest.MonkeyPatch.context() as patch:
        if not shared:
            patch.setattr(BrokersHandOver, "start", classmethod(lambda cls: False))
        assert install_driver()
        with driving.collecting(config, patch) as (gym, collector, buffer, start):
            handles = {"NemoGym actor": gym, "collector": collector, "replay buffer": buffer}
            pids = {name: ray.get(handle.__ray_call__.remote(own)) for name, handle in handles.items()}
            (aligner,) = ray.get(gym.__ray_call__.remote(lambda self: self._alignment.pool.pids()))
            pids |= {"driver": os.getpid(), "policy worker": ray.get(worker.pid.remote()), "aligner": aligner}
            watch = Watch(pids)
            start()
            while ray.get(buffer.size.remote()) < GROUPS:
                ray.get(collector.check_health.remote())
                time.sleep(0.2)
            collected = watch.end()
            # A checkpoint of the replay buffer opens its media, in the buffer's process; it is no part of a step.
            ray.get(buffer.save_to_path.remote(str(file)))
            saved = file.stat().st_size
            file.unlink()
            watch = Watch(pids)
            sampled = buffer.sample.remote(num_prompt_groups=1, current_weight_version=0, max_age_steps=1)
            trajectories = ray.get(sampled)["trajectories"]
            repaired = sum(one["rollout_metrics"]["alignment/media_repaired"] for one in trajectories)
            shards = training_shards(trajectories)
            logs = [log for one in trajectories for log in one["batch"]["message_log"]]
            pixels = [
                t for log in logs for t in log[0]["pixel_values"].tensors if isinstance(t, torch.Tensor)
            ]
            in_driver = sum(tensor.nbytes for tensor in {id(tensor): tensor for tensor in pixels}.values())
            del trajectories, logs, pixels
            digests = [digest for shard in shards for digest in ray.get(worker.digests.remote(shard))]
            trained = watch.end()
        uninstall()
    ray.kill(worker)
    end_brokers(BrokersHandOver.handles)
    BrokersHandOver.handles = []
    del shards
    gc.collect()
    # The order in which groups come is not told.
    content = hashlib.sha256(repr(sorted(digests)).encode()).hexdigest()[:12]
    return {
        "shared": shared,
        "media_repaired": repaired,
        "micro_batches": len(digests),
        "digests": content,
        "pixels_in_driver_mib": round(in_driver / MIB, 1),
        "replay_save_mib": round(saved / MIB, 1),
        **{
            name: {
                "mib": max(collected[name]["mib"], trained[name]["mib"]),
                "cpu_s": round(collected[name]["cpu_s"] + trained[name]["cpu_s"], 2),
            }
            for name in pids
        },
    }


def main():
    images = int(sys.argv[1]) if len(sys.argv) > 1 else 4
    generations = int(sys.argv[2]) if len(sys.argv) > 2 else 16
    asyncio.set_event_loop(asyncio.new_event_loop())
    with tempfile.TemporaryDirectory(prefix="nrx-measure-") as scratch:
        directory = Path(scratch)
        checkpoint = conftest.write_checkpoint(directory / "nano")
        run = shrunk_run(checkpoint)
        rows = driving.write_rows(
            directory / "rows.jsonl",
            [
                gym_edge.image_row(
                    [picture_url(image) for image in range(images)], [[run] * images], id="group"
                )
            ],
        )
        root = Path(conftest.find_spec("nemo_rl").submodule_search_locations[0]).parent
        with conftest.running_head(object_store_memory=4 << 30):
            for shared in (False, True):
                found = measure(root, checkpoint, rows, generations, directory / "replay.pt", shared=shared)
                print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
