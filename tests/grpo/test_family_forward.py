# SPDX-License-Identifier: Apache-2.0
"""The policy's forward of the families that transformers loads as they are: rows, padding and counts."""

import numpy as np
import pytest
import torch

from nemo_rl_ext.align.families.registry import family_of
from nemo_rl_ext.align.items import MediaItem
from nemo_rl_ext.grpo.training.batch import PolicyRow, collate
from nemo_rl_ext.grpo.training.policy import Policy
from nemo_rl_ext.models.checkpoint import weight_names
from nemo_rl_ext.models.tiny_families import build_tiny_family


@pytest.fixture(scope="module", params=["qwen3_vl", "qwen2_5_vl", "internvl"])
def policy(request, tmp_path_factory):
    return Policy.from_pretrained(build_tiny_family(request.param, tmp_path_factory.mktemp(request.param)))


def picture_row(family, seed, size):
    pixels = np.random.default_rng(seed).integers(0, 256, (1, *size, 3), dtype=np.uint8)
    item = MediaItem(size=size, source=f"image-{seed}", load=lambda: pixels)
    (geometry,) = family.static([item])
    tensors = family.pack([item], [geometry.grid], [family.render(item, geometry.grid)])
    own = family.grammars[0]
    (length,) = family.run_lengths(geometry, "image")
    return PolicyRow(
        token_ids=[20, own.start_id, *[own.context_id] * length, own.end_id, 21, 22], media=(tensors.values,)
    )


def test_rows_together_are_as_each_alone(policy):
    family = family_of(policy.info.path)
    rows = [
        picture_row(family, 0, (300, 280)),
        PolicyRow(token_ids=[20, 21, 22]),
        picture_row(family, 1, (280, 420)),
    ]
    with torch.no_grad():
        together = policy.forward_logprobs(collate(rows, pad_token_id=0))
        parts = policy.forward_logprobs(collate(rows, pad_token_id=0), micro_batch_size=1)
        for row, ours in zip(rows, together, strict=True):
            alone = policy.forward_logprobs(collate([row], pad_token_id=0))[0]
            torch.testing.assert_close(ours[: len(alone)], alone, atol=1e-5, rtol=0)
    torch.testing.assert_close(parts, together, atol=1e-5, rtol=0)


def test_rows_whose_counts_make_up_for_each_other_are_refused(policy):
    family = family_of(policy.info.path)
    large, small = picture_row(family, 0, (300, 280)), picture_row(family, 1, (280, 560))
    swapped = [
        PolicyRow(token_ids=large.token_ids, media=small.media),
        PolicyRow(token_ids=small.token_ids, media=large.media),
    ]
    with pytest.raises(ValueError, match="feature vectors for"):
        policy.forward_logprobs(collate(swapped, pad_token_id=0))


def clip_row(family, seed):
    pixels = np.random.default_rng(seed).integers(0, 256, (4, 120, 90, 3), dtype=np.uint8)
    item = MediaItem(
        kind="video",
        size=(120, 90),
        source=f"clip-{seed}",
        load=lambda _: pixels,
        frame_indices=(0, 6, 12, 18),
        fps=12.0,
        total_frames=24,
    )
    (geometry,) = family.static([item])
    tensors = family.pack([item], [geometry.grid], [family.render(item, geometry.grid)])
    own = family.grammars[1]
    ids = [20]
    for length in family.run_lengths(geometry, "video"):
        ids += [own.start_id, *[own.context_id] * length, own.end_id]
    return PolicyRow(token_ids=[*ids, 21, 22], media=(tensors.values,))


def gradients(policy, rows):
    policy.zero_grad()
    policy.forward_logprobs(collate(rows, pad_token_id=0)).sum().backward()
    return {name: value.grad.clone() for name, value in policy.trainable.items() if value.grad is not None}


def test_a_shared_medium_is_encoded_once_with_equal_gradients(policy):
    """A prompt group: four answers to one image, two to one clip, one that shows both."""
    family = family_of(policy.info.path)
    image, clip = picture_row(family, 0, (300, 280)), clip_row(family, 1)
    both = PolicyRow(token_ids=[*clip.token_ids, *image.token_ids], media=(*clip.media, *image.media))
    rows = [image, clip, both, image, clip, image]
    apart = [
        PolicyRow(
            token_ids=row.token_ids,
            media=tuple({key: value.clone() for key, value in values.items()} for values in row.media),
        )
        for row in rows
    ]
    tower = next(
        module
        for name, module in policy.model.named_modules()
        if name.endswith(("visual", "vision_tower", "vision_model"))
    )
    seen = []
    hook = tower.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(len(args[0] if args else kwargs["pixel_values"])),
        with_kwargs=True,
    )
    try:
        ours = gradients(policy, rows)
        once, seen[:] = sum(seen), []
        theirs = gradients(policy, apart)
    finally:
        hook.remove()
    image_size, clip_size = (len(next(iter(row.media[0].values()))) for row in (image, clip))
    assert once == image_size + clip_size
    assert sum(seen) == 4 * image_size + 3 * clip_size
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], atol=1e-4, rtol=1e-4, msg=name)


def test_weights_for_the_engine_have_the_names_of_the_files(policy):
    assert policy.state_dict_for_engine().keys() == weight_names(policy.info.path)
