# SPDX-License-Identifier: Apache-2.0
"""Media that share a name, change under it, or have odd shapes: from manifest to policy, on the real engine.

Every case once trained on wrong pixels without a word, or ended the run.
"""

from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from nemo_rl_ext.align.verdict import Reason
from nemo_rl_ext.manifest.rows import ManifestRow
from nemo_rl_ext.media.policy import MediaPolicy

pytestmark = pytest.mark.engine


def picture(path, height, width, seed):
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    return path.name


def row(*parts):
    return ManifestRow.from_json(
        {"responses_create_params": {"input": [{"role": "user", "content": list(parts)}]}}
    )


def image(name):
    return {"type": "input_image", "image_url": name}


def frame(name, index):
    return {
        "type": "input_image",
        "image_url": name,
        "_is_video_frame": True,
        "_video_source": "movie.mp4",
        "_video_frame_index": index,
        "_video_fps": 2.0,
    }


@pytest.fixture
def run(in_process, tmp_path):
    """Collects rows of media in `folder`; `between` is called after generation, before alignment."""
    from nemo_rl_ext.grpo.collecting.assembly import AlignmentOptions
    from nemo_rl_ext.grpo.collecting.collector import Collector
    from nemo_rl_ext.grpo.collecting.player import Player

    def collect(*rows, share_static=True, between=None, receipts=True):
        pool = in_process.make_pool(media_policy=MediaPolicy(roots=(tmp_path,)), base_dir=tmp_path)
        align = pool.submit_align

        def submit_align(turns):
            if between is not None:
                between()
            return align(turns)

        pool.submit_align = submit_align
        player = Player(
            engine=in_process.client, pool=pool, renderer=in_process.renderer, max_turns=4, receipts=receipts
        )
        options = AlignmentOptions(enabled=True, share_static=share_static, max_model_len=None, ordered=True)
        collector = Collector(
            player=player,
            pool=pool,
            reward=lambda row, text: 1.0,
            sampling=in_process.sampling,
            options=options,
            num_generations=2,
        )
        groups = collector.collect(rows, step=0)
        return groups, max(in_process.gap(group) for group in groups)

    return SimpleNamespace(collect=collect, folder=tmp_path)


def masked(groups):
    return {reason for group in groups for r in group.rollouts if r.masked for reason in r.reasons}


@pytest.mark.parametrize("receipts", [True, False], ids=["receipts", "runs"])
def test_clips_of_one_name_keep_their_own_frames(run, receipts):
    """Eight rows, each with two frames of its own, all called movie.mp4, in one step."""
    rows = [
        row(*(frame(picture(run.folder / f"{n}.png", 96, 96, n), n) for n in (2 * k, 2 * k + 1)))
        for k in range(8)
    ]
    groups, gap = run.collect(*rows, share_static=False, receipts=receipts)
    assert masked(groups) == set()
    assert gap < 5e-5


def crowded(folder):
    """Three images that share the engine's budget, so that each is smaller than the trainer's own."""
    sizes = {"a.png": (480, 640), "b.png": (1024, 300), "c.png": (1024, 300)}
    return row(*(image(picture(folder / name, *size, n + 1)) for n, (name, size) in enumerate(sizes.items())))


def test_a_file_that_was_rewritten_after_generation_is_not_trained_on(run):
    rows = [crowded(run.folder)]
    groups, _ = run.collect(*rows, between=lambda: picture(run.folder / "a.png", 480, 640, 2))
    assert Reason.CONTENT_CHANGED in masked(groups)


def test_a_file_that_is_put_back_is_itself_again(run):
    rows = [crowded(run.folder)]
    run.collect(*rows, between=lambda: picture(run.folder / "a.png", 480, 640, 2))
    picture(run.folder / "a.png", 480, 640, 1)
    groups, gap = run.collect(*rows)
    assert masked(groups) == set() and gap < 5e-5


@pytest.mark.parametrize("size", [(1, 1), (3, 1), (3, 3), (1, 9), (3, 640), (20, 3000), (2, 20000)])
def test_tiny_and_thin_images_are_right_or_masked_by_name(run, size):
    rows = [row(image(picture(run.folder / "thin.png", *size, 5)), {"type": "input_text", "text": "?"})]
    groups, gap = run.collect(*rows)
    # Both sides round features to bfloat16, where another CPU's last bit may tip; wrong pixels are 0.1 apart.
    assert gap < 1e-3
    assert all(rollout.reasons for group in groups for rollout in group.rollouts if rollout.masked)


def test_text_between_frames_makes_clips_of_its_own_for_engine_and_trainer(run):
    names = [picture(run.folder / f"f{n}.png", 96, 96, n) for n in range(4)]
    frames = [frame(name, n) for n, name in enumerate(names)]
    text = {"type": "input_text", "text": "then"}
    groups, gap = run.collect(row(*frames[:2], text, *frames[2:]))
    assert masked(groups) == set() and gap < 5e-5
