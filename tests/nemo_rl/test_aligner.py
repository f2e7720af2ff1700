# SPDX-License-Identifier: Apache-2.0
"""NeMo-RL's aligner in this process: what it reads once per image, and what it must find out about broken ones."""

import base64
import io

import numpy as np
import pytest
import torch
from gym_edge import picture, prompt_ids
from PIL import Image

from nemo_rl_ext.align.families.nemotron import Layout
from nemo_rl_ext.align.verdict import Reason, Verdict
from nemo_rl_ext.integration.aligner import NemoRLAligner, NemoRLAlignerConfig, NemoRLTurnRequest
from nemo_rl_ext.media.policy import MediaPolicy
from nemo_rl_ext.media.reader import MediaReader, MediaSource


def encoded(image, kind="PNG", cut=None):
    buffer = io.BytesIO()
    image.save(buffer, kind)
    return buffer.getvalue()[:cut]


def url(data):
    return f"data:image/any;base64,{base64.b64encode(data).decode()}"


def turn(references, lengths, *, row_id="row", attached=True):
    return NemoRLTurnRequest(
        row_id=row_id,
        turn=0,
        token_ids=np.asarray(prompt_ids(lengths)),
        media=tuple(MediaSource(ref=reference, where=f"row {row_id}") for reference in references),
        max_model_len=16384,
        static_attached=attached,
    )


@pytest.fixture
def aligner(checkpoint, tmp_path):
    return NemoRLAligner(
        NemoRLAlignerConfig(
            model_dir=checkpoint,
            media_policy=MediaPolicy(roots=(tmp_path,)),
            layout=Layout.REMOTE,
            dtype=torch.float32,
            trust_remote_code=True,
            tokenizer_config={"name": str(checkpoint), "chat_template": "default"},
        )
    )


@pytest.fixture
def measured(monkeypatch):
    """Rows whose images were opened, in order."""
    rows = []
    real = MediaReader.measure

    def measure(self, source):
        rows.append(source.where)
        return real(self, source)

    monkeypatch.setattr(MediaReader, "measure", measure)
    return rows


def test_the_images_of_a_prompt_group_are_opened_once(aligner, measured):
    first, second = (url(encoded(picture(160, 320, seed))) for seed in (1, 2))
    for index in range(4):
        (aligned,) = aligner.align([turn([first, second], [50, 50], row_id=str(index))])
        assert not aligned.changed and aligned.tensors is None
        assert [item.verdict for item in aligned.report.media] == [Verdict.MATCHED] * 2
    assert measured == ["row 0", "row 0"]
    # The same measurements still tell a rollout that the engine saw otherwise.
    (repaired,) = aligner.align([turn([first, second], [50, 32])])
    assert repaired.changed and [item.verdict for item in repaired.report.media][1] is not Verdict.MATCHED
    assert len(measured) == 2


def test_the_tensors_of_a_prompt_group_are_made_once_and_are_the_processors_own(aligner, monkeypatch):
    picked = picture(160, 320, 3)
    calls = []
    real = aligner.static.process
    monkeypatch.setattr(aligner.static, "process", lambda *a, **k: calls.append(1) or real(*a, **k))
    turns = [turn([url(encoded(picked))], [50], attached=False) for _ in range(3)]
    found = [aligner.align([one])[0] for one in turns]
    assert len(calls) == 1 and not any(aligned.changed for aligned in found)
    wanted = real([picked], pad=False).values
    for aligned in found:
        assert aligned.tensors.values.keys() == wanted.keys()
        assert all(torch.equal(aligned.tensors.values[key], value) for key, value in wanted.items())


def test_what_is_sent_to_the_engine_is_the_file_that_was_checked(aligner, tmp_path, monkeypatch):
    inside, outside = tmp_path / "a.png", tmp_path.parent / f"{tmp_path.name}-outside.png"
    picture(64, 64, 1).save(inside)
    picture(64, 64, 2).save(outside)
    shown = aligner.encode([str(inside)])
    opened = Image.open

    def exchange_and_open(source, *args, **options):
        inside.unlink(missing_ok=True)
        inside.symlink_to(outside)
        return opened(source, *args, **options)

    monkeypatch.setattr(Image, "open", exchange_and_open)
    assert aligner.encode([str(inside)]) == shown
    with pytest.raises(ValueError, match="outside the media roots"):
        aligner.encode([str(inside)])


def test_a_file_is_looked_at_again_because_it_can_change(aligner, tmp_path):
    path = tmp_path / "image.png"
    path.write_bytes(encoded(picture(160, 320)))
    assert not aligner.align([turn([str(path)], [50])])[0].changed
    path.write_bytes(encoded(picture(480, 640)))
    (aligned,) = aligner.align([turn([str(path)], [50])])
    assert aligned.report.media[0].size == (480, 640) and aligned.changed


@pytest.mark.parametrize(
    "data",
    [encoded(picture(160, 320), cut=4000), b"no image at all"],
    ids=["truncated", "not an image"],
)
def test_a_broken_image_is_found_every_time_and_its_row_named(aligner, measured, data):
    for row in ("a", "b"):
        (aligned,) = aligner.align([turn([url(data)], [50], row_id=row)])
        assert aligned.changed and aligned.report.neutral
        assert aligned.report.reasons() == (Reason.DECODE_FAILED,)
        assert f"row {row}" in str(aligned.report)
    assert measured == ["row a", "row b"]
