# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest
import torch

from nemo_rl_ext.align.pixels import patchify
from nemo_rl_ext.grpo.training.batch import PolicyRow, collate
from nemo_rl_ext.grpo.training.policy import Policy
from nemo_rl_ext.models.vision import encode_media, unpatchify


@pytest.fixture(scope="module")
def policy(tiny_checkpoint):
    return Policy.from_pretrained(tiny_checkpoint)


def item(frames, rows, columns, seed):
    torch.manual_seed(seed)
    pixels = torch.randn(max(frames, 1), 3, rows * 16, columns * 16)
    return pixels, patchify(pixels, 16)


def media(*items):
    return dict(
        pixel_values=torch.cat([patches for (_, patches), *_ in items]),
        image_grid_hw=torch.tensor([grid for _, _, grid in items]),
        num_frames=torch.tensor([frames for _, frames, _ in items]),
    )


def test_unpatchify_undoes_patchify():
    pixels, patches = item(3, 4, 2, 0)
    assert torch.equal(unpatchify(patches, 3, 4, 2), pixels)


def test_images_and_clips_are_encoded_by_their_own_towers_and_stay_in_order(policy):
    image, clip, other = (
        (item(0, 2, 4, 1), 0, (2, 4)),
        (item(3, 4, 2, 2), 3, (4, 2)),
        (item(0, 2, 2, 3), 0, (2, 2)),
    )
    ids = [20, 6, *[5] * 2, 7, *[6, 5, 5, 7] * 2, 6, 5, 7, 23]
    batch = collate([PolicyRow(token_ids=ids, media=(media(image, clip, other),))], pad_token_id=0)
    (values,) = batch.media
    features = encode_media(
        policy.model, values["pixel_values"], values["image_grid_hw"], values["num_frames"]
    )
    assert [len(feature) for feature in features] == [2, 4, 1]
    alone = policy.model.get_video_features(clip[0][0], return_dict=True).pooler_output
    assert torch.allclose(features[1], alone.reshape(-1, alone.shape[-1]), atol=1e-6)
    with torch.no_grad():
        logprobs = policy.forward_logprobs(batch)
        swapped = collate(
            [PolicyRow(token_ids=ids, media=(media(image, (item(3, 4, 2, 9), 3, (4, 2)), other),))],
            pad_token_id=0,
        )
        assert not torch.allclose(logprobs, policy.forward_logprobs(swapped), atol=1e-4)


def test_the_order_of_frames_matters(policy):
    pixels, patches = item(4, 2, 2, 5)
    ids = np.array([20, *[6, 5, 7] * 2, 23])

    def run(values):
        row = PolicyRow(
            token_ids=ids,
            media=(
                dict(pixel_values=values, image_grid_hw=torch.tensor([[2, 2]]), num_frames=torch.tensor([4])),
            ),
        )
        with torch.no_grad():
            return policy.forward_logprobs(collate([row], pad_token_id=0))

    assert not torch.allclose(run(patches), run(patchify(pixels.flip(0), 16)), atol=1e-4)


def test_rows_with_images_clips_and_nothing_share_one_batch(policy):
    image = media((item(0, 2, 4, 1), 0, (2, 4)))
    plain = {key: image[key] for key in ("pixel_values", "image_grid_hw")}
    clip = media((item(3, 4, 2, 2), 3, (4, 2)))
    rows = [
        PolicyRow(token_ids=[20, 6, 5, 5, 7, 23], media=(plain,)),
        PolicyRow(token_ids=[20, 23]),
        PolicyRow(token_ids=[20, *[6, 5, 5, 7] * 2, 23], media=(clip,)),
        PolicyRow(token_ids=[20, 6, 5, 5, 7, *[6, 5, 5, 7] * 2, 23], media=(plain, clip)),
    ]
    with torch.no_grad():
        together = policy.forward_logprobs(collate(rows, pad_token_id=0))
        for index, row in enumerate(rows):
            alone = policy.forward_logprobs(collate([row], pad_token_id=0))
            assert torch.allclose(together[index, : alone.shape[1]], alone[0], atol=1e-5)
        parts = policy.forward_logprobs(collate(rows, pad_token_id=0), micro_batch_size=1)
        assert torch.allclose(together, parts, atol=1e-5)
