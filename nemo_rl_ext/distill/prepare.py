# SPDX-License-Identifier: Apache-2.0
"""Everything that can be refused before a weight is read: flags, files, records, vocabularies, shapes."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from nemo_rl_ext.align.families.family import MediaFamily
from nemo_rl_ext.align.wording import counted
from nemo_rl_ext.distill import vocab
from nemo_rl_ext.distill.config import DistillConfig
from nemo_rl_ext.distill.data import Row, RowRules, encode_documents, encode_pairs, mock_rows, require_eos
from nemo_rl_ext.distill.media import MediaExpander
from nemo_rl_ext.distill.models import Checkpoint, open_checkpoint
from nemo_rl_ext.distill.records import DatasetError, Problems, Record, read_records, read_texts
from nemo_rl_ext.media.policy import MediaPolicy

if TYPE_CHECKING:
    from hashlib import _Hash as Digest

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A run that has passed every check."""

    student: Checkpoint
    teacher: Checkpoint
    vocab_size: int
    """Ids that both tokenizers name; the loss looks at no other."""
    family: MediaFamily | None
    train_rows: list[Row]
    eval_rows: list[Row]
    data_digest: str


def prepare(config: DistillConfig) -> Prepared:
    """Open both checkpoints and turn the data into rows.

    Raises:
        ValueError: whatever is wrong, in one message; nothing has been written and no weight was read.
    """
    student = open_checkpoint(config.student, "student", trust_remote_code=config.trust_remote_code)
    teacher = open_checkpoint(config.teacher, "teacher", trust_remote_code=config.trust_remote_code)
    vocab_size = vocab.require_same(
        student.tokenizer, teacher.tokenizer, student_name=str(student.path), teacher_name=str(teacher.path)
    )
    for role, checkpoint in (("student", student), ("teacher", teacher)):
        vocab.require_width(f"--{role} {checkpoint.path}", width=checkpoint.width, vocab_size=vocab_size)
    if config.loss.hidden_weight > 0 and student.hidden_size != teacher.hidden_size:
        raise ValueError(
            f"loss.hidden_weight compares hidden states, but the student's have {student.hidden_size} "
            f"dimensions "
            f"and the teacher's {teacher.hidden_size}; set it to 0"
        )
    family = student.family()
    problems = Problems()
    digest = hashlib.sha256()
    train_rows, eval_rows = _rows(config, student, family, vocab_size, problems, digest)
    problems.raise_if_any()
    if not train_rows:
        raise DatasetError("no row is left to train on; every pair was skipped")
    if config.eval.iters and not eval_rows:
        raise DatasetError("no row is left to evaluate on; every pair was skipped")
    for role, checkpoint in (("student", student), ("teacher", teacher)):
        _require_positions(f"--{role} {checkpoint.path}", checkpoint, (*train_rows, *eval_rows), config)
    if any(row.media for row in (*train_rows, *eval_rows)) and teacher.family() != family:
        raise ValueError(
            f"the data have media, which student and teacher must see alike: --student {student.path} and "
            f"--teacher {teacher.path} differ in their image processors (or the teacher takes none)"
        )
    tokens = sum(row.num_response_tokens for row in train_rows)
    logger.info(
        "%s, %s; %s",
        counted(len(train_rows), "training row"),
        counted(tokens, "response token"),
        counted(len(eval_rows), "evaluation row"),
    )
    return Prepared(
        student=student,
        teacher=teacher,
        vocab_size=vocab_size,
        family=family,
        train_rows=train_rows,
        eval_rows=eval_rows,
        data_digest=digest.hexdigest(),
    )


