# SPDX-License-Identifier: Apache-2.0
"""A tiny sharded vision-language model on real gloo ranks; run as a script by the tests beside it.

    python ranks.py '{"job": {"ranks": 2, "dealt": [[...], [...]], "mode": "as_dealt", "min_tokens": 0,
                              "collective_timeout_s": 5, "limit_s": 60}, ...}'

torch is imported once and ranks are forked; whatever hangs is killed at the limit. Prints one JSON object with,
per job: `exits` (per rank, null when it had to be killed), `seconds`, `reference` (the same batch in one process)
and, when the step completed, `loss`, `grads` and `micro_batches` per rank. Logs of a job follow `== job`.
"""

import datetime
import json
import logging
import multiprocessing
import os
import socket
import sys
import time

import torch
import torch._dynamo  # FSDP's hooks import it: once here, rather than in every fork
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from nemo_rl_ext.guards.lockstep import dummy_pixels, plan_lockstep, zero_weighted
from nemo_rl_ext.guards.masks import LossMaskGuard

WIDTH, VOCAB, TOKENS = 8, 11, 48


class TinyVlm(nn.Module):
    """Text embeddings plus the mean of a vision tower's features; the tower is skipped without images."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.tower = nn.Sequential(nn.Linear(3 * 4 * 4, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.trunk = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids, pixels, dummy):
        hidden = self.embed(ids)
        if pixels is not None:
            hidden = hidden + self.tower(pixels.flatten(1)).mean(0)
        if dummy is not None:
            hidden = zero_weighted(hidden, self.tower(dummy.flatten(1)))
        return self.head(self.trunk(hidden))


def make_row(spec):
    """`{"seed", "loss_tokens", "image"}` -> ids [tokens], loss mask [tokens], pixels or None."""
    generator = torch.Generator().manual_seed(spec["seed"])
    ids = torch.randint(VOCAB, (TOKENS,), generator=generator)
    mask = torch.zeros(TOKENS)
    mask[: spec["loss_tokens"]] = 1
    pixels = torch.rand(2, 3, 4, 4, generator=generator) if spec["image"] else None
    return ids, mask, pixels


def row_loss(model, row, dummy=None):
    ids, mask, pixels = row
    logits = model(ids, pixels, dummy)
    return (nn.functional.cross_entropy(logits[:-1], ids[1:], reduction="none") * mask[1:]).sum()


def prepared(job, rank):
    """This rank's rows and dummies per micro-batch, by the mode under test."""
    rows = [make_row(spec) for spec in job["dealt"][rank]]
    dummies = [None] * len(rows)
    if job["mode"] == "drop":
        rows = [row for row in rows if row[1].sum() >= job["min_tokens"]]
    elif job["mode"] == "neutralise":
        LossMaskGuard(min_tokens=job["min_tokens"]).ragged([row[1] for row in rows])
    elif job["mode"] in ("order", "dummies"):
        kinds = [[("image",) if spec["image"] else () for spec in specs] for specs in job["dealt"]]
        plan = plan_lockstep(kinds, micro_batch_size=1, reorder=job["mode"] == "order")
        rows = [rows[i] for i in plan.order[rank]]
        blank = dummy_pixels(patch_size=2, merge_size=2)
        dummies = [blank if missing else None for missing in plan.dummies[rank]]
    return rows, dummies[: len(rows)]


def step(model, rows, dummies, scale):
    total = 0.0
    for row, dummy in zip(rows, dummies, strict=True):
        loss = row_loss(model, row, dummy) * scale
        loss.backward()
        total += float(loss.detach())
    return total


def sharded_masks(rank, min_tokens):
    """Rows of 31 and 32 loss tokens, sharded over two ranks; zigzag-packed and padded have to agree."""
    shard = torch.zeros(2, 20)
    shard[0, : 16 - rank] = 1
    shard[1, :16] = 1
    packed, owners = shard.flatten().clone(), torch.tensor([0, 1]).repeat_interleave(20)
    outcome = LossMaskGuard(min_tokens=min_tokens).padded(shard, group=dist.group.WORLD)
    again = LossMaskGuard(min_tokens=min_tokens).owned(packed, owners, 2, group=dist.group.WORLD)
    assert torch.equal(packed.view(2, 20), shard) and again == outcome
    return {"kept": shard.sum(1).int().tolist(), "zeroed": list(outcome.zeroed)}


def run_rank(rank, job, port, results):
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=job["ranks"],
        timeout=datetime.timedelta(seconds=job["collective_timeout_s"]),
    )
    if job["mode"] == "sharded_masks":
        gathered = [None] * job["ranks"]
        dist.all_gather_object(gathered, sharded_masks(rank, job["min_tokens"]))
        if rank == 0:
            results.put({"sharded": gathered})
        dist.barrier()
        return
    torch.manual_seed(0)
    model = TinyVlm()
    mesh = init_device_mesh("cpu", (job["ranks"],))
    # The tower has a group of its own, as towers with their own mesh do: ranks out of step then wait in different
    # groups. On a shared group gloo notices the size of the wrong message and aborts the process instead.
    fully_shard(model.tower, mesh=DeviceMesh.from_group(dist.new_group(), "cpu"))
    for part in (model.trunk, model):
        fully_shard(part, mesh=mesh)
    rows, dummies = prepared(job, rank)
    # FSDP averages gradients over ranks, so losses are scaled by ranks / loss tokens of the whole batch.
    num_tokens = torch.tensor(sum(float(row[1][1:].sum()) for row in rows))
    dist.all_reduce(num_tokens)
    loss = torch.tensor(step(model, rows, dummies, job["ranks"] / float(num_tokens)))
    dist.all_reduce(loss, op=dist.ReduceOp.SUM)
    grads = {
        name: None if p.grad is None else p.grad.full_tensor().tolist()
        for name, p in model.named_parameters()
    }
    counts = [None] * job["ranks"]
    dist.all_gather_object(counts, len(rows))
    if rank == 0:
        results.put({"loss": float(loss) / job["ranks"], "grads": grads, "micro_batches": counts})
    dist.barrier()
    dist.destroy_process_group()


def reference(job):
    """The same batch in one process, without sharding."""
    torch.manual_seed(0)
    model = TinyVlm()
    rows = [make_row(spec) for specs in job["dealt"] for spec in specs]
    for row in rows:
        if row[1].sum() < job["min_tokens"]:
            row[1].zero_()
    num_tokens = sum(float(row[1][1:].sum()) for row in rows)
    loss = step(model, rows, [None] * len(rows), 1 / num_tokens)
    return {
        "loss": loss,
        "grads": {n: None if p.grad is None else p.grad.tolist() for n, p in model.named_parameters()},
    }


def run_job(job):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    out = {"reference": reference(job)} if any(job["dealt"]) else {}
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    ranks = [context.Process(target=run_rank, args=(r, job, port, results)) for r in range(job["ranks"])]
    began = time.monotonic()
    for process in ranks:
        process.start()
    deadline = began + job["limit_s"]
    for process in ranks:
        process.join(max(0.0, deadline - time.monotonic()))
    out["exits"] = [process.exitcode for process in ranks]
    out["seconds"] = time.monotonic() - began
    for process in ranks:
        process.kill()
        process.join()
    if not results.empty():
        out.update(results.get())
    return out


def main():
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    logging.basicConfig()
    out = {}
    for name, job in json.loads(sys.argv[1]).items():
        print(f"== {name}", file=sys.stderr, flush=True)
        out[name] = run_job(job)
    print(json.dumps(out))


if __name__ == "__main__":
    main()
