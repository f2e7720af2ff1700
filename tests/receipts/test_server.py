# SPDX-License-Identifier: Apache-2.0
"""vLLM's own API server with the plugin: its receipts, and the account that it gives itself, on one request."""

import base64
import io
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import numpy as np
import pytest
from PIL import Image

import nemo_rl_ext.receipts
from nemo_rl_ext.align.families.registry import family_of
from nemo_rl_ext.align.runs import find_runs
from nemo_rl_ext.media.identity import pixel_digest
from nemo_rl_ext.models.tokenizer import IMAGE_ID, SPECIAL_TOKENS
from nemo_rl_ext.receipts.evidence import belongs_to, evidence_of
from nemo_rl_ext.receipts.placeholders import receipt_of_placeholders
from nemo_rl_ext.receipts.receipt import read_receipt

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]

PLUGIN = Path(nemo_rl_ext.receipts.__file__).parent / "vllm_plugin.py"
START_TIMEOUT_S = 600
PICTURES = [
    np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)
    for seed, size in enumerate([(96, 64), (128, 192)])
]


@pytest.fixture(scope="module")
def server(tiny_checkpoint, tmp_path_factory):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tmp_path_factory.mktemp("server") / "log"
    options = {
        "model": tiny_checkpoint,
        "served-model-name": "policy",
        "host": "127.0.0.1",
        "port": port,
        "dtype": "bfloat16",
        "max-model-len": 512,
        "max-num-seqs": 4,
        "kv-cache-memory-bytes": 64 << 20,
        "limit-mm-per-prompt": '{"image": 4}',
        "hf-overrides": '{"vit_hidden_size": 32}',
        "tool-parser-plugin": PLUGIN,
    }
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager"]
    command += ["--no-enable-prefix-caching", "--enable-scale-out"]
    command += [word for name, value in options.items() for word in (f"--{name}", str(value))]
    environment = os.environ | {"TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environment |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    )
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=environment, start_new_session=True)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as client:
            for _ in range(START_TIMEOUT_S):
                assert process.poll() is None, log.read_text()[-4000:]
                try:
                    client.get("/health").raise_for_status()
                    break
                except httpx.HTTPError:
                    time.sleep(1)
            yield client
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def url(pixels):
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def body(**more):
    return {
        "model": "policy",
        "token_ids": [40, IMAGE_ID, 41, IMAGE_ID, 42],
        "content_parts": [{"type": "image_url", "url": url(pixels)} for pixels in PICTURES],
        "sampling_params": {
            "max_tokens": 2,
            "logit_bias": {str(t): -100 for t in range(len(SPECIAL_TOKENS))},
        },
        "return_token_ids": True,
        **more,
    }


def agree(answer, checkpoint):
    """The engine's own account and the receipt name the runs of the returned ids."""
    family, ids = family_of(checkpoint), np.array(answer["prompt_token_ids"])
    runs = [((run.offset, run.length),) for run in find_runs(ids, family.grammar)]
    assert len(runs) == len(PICTURES)
    own, plugin = (
        receipt_of_placeholders(ids, answer["mm_placeholders"]),
        read_receipt(answer["media_receipt"]),
    )
    for receipt in (own, plugin):
        assert belongs_to(receipt, ids)
        assert [said.runs for said in evidence_of(receipt.items, (), ids, family)] == runs
    assert [item.served for item in plugin.items] == [pixel_digest(pixels) for pixels in PICTURES]


def test_generate_returns_ids_and_ranges_of_its_own_that_agree_with_the_receipt(server, tiny_checkpoint):
    answer = server.post("/inference/v1/generate", json=body())
    assert answer.status_code == 200, answer.text
    agree(answer.json(), tiny_checkpoint)


def test_a_stream_has_all_three_on_its_first_chunk(server, tiny_checkpoint):
    with server.stream("POST", "/inference/v1/generate", json=body(stream=True)) as stream:
        events = [line.removeprefix("data: ") for line in stream.iter_lines() if line.startswith("data: {")]
    first, *later = (json.loads(event) for event in events)
    agree(first, tiny_checkpoint)
    assert not any(chunk.get("mm_placeholders") or chunk.get("media_receipt") for chunk in later)


def test_chat_completions_carry_the_receipt(server):
    parts = [{"type": "image_url", "image_url": {"url": url(pixels)}} for pixels in PICTURES]
    answer = server.post(
        "/v1/chat/completions",
        json={
            "model": "policy",
            "messages": [{"role": "user", "content": [*parts, {"type": "text", "text": "?"}]}],
            "max_tokens": 2,
            "return_token_ids": True,
        },
    ).json()
    receipt = read_receipt(answer["media_receipt"])
    assert belongs_to(receipt, np.array(answer["prompt_token_ids"]))
    assert [item.served for item in receipt.items] == [pixel_digest(pixels) for pixels in PICTURES]
