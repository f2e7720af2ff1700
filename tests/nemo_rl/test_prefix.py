# SPDX-License-Identifier: Apache-2.0
"""NeMo-RL's chat worker replaces a prompt's prefix by the sampled tokens, and keeps the engine's media ranges.

Where the template writes an earlier answer with another number of tokens, later media then lie beside their context
tokens. No count shows it; the engine's receipt does.
"""

import numpy as np
import pytest
import torch
from driving import urls
from gym_edge import CONTEXT, END, START, prompt_ids
from nemo_rl.models.generation.openai_server_utils import replace_prefix_tokens

from nemo_rl_ext.align.families.family import Layout
from nemo_rl_ext.align.verdict import Reason, Verdict
from nemo_rl_ext.integration.aligner import NemoRLAligner, NemoRLAlignerConfig, NemoRLTurnRequest
from nemo_rl_ext.media.policy import MediaPolicy
from nemo_rl_ext.media.reader import MediaSource
from nemo_rl_ext.receipts.evidence import items_of_turn
from nemo_rl_ext.receipts.receipt import ItemReceipt, Receipt, prompt_digest

EOS, LOOK, YES, NO = 2, 9, 11, 12
FIRST = prompt_ids([50])


@pytest.fixture(scope="module")
def aligner(checkpoint, tmp_path_factory):
    return NemoRLAligner(
        NemoRLAlignerConfig(
            model_dir=checkpoint,
            media_policy=MediaPolicy(roots=(tmp_path_factory.mktemp("media"),)),
            layout=Layout.REMOTE,
            dtype=torch.float32,
            trust_remote_code=True,
            tokenizer_config={"name": str(checkpoint), "chat_template": "default"},
        )
    )


def second_request(tokenizer, sampled, retokenised):
    """What NeMo-RL's worker sends in the second turn, and the runs that the engine keeps from before."""
    template = [*FIRST, *retokenised, EOS, START, *[CONTEXT] * 50, END, LOOK]
    sent = replace_prefix_tokens(
        tokenizer=tokenizer,
        model_prefix_token_ids=[*FIRST, *sampled],
        template_prefix_token_ids=[*FIRST, *retokenised, EOS],
        template_token_ids=template,
    )
    starts = [index + 1 for index, token in enumerate(template) if token == START]
    return sent, [((start, 50),) for start in starts]


def second_turn(sent, runs, sampled):
    receipt = Receipt(
        prompt_tokens=len(sent),
        prompt=prompt_digest(sent),
        items=tuple(ItemReceipt(kind="image", range=run[0], runs=run) for run in runs),
    )
    seen = len(FIRST) + len(sampled)
    (reference,) = urls([(160, 320)], seed=1)
    return NemoRLTurnRequest(
        row_id="r",
        turn=1,
        token_ids=np.asarray(sent[seen:]),
        media=(MediaSource(ref=reference, where="row r"),),
        receipt=items_of_turn(receipt, 1, seen),
    )


@pytest.mark.parametrize(
    "sampled", [[YES, YES, EOS], [YES, YES, NO, NO, EOS], [YES, EOS]], ids=["same", "longer", "shorter"]
)
def test_a_range_beside_its_context_tokens_is_seen_and_masked(aligner, sampled):
    sent, runs = second_request(aligner.static.processor.tokenizer, sampled, retokenised=[YES, YES])
    (aligned,) = aligner.align([second_turn(sent, runs, sampled)])
    # The counts are those of the static tensors whatever happened.
    assert aligned.report.found == (50,)
    if len(sampled) == 3:
        assert aligned.report.media[0].verdict is Verdict.MATCHED and not aligned.report.neutral
    else:
        assert aligned.report.neutral and aligned.report.reasons() == (Reason.FEATURES_MISPLACED,)
