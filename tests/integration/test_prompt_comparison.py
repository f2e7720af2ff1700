# SPDX-License-Identifier: Apache-2.0
"""The engine's prompt ids against the trainer's, on NeMo-RL's path without NeMo-Gym."""

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest

from nemo_rl_ext.integration.prompt_comparison import (
    PromptMismatch,
    compare_batch,
    compare_stream,
    remember_ids,
)

PAD = 18


def prompt_ids(*lengths):
    return [1, *[token for length in lengths for token in (20, *[PAD] * length, 21)], 5, 6]


def data_of(*rows):
    width = max(map(len, rows)) + 2
    return {
        "input_ids": np.array([row + [0] * (width - len(row)) for row in rows]),
        "input_lengths": np.array([len(row) for row in rows]),
    }


def formatted(data, media, sample_idx=None):
    """What NeMo-RL's formatting gives: text and media, or ids where a row has no media."""

    def original(data, sample_idx=None):
        made = [
            {"prompt": "look", "multi_modal_data": item} if item else {"prompt_token_ids": [1]}
            for item in media
        ]
        return made if sample_idx is None else made[sample_idx]

    return remember_ids(original)(data, sample_idx)


def engine(*answers):
    return lambda prompts, *_, **__: [SimpleNamespace(prompt_token_ids=answer) for answer in answers]


def test_equal_prompts_and_rows_without_media_pass():
    rows = [prompt_ids(4, 6), prompt_ids()]
    prompts = formatted(data_of(*rows), [{"image": ["a", "b"]}, {}])
    assert len(compare_batch(engine(rows[0], [9, 9]))(prompts, None, use_tqdm=False)) == 2


@pytest.mark.parametrize(
    ("seen", "sentence"),
    [
        (prompt_ids(4, 5), r"image x 2.*runs of id 18: engine \[4, 5\], trainer \[4, 6\]"),
        (prompt_ids(4, 7), r"runs of id 18: engine \[4, 7\], trainer \[4, 6\]"),
        (prompt_ids(4), r"made 9 ids .* the trainer has 17; they first differ at 7 \(engine 5, trainer 20\)"),
        (prompt_ids(4, 6)[:-1], r"first differ at 16 \(engine ends, trainer 6\)"),
        ([*prompt_ids(4, 6), 7], r"first differ at 17 \(engine 7, trainer ends\)"),
        ([2, *prompt_ids(4, 6)[1:]], r"first differ at 0 \(engine 2, trainer 1\)"),
        (None, "did not say which prompt ids"),
    ],
)
def test_every_difference_stops_with_its_counts(seen, sentence):
    prompts = formatted(data_of(prompt_ids(4, 6)), [{"image": ["a", "b"]}])
    with pytest.raises(PromptMismatch, match=sentence):
        compare_batch(engine(seen))(prompts)


def test_an_output_less_than_prompts_is_an_error():
    prompts = formatted(data_of(prompt_ids(4), prompt_ids(4)), [{"image": "a"}, {"image": "b"}])
    with pytest.raises(ValueError, match="shorter"):
        compare_batch(engine(prompt_ids(4)))(prompts)


def stream(prompt, answer):
    async def generate(prompt, **_):
        for _ in range(3):
            yield SimpleNamespace(prompt_token_ids=answer)

    async def collect():
        return [output async for output in compare_stream(generate)(prompt=prompt, request_id="r")]

    return asyncio.run(collect())


def test_a_streamed_request_is_compared_with_its_own_row():
    data = data_of(prompt_ids(4), prompt_ids(9))
    prompt = formatted(data, [{"video": "a"}, {"video": "b"}], 1)
    assert len(stream(prompt, prompt_ids(9))) == 3
    with pytest.raises(PromptMismatch, match=r"video x 1.*engine \[4\], trainer \[9\]"):
        stream(prompt, prompt_ids(4))
