# SPDX-License-Identifier: Apache-2.0
"""A real vLLM server decides the placeholder runs; NeMo-RL's actor, collector and buffer do the rest.

vLLM cannot share NeMo-RL's CPU environment, so the server runs from the engine's: `make setup`, or ENGINE_PYTHON=path.
NeMo-Gym's servers are left out; `gym_edge.EngineEdge` sends their requests.
"""

import os
import socket
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path

import conftest
import pytest
from driving import collect, features, image_recipe, training_batch, urls, write_rows
from gym_edge import image_row

ROOT = Path(__file__).parents[2]
PYTHON = Path(os.environ.get("ENGINE_PYTHON", ROOT / ".venv/bin/python"))
PLUGIN = ROOT / "nemo_rl_ext/integration/vllm_plugin.py"
CONTEXT_ID = 5  # `<image>` in the tiny checkpoint's tokenizer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not PYTHON.exists(),
        reason=f"{PYTHON} does not exist: `make setup` builds it, ENGINE_PYTHON names another",
    ),
]


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    """The tiny checkpoint's directory and the URL of a server with 512 tokens of context, grids recorded."""
    directory = tmp_path_factory.mktemp("engine")
    env = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
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
    arguments = {
        "--model": str(model),
        "--served-model-name": "policy",
        "--host": "127.0.0.1",
        "--port": str(port),
        "--max-model-len": "512",
        "--max-num-seqs": "8",
        "--dtype": "bfloat16",
        "--kv-cache-memory-bytes": "67108864",
        "--mm-processor-cache-gb": "0",
        "--limit-mm-per-prompt": '{"image": 8}',
        "--hf-overrides": '{"vit_hidden_size": 32}',
        "--chat-template-content-format": "openai",
        "--tool-parser-plugin": str(PLUGIN),
    }
    command = [
        PYTHON,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--enforce-eager",
        "--no-enable-prefix-caching",
    ]
    log = directory / "server.log"
    with log.open("wb") as out:
        server = subprocess.Popen(
            [*map(str, command), *(word for pair in arguments.items() for word in pair)],
            env=env,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        while True:
            assert server.poll() is None, log.read_text(errors="replace")[-3000:]
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
                break
            except (urllib.error.URLError, OSError):
                time.sleep(1)
        yield model, f"http://127.0.0.1:{port}/v1"
    finally:
        server.terminate()
        try:
            server.wait(timeout=60)
        except subprocess.TimeoutExpired:
            server.kill()


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("geometry", ["runs", "captured"])
def test_a_real_engine_fits_three_over_budget_images_and_training_follows(
    geometry, engine, tmp_path, ray_head, installed, nemo_rl_root, monkeypatch
):
    model, url = engine
    checkpoint = conftest.write_checkpoint(tmp_path / "trainer", tokenizer_of=model)
    # 188 tokens each for the trainer alone, 141 each where 512 tokens of context are shared.
    rows = write_rows(
        tmp_path / "rows.jsonl",
        [
            image_row(urls([(97, 1500)] * 3, 1), [], id="over-budget"),
            image_row(urls([(160, 320)], 8), [], id="fits"),
        ],
    )
    config = image_recipe(nemo_rl_root, checkpoint, rows, dedup=True)
    config.grpo.media_alignment["geometry_source"] = geometry
    trajectories = collect(config, monkeypatch, base_url=url)
    logs, flat = training_batch(trajectories)
    media = flat.get_multimodal_dict(as_tensors=True)

    found = int((flat["token_ids"] == CONTEXT_ID).sum())
    assert found == features(media) == 2 * 3 * 141 + 2 * 50
    assert sorted(log[0]["imgs_sizes"].as_tensor().tolist() for log in logs) == sorted(
        2 * [[[96, 1504]] * 3] + 2 * [[[160, 320]]]
    )
    metrics = [trajectory["rollout_metrics"] for trajectory in trajectories]
    assert sum(entry["alignment/media_repaired"] for entry in metrics) == 6
    assert sum(entry["alignment/media_matched"] for entry in metrics) == 2
    assert sum(entry["alignment/rows_masked"] for entry in metrics) == 0
    # The ban reached the engine: this policy samples `<image>` every few tokens without it.
    assert not any((message["token_ids"] == CONTEXT_ID).any() for log in logs for message in log[1:])