def _rows(
    config: DistillConfig,
    student: Checkpoint,
    family: MediaFamily | None,
    vocab_size: int,
    problems: Problems,
    digest: Digest,
) -> tuple[list[Row], list[Row]]:
    data = config.data
    rules = RowRules(
        seq_length=data.seq_length, on_long_prompt=data.on_long_prompt, on_long_response=data.on_long_response
    )
    if data.use_mock_data:
        # Mock rows have no images, so they may not contain the token that an image would have to fill.
        banned = _context_ids(family)
        ids = [i for i in range(vocab_size) if i not in banned]
        rows = partial(mock_rows, ids=ids, rules=rules, eos_id=require_eos(student.tokenizer))
        return rows(count=256, seed=1), rows(count=64, seed=2)
    if data.data_paths:
        return _documents(config, student, family, rules, problems, digest)
    root = data.sft_dataset_root
    assert data.sft and root is not None, "exactly one source is chosen"
    if not root.is_dir():
        raise DatasetError(
            f"--sft-dataset-root {root}: not a directory; expected one with training.jsonl in it"
        )
    if not data.chat_template:
        logger.info(
            "input and output are tokenised verbatim: no chat template, no BOS, EOS once after the output"
        )
    train = _pairs(root / "training.jsonl", config, student, family, rules, problems, digest)
    evaluation: list[Row] = []
    if config.eval.iters:
        path = root / "validation.jsonl"
        if not path.exists():
            raise DatasetError(
                f"{path}: missing, and --eval-iters {config.eval.iters} needs it; --eval-iters 0 does not"
            )
        evaluation = _pairs(path, config, student, family, rules, problems, None)
    return train, evaluation


def _pairs(
    path: Path,
    config: DistillConfig,
    student: Checkpoint,
    family: MediaFamily | None,
    rules: RowRules,
    problems: Problems,
    digest: Digest | None,
) -> list[Row]:
    _require_file(path)
    if digest is not None:
        _hash(path, digest)
    records = read_records(path, problems, max_record_bytes=config.data.max_record_bytes)
    expand: MediaExpander | None = None
    if family is not None:
        policy = MediaPolicy(
            roots=tuple(config.data.media_roots),
            max_pixels=config.data.max_pixels,
            max_bytes=config.data.max_media_bytes,
        )
        expand = MediaExpander(
            family,
            student.tokenizer,
            policy,
            base_dir=path.parent,
            num_frames=config.data.video_num_frames,
            backend=config.data.video_backend,
        )
    elif student.takes_images and (with_media := [r for r in records if r.images or r.videos]):
        raise DatasetError(
            f"{with_media[0].where}: has media, but alignment does not know the model type "
            f"{student.config.model_type!r}; its text can be distilled, its media cannot"
        )
    return encode_pairs(
        records, student.tokenizer, rules, problems, chat_template=config.data.chat_template, expand=expand
    )


def _documents(
    config: DistillConfig,
    student: Checkpoint,
    family: MediaFamily | None,
    rules: RowRules,
    problems: Problems,
    digest: Digest,
) -> tuple[list[Row], list[Row]]:
    if config.eval.iters:
        raise ValueError(
            "--eval-iters needs validation.jsonl, which only --sft has; set it to 0 with --data-paths"
        )
    records: list[Record] = []
    for path in config.data.data_paths:
        _require_file(path)
        _hash(path, digest)
        records += read_texts(path, problems, max_record_bytes=config.data.max_record_bytes)
    rows = encode_documents(records, student.tokenizer, rules, problems)
    for row in rows:
        if np.isin(row.ids, _context_ids(family)).any():
            problems.add(row.where, "'text' spells an image context token, which no image fills")
    return rows, []


def _context_ids(family: MediaFamily | None) -> list[int]:
    """Tokens that only media may stand for."""
    return [] if family is None else [grammar.context_id for grammar in family.grammars]


def _require_positions(name: str, checkpoint: Checkpoint, rows: Sequence[Row], config: DistillConfig) -> None:
    limit = getattr(checkpoint.config.get_text_config(), "max_position_embeddings", None)
    longest = max(rows, key=lambda row: len(row.ids))
    cp_size = config.train.cp_size
    padded = -(-len(longest.ids) // cp_size) * cp_size
    if limit is not None and padded > limit:
        raise ValueError(
            f"{longest.where}: the row has {padded} tokens, but {name} knows {limit} positions "
            f"(max_position_embeddings); use --seq-length {limit // cp_size * cp_size} or less"
        )


def _require_file(path: Path) -> None:
    if not path.is_file():
        what = "not a file" if path.exists() else "missing"
        raise DatasetError(f"{path}: {what}; expected JSON Lines, one object per line")


def _hash(path: Path, digest: Digest) -> None:
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
