# SPDX-License-Identifier: Apache-2.0
"""Data-parallel and context-parallel ranks over plain ``torch.distributed``.

Ranks form a grid: ``cp_size`` neighbours share the same rows and split their sequence into contiguous shards;
the groups of neighbours are data-parallel. The model is replicated. Two sums over *all* ranks make a step:
the token counts before it, the gradients after it. Because every rank contributes a plain sum, it does not
matter which rank holds how many response tokens, and a rank without any adds zeros.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """This process's place in the grid of ranks."""

    dp_rank: int = 0
    dp_size: int = 1
    cp_rank: int = 0
    cp_size: int = 1
    device: torch.device = torch.device("cpu")
    cp_group: dist.ProcessGroup | None = None

    @property
    def world_size(self) -> int:
        return self.dp_size * self.cp_size

    @property
    def is_main(self) -> bool:
        return self.dp_rank == 0 and self.cp_rank == 0

    def shard(self, sequence: Tensor, dim: int = 1) -> Tensor:
        """This rank's contiguous part of ``sequence``, whose length must be a multiple of ``cp_size``."""
        if self.cp_size == 1:
            return sequence
        return sequence.chunk(self.cp_size, dim=dim)[self.cp_rank]

    def sum(self, values: Tensor) -> Tensor:
        """``values`` added up over all ranks, on every rank."""
        if self.world_size > 1:
            values = values.to(self.device)
            dist.all_reduce(values)
        return values

    def barrier(self) -> None:
        if self.world_size > 1:
            dist.barrier()


def world_size_from_environment() -> int:
    """Number of processes that ``torchrun`` started (1 without it)."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def check_layout(*, cp_size: int, world_size: int, global_batch_size: int, micro_batch_size: int) -> None:
    """Refuse a rank grid or a batch that does not divide.

    Raises:
        ValueError: naming the numbers and what to change.
    """
    if world_size % cp_size:
        raise ValueError(
            f"--cp-size {cp_size} does not divide the world size {world_size}; "
            f"start a multiple of {cp_size} with torchrun --nproc-per-node"
        )
    step = world_size // cp_size * micro_batch_size
    if global_batch_size % step:
        raise ValueError(
            f"--global-batch-size {global_batch_size} is not a multiple of micro batch {micro_batch_size} x "
            f"{world_size // cp_size} data-parallel ranks = {step}"
        )


def start(cp_size: int, *, timeout_s: float = 1800.0) -> Ranks:
    """Join the process group that ``torchrun`` describes, or return the single-process grid.

    Rank ``r`` is context-parallel neighbour ``r % cp_size`` of data-parallel group ``r // cp_size``. Uses
    NCCL and one GPU a process where CUDA is present, gloo otherwise.
    """
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if cuda else torch.device("cpu")
    world_size = world_size_from_environment()
    if world_size == 1:
        return Ranks(device=device)
    if cuda:
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(seconds=timeout_s))
    mesh = init_device_mesh(device.type, (world_size // cp_size, cp_size), mesh_dim_names=("dp", "cp"))
    ranks = Ranks(
        dp_rank=mesh.get_local_rank("dp"),
        dp_size=world_size // cp_size,
        cp_rank=mesh.get_local_rank("cp"),
        cp_size=cp_size,
        device=device,
        cp_group=mesh.get_group("cp"),
    )
    logger.info("rank %d of %d: dp %d/%d, cp %d/%d", dist.get_rank(), world_size, ranks.dp_rank,
    ranks.dp_size,
                ranks.cp_rank, ranks.cp_size)  # fmt: skip
    return ranks


def finish(ranks: Ranks) -> None:
    """Leave the process group after a complete run.

    Never call it on the error path: it waits for collectives that the failed rank will not join. A process
    that exits with an error takes the others down through ``torchrun``.
    """
    if ranks.world_size > 1:
        dist.destroy_process_group()


def sum_gradients(
    parameters: Iterable[torch.nn.Parameter], ranks: Ranks, *, bucket_bytes: int = 64 << 20
) -> None:
    """Add up the gradients of all ranks in place, in fp32, in a fixed order.

    A parameter that this rank did not use (a vision tower without an image, say) contributes zeros, so the
    number and the shapes of the collectives depend on the model alone and never on the data.
    """
    trained = [p for p in parameters if p.requires_grad]
    for parameter in trained:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    if ranks.world_size == 1:
        return
    bucket: list[Tensor] = []
    size = 0
    for parameter in trained:
        gradient = parameter.grad
        assert gradient is not None, "every trained parameter was given one above"
        bucket.append(gradient)
        size += gradient.numel() * 4
        if size >= bucket_bytes:
            _sum_bucket(bucket)
            bucket, size = [], 0
    if bucket:
        _sum_bucket(bucket)


def _sum_bucket(gradients: list[Tensor]) -> None:
    flat = torch.cat([g.reshape(-1).float() for g in gradients])
    dist.all_reduce(flat)
    for gradient, summed in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(summed.view_as(gradient))
