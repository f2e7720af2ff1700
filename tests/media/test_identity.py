# SPDX-License-Identifier: Apache-2.0
"""What vLLM decoded and what the trainer decodes have one digest exactly when their pixels are equal."""

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from nemo_rl_ext.media.identity import encoded_bytes, file_digest, item_digest, pixel_digest
from nemo_rl_ext.media.images import load_image
from nemo_rl_ext.media.policy import MediaPolicy
from nemo_rl_ext.media.reader import MediaReader, MediaSource
from nemo_rl_ext.media.video import load_video

POLICY = MediaPolicy(timeout_s=120)


@pytest.fixture(scope="module")
def parser():
    """What every request's media go through before vLLM's processor sees them."""
    return pytest.importorskip("vllm.multimodal.parse").MultiModalDataParser()


@pytest.fixture(scope="module")
def connector(tmp_path_factory):
    """vLLM's server-side loader; and the directory that it may read."""
    module = pytest.importorskip("vllm.multimodal.media.connector")
    folder = tmp_path_factory.mktemp("media")
    return module.MediaConnector(allowed_local_media_path=str(folder)), folder


def _items(parser, modality, media):
    return parser.parse_mm_data({modality: media})[modality].get_all_items_for_hash()


def _digests(parser, modality, media):
    return [item_digest(item) for item in _items(parser, modality, media)]


@pytest.mark.engine
def test_every_kind_of_image_as_vllms_server_decodes_it(connector, parser, odd_images):
    """EXIF, alpha, palettes, 16 bits, CMYK, grey: by URL, the way requests of an OpenAI server arrive."""
    fetch, folder = connector
    digests = set()
    for name, data in odd_images.items():
        (folder / name).write_bytes(data)
        item = fetch.fetch_image((folder / name).as_uri())
        digest = load_image(data, POLICY).content_hash
        assert _digests(parser, "image", [item, item]) == [digest, digest], name
        assert encoded_bytes(_items(parser, "image", [item])[0]) == data, name
        digests.add(digest)
    assert len(digests) > 30


@pytest.mark.engine
def test_every_kind_of_image_as_a_caller_hands_it_over(parser, odd_images):
    """Opened by Pillow in whatever mode: vLLM's own conversion gives the trainer's pixels."""
    for name, data in odd_images.items():
        image = Image.open(io.BytesIO(data))
        expected = load_image(data, POLICY)
        assert _digests(parser, "image", image) == [expected.content_hash], name
        assert _digests(parser, "image", expected.pixels) == [expected.content_hash], name
        assert encoded_bytes(_items(parser, "image", image)[0]) is None


@pytest.mark.engine
def test_clips_as_vllms_server_decodes_them(connector, parser, clips):
    fetch, folder = connector
    for path in sorted(clips.glob("carphone*.mp4")):
        (folder / path.name).write_bytes(path.read_bytes())
        item = fetch.fetch_video((folder / path.name).as_uri())
        _, metadata = item.media
        video = load_video(path.name, POLICY, frame_indices=metadata["frames_indices"], base_dir=folder)
        assert len(metadata["frames_indices"]) == 32
        assert _digests(parser, "video", [item]) == [video.content_hash], path.name
        assert encoded_bytes(_items(parser, "video", [item])[0]) == path.read_bytes()
        other = load_video(path.name, POLICY, frame_indices=range(32), base_dir=folder)
        assert other.content_hash != video.content_hash


@pytest.mark.engine
def test_clips_as_a_caller_hands_them_over(parser, picture):
    torch = pytest.importorskip("torch")
    frames = np.stack([picture(seed=seed) for seed in range(3)])
    digest = pixel_digest(frames)
    pil = [Image.fromarray(frame) for frame in frames]
    forms = (frames, list(frames), pil, (frames, {"fps": 2.0}), torch.from_numpy(frames), [(frames, None)])
    for media in forms:
        assert _digests(parser, "video", media) == [digest]
    assert _digests(parser, "video", [frames, frames[:2]]) == [digest, pixel_digest(frames[:2])]


def test_pixels_in_any_layout_of_memory_have_one_digest(picture):
    pixels = picture()
    assert pixel_digest(np.asfortranarray(pixels)) == pixel_digest(pixels)
    assert pixel_digest(pixels[::-1][::-1]) == pixel_digest(pixels)


def test_shape_counts(picture):
    flat = np.zeros((2, 6, 3), np.uint8)
    assert len({pixel_digest(flat), pixel_digest(flat.reshape(6, 2, 3)), pixel_digest(flat[None])}) == 3
    one = picture()
    assert pixel_digest(one) != pixel_digest(one ^ np.uint8(1))


@pytest.mark.parametrize(
    "item",
    [
        None,
        "picture.png",
        (None, {}),
        [],
        np.zeros((4, 4), np.uint8),
        np.zeros((3, 4, 4), np.uint8),
        np.zeros((4, 4, 4), np.uint8),
        np.zeros((4, 4, 3), np.float32),
        [np.zeros((4, 4, 3), np.uint8), np.zeros((4, 5, 3), np.uint8)],
        [np.zeros((4, 4, 3), np.uint8), None],
        Image.new("P", (4, 4)),
        Image.new("RGBA", (4, 4)),
        {"image_embeds": np.zeros((4, 8))},
    ],
    ids=range(13),
)
def test_what_is_not_rgb_pixels_has_no_digest(item):
    assert item_digest(item) is None


def test_a_reference_is_identified_only_when_asked(tmp_path, odd_images, clips):
    (tmp_path / "a.png").write_bytes(odd_images["rgba.png"])
    reader = MediaReader(
        policy=POLICY, base_dir=tmp_path, num_frames=2, frames_per_tubelet=1, backend="opencv"
    )
    facts, pixels = reader.decode(MediaSource(ref="a.png"))
    assert facts.pixel_digest == "" and facts.content_hash == file_digest(odd_images["rgba.png"])
    facts, _ = reader.decode(MediaSource(ref="a.png"), identify=True)
    assert facts.pixel_digest == pixel_digest(pixels)
    clip = MediaSource(ref=str(Path(clips) / "carphone_pristine.mp4"), kind="video")
    reader = MediaReader(policy=POLICY, base_dir=clips, num_frames=2, frames_per_tubelet=1, backend="opencv")
    facts, frames = reader.decode(clip, identify=True)
    assert facts.pixel_digest == pixel_digest(frames)
