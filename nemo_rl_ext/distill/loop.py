# SPDX-License-Identifier: Apache-2.0
"""The training loop: plain PyTorch, one process or several under ``torchrun``."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import yaml
from torch import nn

from nemo_rl_ext.disk import explained_disk_faults
from nemo_rl_ext.distill import checkpoint, context_parallel, parallel
from nemo_rl_ext.distill.batch import MicroBatch, collate, my_micro_batches
from nemo_rl_ext.distill.config import DistillConfig, TrainConfig
from nemo_rl_ext.distill.data import Row
from nemo_rl_ext.distill.losses import TokenSums, distill_sums
from nemo_rl_ext.distill.models import Scorer, sharding_error
from nemo_rl_ext.distill.prepare import Prepared, prepare
from nemo_rl_ext.manifest.row_order import RowOrder
from nemo_rl_ext.rollout.step_log import StepLog

logger = logging.getLogger(__name__)

_SHARDING_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 1e-1}


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """Means per response token over one global batch, the same on every rank."""

    loss: float
    kd: float
    ce: float
    hidden: float
    tokens: int

    def metrics(self, prefix: str) -> dict[str, float]:
        return {
            f"{prefix}/loss": self.loss,
            f"{prefix}/kd_loss": self.kd,
            f"{prefix}/ce_loss": self.ce,
            f"{prefix}/hidden_loss": self.hidden,
            f"{prefix}/tokens": self.tokens,
        }


def run(config: DistillConfig) -> StepResult:
    """Distil the teacher into the student and return the last step's result.

    Raises:
        ValueError: anything wrong with flags, files, records or checkpoints, before training starts.
        FloatingPointError: the loss is no longer finite.
    """
    train = config.train
    main = int(os.environ.get("RANK", "0")) == 0
    parallel.check_layout(
        cp_size=train.cp_size,
        world_size=parallel.world_size_from_environment(),
        global_batch_size=train.global_batch_size,
        micro_batch_size=train.micro_batch_size,
    )
    if main:
        checkpoint.require_output_dir(config)
    prepared = prepare(config)
    fingerprint = checkpoint.fingerprint(config, prepared.data_digest)
    saved = None
    if config.resume and config.output_dir.is_dir() and any(config.output_dir.iterdir()):
        checkpoint.require_same_run(config.output_dir, fingerprint)
        saved = checkpoint.newest(config.output_dir)
    ranks = parallel.start(train.cp_size, timeout_s=train.timeout_s)
    trainer = Trainer(config, prepared, ranks, resumed_from=saved)
    if main:
        config.output_dir.mkdir(parents=True, exist_ok=True)
        checkpoint.write_run(config.output_dir, fingerprint)
        (config.output_dir / "config.yaml").write_text(
            yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)
        )
    first = saved.step + 1 if saved else 1
    writer = (
        StepLog(
            config.output_dir, keep_until=first - 1 if first > 1 else None, tensorboard=config.tensorboard
        )
        if main
        else None
    )
    result = trainer.fit(first, writer)
    if writer is not None:
        writer.close()
    parallel.finish(ranks)
    return result


class Trainer:
    """Student, teacher and optimizer of one rank."""

    def __init__(
        self,
        config: DistillConfig,
        prepared: Prepared,
        ranks: parallel.Ranks,
        *,
        resumed_from: checkpoint.Saved | None = None,
    ) -> None:
        self.config, self.prepared, self.ranks = config, prepared, ranks
        train = config.train
        low = torch.bfloat16 if train.precision == "bf16" else torch.float32
        self.autocast = low if low is not torch.float32 else None
        source = prepared.student
        if resumed_from is not None:
            source = type(source)(**{**vars(source), "path": resumed_from.model_dir})
        student = source.load(torch.float32).to(ranks.device).train()
        teacher = prepared.teacher.load(low).to(ranks.device).eval().requires_grad_(False)
        if train.gradient_checkpointing:
            student.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self.model = student
        self.student = self._scorer("student", student)
        self.teacher = self._scorer("teacher", teacher)
        self.names = {p: name for name, p in student.named_parameters() if p.requires_grad}
        self.optimizer = _optimizer(self.names, train)
        if resumed_from is not None:
            checkpoint.restore_optimizer(resumed_from, self.optimizer, self.names)
            logger.info("resumed from %s", resumed_from.path)
        pad_id = prepared.student.tokenizer.pad_token_id
        self.pad_id = prepared.student.tokenizer.eos_token_id if pad_id is None else pad_id

    def _scorer(self, role: str, model: nn.Module) -> Scorer:
        wanted = self.config.train.cp_forward
        if self.ranks.cp_size == 1 or wanted == "replicated":
            return Scorer(model, self.ranks)
        error = sharding_error(model, self.ranks, self.prepared.vocab_size)
        if error <= _SHARDING_TOLERANCE[next(model.parameters()).dtype]:
            return Scorer(model, self.ranks, sharded=True)
        problem = (
            f"the {role}'s forward pass cannot be split over {self.ranks.cp_size} ranks: its logits differ "
            f"by "
            f"{error:.2g} of their spread (it has layers that mix positions without attention)"
        )
        if wanted == "sharded":
            raise ValueError(f"{problem}; use train.cp_forward=auto or replicated")
        logger.warning("%s; every rank computes the whole forward and only the loss is split", problem)
        return Scorer(model, self.ranks)

    def fit(self, first: int, writer: StepLog | None) -> StepResult:
        """Train from step ``first`` to the last; evaluate, save and report on the way."""
        config, train = self.config, self.config.train
        rows, order = self.prepared.train_rows, RowOrder(len(self.prepared.train_rows), train.seed)
        result = StepResult(loss=math.nan, kd=math.nan, ce=math.nan, hidden=math.nan, tokens=0)
        if first > train.iters:
            logger.info("nothing to do: step %d of %d is already saved", first - 1, train.iters)
        for step in range(first, train.iters + 1):
            began = time.perf_counter()
            start = (step - 1) * train.global_batch_size
            batch = [rows[order[start + i]] for i in range(train.global_batch_size)]
            # Dropout: a function of the step and the row's rank, so a resumed run draws what it would have
            # drawn.
            torch.manual_seed((train.seed * 1_000_003 + step) * 4_099 + self.ranks.dp_rank)
            result = self.accumulate(batch)
            norm, lr = self.update(step)
            seconds = time.perf_counter() - began
            metrics = result.metrics("train")
            metrics |= {"train/grad_norm": norm, "train/lr": lr, "train/step_seconds": seconds}
            metrics["train/tokens_per_second"] = result.tokens / seconds
            last = step == train.iters
            if config.eval.iters and (step % config.eval.interval == 0 or last):
                metrics |= self.evaluate().metrics("eval")
            if writer is not None:
                with self._writing(step):
                    writer.metrics(step, metrics)
                if step % config.log_interval == 0 or last or step == first:
                    _progress(step, train.iters, metrics)
            if last or step % config.save_interval == 0:
                self.save(step)
        return result

    def accumulate(self, batch: Sequence[Row]) -> StepResult:
        """Leave the gradient of a global batch's mean token loss in ``.grad``, exact and equal on all ranks."""
        # Every rank knows the whole batch, so the one divisor of the step needs no communication.
        tokens = sum(row.num_response_tokens for row in batch)
        self.optimizer.zero_grad(set_to_none=True)
        totals = torch.zeros(5, dtype=torch.float64)
        for micro in self._micro_batches(batch):
            with self._splitting(micro):
                sums = self._sums(micro)
                (sums.loss / tokens).backward()
            totals += sums.as_vector().cpu()
        parallel.sum_gradients(self.model.parameters(), self.ranks)
        return self._result(totals, tokens, batch)

    def update(self, step: int) -> tuple[float, float]:
        """Clip, step, and return the gradient norm before clipping and the learning rate."""
        train = self.config.train
        parameters = list(self.names)
        norm = float(nn.utils.clip_grad_norm_(parameters, train.clip_grad or math.inf))
        lr = learning_rate(step, train)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        return norm, lr

    @torch.no_grad()
    def evaluate(self) -> StepResult:
        """Mean token losses over the first ``eval.iters`` global batches of the validation rows."""
        batch = self.prepared.eval_rows[: self.config.eval.iters * self.config.train.global_batch_size]
        totals = torch.zeros(5, dtype=torch.float64)
        self.model.eval()
        for micro in self._micro_batches(batch):
            with self._splitting(micro):
                totals += self._sums(micro).as_vector().cpu()
        self.model.train()
        return self._result(totals, sum(row.num_response_tokens for row in batch), batch)

    def save(self, step: int) -> None:
        if self.ranks.is_main:
            with self._writing(step):
                checkpoint.save(
                    self.config.output_dir,
                    step=step,
                    model=self.model,
                    tokenizer=self.prepared.student.tokenizer,
                    source_dir=self.prepared.student.path,
                    optimizer=self.optimizer,
                    names=self.names,
                    keep=self.config.keep_checkpoints,
                )
        self.ranks.barrier()

    def _writing(self, step: int) -> contextlib.AbstractContextManager[None]:
        where = self.config.output_dir
        advice = f"make room in {where}, then continue with --resume"
        return explained_disk_faults(where, f"at step {step}", lambda: advice)

    def _micro_batches(self, batch: Sequence[Row]) -> Iterator[MicroBatch]:
        ranks = self.ranks
        shares = my_micro_batches(
            batch,
            dp_rank=ranks.dp_rank,
            dp_size=ranks.dp_size,
            micro_batch_size=self.config.train.micro_batch_size,
        )
        for rows in shares:
            yield collate(
                rows,
                pad_id=self.pad_id,
                multiple=ranks.cp_size,
                family=self.prepared.family,
                device=ranks.device,
            )

    def _splitting(self, micro: MicroBatch) -> contextlib.AbstractContextManager[None]:
        if self.student.sharded or self.teacher.sharded:
            return context_parallel.split_sequence(self.ranks, micro.valid)
        return contextlib.nullcontext()

    def _sums(self, micro: MicroBatch) -> TokenSums:
        labels, mask = self.ranks.shard(micro.labels), self.ranks.shard(micro.mask)
        positions = mask.any(0).nonzero()[:, 0]
        want_hidden = self.config.loss.hidden_weight > 0
        with torch.no_grad():
            teacher = self.teacher(micro, positions, want_hidden=want_hidden)
        with torch.autocast(self.ranks.device.type, dtype=self.autocast, enabled=self.autocast is not None):
            student = self.student(micro, positions, want_hidden=want_hidden)
        vocabulary = self.prepared.vocab_size
        return distill_sums(
            student_logits=student.logits[..., :vocabulary],
            teacher_logits=teacher.logits[..., :vocabulary],
            labels=labels[:, positions],
            mask=mask[:, positions],
            config=self.config.loss,
            student_hidden=student.hidden,
            teacher_hidden=teacher.hidden,
        )

    def _result(self, totals: torch.Tensor, tokens: int, batch: Sequence[Row]) -> StepResult:
        loss, kd, ce, hidden, counted = self.ranks.sum(totals.to(self.ranks.device)).tolist()
        assert counted == tokens, f"{counted} tokens were scored, {tokens} were expected"
        if not math.isfinite(loss):
            raise FloatingPointError(
                f"the loss is {loss} in a batch of {', '.join(row.where for row in batch[:4])}, ...; "
                f"nothing was "
                "updated. Lower train.lr, or use fp32"
            )
        return StepResult(
            loss=loss / tokens, kd=kd / tokens, ce=ce / tokens, hidden=hidden / tokens, tokens=tokens
        )


