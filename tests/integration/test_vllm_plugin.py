# SPDX-License-Identifier: Apache-2.0
"""The worker's plugin over modules with the shapes of vLLM's; tests/nemo_rl runs it in a real server."""

import asyncio
import importlib.util
import logging
import sys
from types import ModuleType, SimpleNamespace

import pytest

from nemo_rl_ext.integration.capture import PLUGIN


@pytest.fixture
def vllm_shapes(monkeypatch):
    class OnlineRenderer:
        model_config = SimpleNamespace(hf_config=SimpleNamespace(patch_size=16))

        async def preprocess_chat(self, request):
            return request, [request.engine_input]

    class OpenAIServingChat:
        async def chat_completion_full_generator(self, request):
            return SimpleNamespace(choices=[SimpleNamespace(message=SimpleNamespace())] * 2)

    shapes = {
        "vllm.entrypoints.openai.chat_completion.serving": {"OpenAIServingChat": OpenAIServingChat},
        "vllm.renderers.online_renderer": {"OnlineRenderer": OnlineRenderer},
    }
    for name, contents in shapes.items():
        module = ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)
        parts = name.split(".")
        for end in range(1, len(parts)):
            monkeypatch.setitem(sys.modules, ".".join(parts[:end]), ModuleType(".".join(parts[:end])))
    return OnlineRenderer, OpenAIServingChat


def load():
    spec = importlib.util.spec_from_file_location("loaded_by_its_path", PLUGIN)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def answer(shapes, engine_input):
    renderer, chat = (shape() for shape in shapes)
    request = SimpleNamespace(engine_input=engine_input)

    async def run():
        await renderer.preprocess_chat(request)
        return await chat.chat_completion_full_generator(request)

    message = asyncio.run(run()).choices[0].message
    assert vars(request).keys() == {"engine_input"}
    return getattr(message, "media_grids", None)


def image(height, width):
    return {"imgs_sizes": SimpleNamespace(data=(height, width))}


def test_the_grids_of_a_request_come_back_with_its_answer(vllm_shapes):
    plugin = load()
    assert plugin.install()
    assert answer(vllm_shapes, {"mm_kwargs": {"image": [image(64, 96), image(32, 32)]}}) == [[4, 6], [2, 2]]
    assert answer(vllm_shapes, {"mm_kwargs": {"image": [image(64, 96), None]}}) is None
    assert answer(vllm_shapes, {}) is None


def test_a_request_that_cannot_be_read_is_answered_all_the_same(vllm_shapes, caplog):
    load()
    with caplog.at_level(logging.WARNING):
        assert answer(vllm_shapes, {"mm_kwargs": {"image": [{"imgs_sizes": 3}]}}) is None
    assert "were not recorded" in caplog.text


def test_another_vllm_is_left_alone_and_says_so(vllm_shapes, monkeypatch, caplog):
    renderer, _ = vllm_shapes
    monkeypatch.setattr(renderer, "preprocess_chat", lambda self: None)
    assert not load().install()
    assert "preprocess_chat is not a coroutine" in caplog.text
    monkeypatch.setitem(sys.modules, "vllm.renderers.online_renderer", None)
    assert not load().install()
    assert "this vLLM has no" in caplog.text
