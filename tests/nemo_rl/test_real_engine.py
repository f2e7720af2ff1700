# SPDX-License-Identifier: Apache-2.0
"""A real engine decides the placeholder runs; NeMo-RL's server, actor, collector and buffer do the rest.

vLLM cannot share NeMo-RL's CPU environment, so the server runs from the engine's: `make setup`, or ENGINE_PYTHON=path.
NeMo-Gym's servers are left out; `gym_edge.EngineEdge` sends their requests.
"""

import contextlib
import os
import signal
import socket
import subprocess
import time
from pathlib import Path

import conftest
import pytest
from driving import collect, features, image_recipe, said, training_batch, urls, write_rows
from gym_edge import image_row

from nemo_rl_ext.integration.capture import PLUGIN

ROOT = Path(__file__).parents[2]
PYTHON = Path(os.environ.get("ENGINE_PYTHON", ROOT / ".venv/bin/python"))
CONTEXT_ID = 5  # `<image>` in the tiny checkpoint's tokenizer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not PYTHON.exists(),
        reason=f"{PYTHON} does not exist: `make setup` builds it, ENGINE_PYTHON names another",
    ),
]


@pytest.fixture(scope="module")
def engine(tmp_path_factory, nemo_rl_root):
    """The tiny checkpoint's directory and the URL of NeMo-RL's server: 512 tokens of context, grids recorded."""
    directory = tmp_path_factory.mktemp("engine")
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((str(ROOT), str(nemo_rl_root))),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "TORCHDYNAMO_DISABLE": "1",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    env.pop("HF_MODULES_CACHE", None)
    build = (
        "import sys; from nemo_rl_ext.grpo.checkpoint import build_tiny_checkpoint; "
        "build_tiny_checkpoint(sys.argv[1], dtype='bfloat16', max_num_patches=13312)"
    )
    model = directory / "model"
    subprocess.run([PYTHON, "-c", build, str(model)], env=env, check=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server_script = Path(__file__).with_name("worker_server.py")
    log = directory / "server.log"
    with log.open("wb") as out:
        server = subprocess.Popen(
            [*map(str, (PYTHON, "-W", "ignore", server_script, model, port, PLUGIN))],
            env=env,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        while "READY " not in (text := log.read_text(errors="replace")):
            assert server.poll() is None, text[-3000:]
            time.sleep(1)
        assert "patch grids are returned as `media_grids`" in text
        yield model, text.split("READY ")[1].split()[0]
    finally:
        # The engine's core is a process of its own, in the server's session.
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.wait(timeout=30)


def play(engine, tmp_path, nemo_rl_root, monkeypatch, images, geometry):
    """Trajectories of two prompts, one per list of image sizes, with two generations each."""
    model, url = engine
    checkpoint = conftest.write_checkpoint(tmp_path / "trainer", tokenizer_of=model)
    rows = [image_row(urls(sizes, 1 + 9 * index), [], id=f"row-{index}") for index, sizes in enumerate(images)]
    config = image_recipe(
        nemo_rl_root, checkpoint, write_rows(tmp_path / "rows.jsonl", rows), dedup=True
    )
    config.grpo.media_alignment["geometry_source"] = geometry
    trajectories = collect(config, monkeypatch, base_url=url)
    logs, flat = training_batch(trajectories)
    media = flat.get_multimodal_dict(as_tensors=True)
    assert int((flat["token_ids"] == CONTEXT_ID).sum()) == features(media)
    # The ban reached the engine: this policy samples `<image>` every few tokens without it.
    assert not any((message["token_ids"] == CONTEXT_ID).any() for log in logs for message in log[1:])
    metrics = [trajectory["rollout_metrics"] for trajectory in trajectories]

    def total(name):
        return sum(entry[f"alignment/{name}"] for entry in metrics)

    return sorted(log[0]["imgs_sizes"].as_tensor().tolist() for log in logs), features(media), total


def test_a_real_engine_fits_three_over_budget_images_and_training_follows(
    engine, tmp_path, ray_head, installed, nemo_rl_root, monkeypatch
):
    # 188 tokens each for the trainer alone, 141 each where 512 tokens of context are shared.
    images = ([(97, 1500)] * 3, [(160, 320)])
    sizes, found, total = play(engine, tmp_path, nemo_rl_root, monkeypatch, images, "runs")
    assert found == 2 * 3 * 141 + 2 * 50
    assert sizes == sorted(2 * [[[96, 1504]] * 3] + 2 * [[[160, 320]]])
    assert total("media_repaired") == 6 and total("media_matched") == 2 and total("rows_masked") == 0


@pytest.mark.parametrize("geometry", ["runs", "captured"])
def test_recorded_grids_settle_what_runs_leave_open(
    geometry, engine, tmp_path, ray_head, installed, nemo_rl_root, monkeypatch
):
    # 240 tokens each: 32 x 30 patches in the engine, which 30 x 32 would explain as well.
    lines = {
        "runs": ["patch grids from the placeholder runs"],
        "captured": ["patch grids from the engine's record", "the engine's patch grids arrive with the rollouts"],
    }
    before = [said(line) for line in lines[geometry]]
    images = ([(500, 500)] * 2, [(160, 320)])
    sizes, found, total = play(engine, tmp_path, nemo_rl_root, monkeypatch, images, geometry)
    assert [said(line) for line in lines[geometry]] == [count + 1 for count in before]
    assert found == 2 * 2 * 240 + 2 * 50
    if geometry == "captured":
        assert sizes == sorted(2 * [[[512, 480]] * 2] + 2 * [[[160, 320]]])
        assert total("media_repaired") == 4 and total("rows_masked") == 0
    else:
        assert total("media_ambiguous") == total("reason/ambiguous_grid") == 4 and total("rows_masked") == 2
