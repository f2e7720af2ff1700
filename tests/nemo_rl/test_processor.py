# SPDX-License-Identifier: Apache-2.0
"""Processor names and chat templates."""

import subprocess
import sys


def test_the_chat_template_follows_an_override(checkpoint, installed):
    from nemo_rl.algorithms.utils import get_tokenizer

    template = "OVERRIDE {{ messages }}"
    processor = get_tokenizer({"name": str(checkpoint), "chat_template": template}, get_processor=True)
    assert processor.chat_template == processor.tokenizer.chat_template == template
    kept = get_tokenizer({"name": str(checkpoint), "chat_template": "default"}, get_processor=True)
    assert kept.chat_template == kept.tokenizer.chat_template != template


def test_the_actors_copy_follows_too(checkpoint):
    from nemo_rl_ext.integration.processor import load_processor

    processor = load_processor({"name": str(checkpoint), "chat_template": "OVERRIDE {{ messages }}"})
    assert processor.chat_template == "OVERRIDE {{ messages }}"


def test_later_checkpoints_are_placeholder_style(super_checkpoint):
    code = f"""
from nemo_rl.algorithms.utils import get_tokenizer
from nemo_rl.data.multimodal_utils import uses_image_placeholder
from nemo_rl.environments import nemo_gym_video, nemotron_utils
processor = get_tokenizer({{"name": {str(super_checkpoint)!r}}}, get_processor=True)
before = uses_image_placeholder(processor)
from nemo_rl_ext.integration.processor_allowlists import extend_processor_names
extend_processor_names()
extend_processor_names()
name = type(processor).__name__
print("RESULT", before, uses_image_placeholder(processor), name in nemotron_utils.NEMOTRON_VIDEO_PROCESSOR_NAMES,
      name in nemo_gym_video.NEMOTRON_VIDEO_PROCESSOR_NAMES)
"""
    out = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True
    )
    assert "RESULT False True True True" in out.stdout