def learning_rate(step: int, train: TrainConfig) -> float:
    """Of step 1..iters: linear warm-up, then the schedule down to 0 after the last step."""
    if step <= train.lr_warmup_iters:
        return train.lr * step / train.lr_warmup_iters
    if train.lr_schedule == "constant":
        return train.lr
    done = (step - 1 - train.lr_warmup_iters) / max(train.iters - train.lr_warmup_iters, 1)
    return train.lr * (1 - done if train.lr_schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done)))


def _optimizer(names: dict[nn.Parameter, str], train: TrainConfig) -> torch.optim.AdamW:
    matrices = [p for p in names if p.ndim > 1]
    vectors = [p for p in names if p.ndim <= 1]
    groups = [
        {"params": matrices, "weight_decay": train.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=train.lr)


def _progress(step: int, steps: int, metrics: dict[str, float]) -> None:
    held_out = f", eval {metrics['eval/loss']:.4f}" if "eval/loss" in metrics else ""
    logger.info(
        "step %d/%d: loss %.4f (kd %.4f, ce %.4f)%s, %d tokens, %.0f tokens/s, about %s left",
        step,
        steps,
        metrics["train/loss"],
        metrics["train/kd_loss"],
        metrics["train/ce_loss"],
        held_out,
        metrics["train/tokens"],
        metrics["train/tokens_per_second"],
        time.strftime("%H:%M:%S", time.gmtime((steps - step) * metrics["train/step_seconds"])),
    )
