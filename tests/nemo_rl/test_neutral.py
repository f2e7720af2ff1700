# SPDX-License-Identifier: Apache-2.0
"""Neutral media in NeMo-RL's AutoModel filter, which refuses a micro-batch whose images differ in size."""

import pytest
import torch
from gym_edge import prompt_ids
from nemo_rl.models.automodel.data import filter_multimodal_kwargs_for_model

from nemo_rl_ext.align.families.nemotron import NemotronFamily
from nemo_rl_ext.integration.neutral import NeutralMedia
from nemo_rl_ext.rollout.provenance import media_of


class TakesPixelsOnly(torch.nn.Module):
    """A forward with the arguments of the released AutoModel Omni checkpoint."""

    def forward(self, input_ids, pixel_values=None):
        return input_ids


@pytest.fixture(scope="module")
def neutral():
    import tiny_processor

    processor = tiny_processor.NemotronH_Nano_Omni_Reasoning_V3Processor(
        tiny_processor.TinyOmniImageProcessor(), tiny_processor.make_tokenizer()
    )
    return NeutralMedia(
        family=NemotronFamily.from_processor(processor), counters=("num_patches",), one_size=True
    )


RUNS = [[50], [37], [300], [2010], [50, 18]]


@pytest.mark.parametrize("runs", RUNS, ids=str)
def test_the_filter_takes_a_neutral_row(neutral, runs):
    message = {"role": "user", "token_ids": torch.tensor(prompt_ids(runs))}
    neutral.fill_row([message])
    media = {key: value.as_tensor() for key, value in media_of(message).items()}
    kept = filter_multimodal_kwargs_for_model(TakesPixelsOnly(), media)
    assert kept.keys() == {"pixel_values"}
    height, width = kept["pixel_values"].shape[2:]
    assert len(kept["pixel_values"]) * height * width // (16 * 16 * 4) == sum(runs)


@pytest.mark.parametrize("runs", RUNS, ids=str)
def test_a_neutral_turn_made_for_megatron_would_end_the_run(neutral, runs):
    values = neutral.of_turn(prompt_ids(runs)).values
    if len({tuple(size) for size in values["imgs_sizes"].tolist()}) == 1:
        pytest.skip(f"{runs} happens to be one rectangle")
    with pytest.raises(ValueError, match="mixed-resolution"):
        filter_multimodal_kwargs_for_model(TakesPixelsOnly(), values)
