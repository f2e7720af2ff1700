# SPDX-License-Identifier: Apache-2.0
"""One rank of the multi-process tests: accumulate a global batch of each configuration, write what came
out."""

import sys
from pathlib import Path

import torch

from nemo_rl_ext.distill import parallel
from nemo_rl_ext.distill.config import DistillConfig
from nemo_rl_ext.distill.loop import Trainer
from nemo_rl_ext.distill.prepare import prepare

if __name__ == "__main__":
    out = Path(sys.argv[1])
    torch.set_num_threads(1)
    for path in sorted(out.glob("*.json")):
        config = DistillConfig.model_validate_json(path.read_text())
        prepared = prepare(config)
        ranks = parallel.start(config.train.cp_size, timeout_s=240)
        trainer = Trainer(config, prepared, ranks)
        rows = prepared.train_rows[: config.train.global_batch_size]
        result = trainer.accumulate(rows)
        # Response tokens that this rank itself scored: shows how uneven the split was.
        mine = sum(int(ranks.shard(micro.mask).sum()) for micro in trainer._micro_batches(rows))
        seen = {
            "loss": result.loss,
            "ce": result.ce,
            "tokens": result.tokens,
            "my_tokens": mine,
            "sharded": trainer.student.sharded,
            "gradients": {name: p.grad for p, name in trainer.names.items()},
        }
        torch.save(seen, out / f"{path.stem}.rank_{ranks.dp_rank * ranks.cp_size + ranks.cp_rank}.pt")
    parallel.finish(ranks)
