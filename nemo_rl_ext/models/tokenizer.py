# SPDX-License-Identifier: Apache-2.0
"""Byte-level tokenizer and chat template of the tiny checkpoint.

One byte is one token, so any text round-trips and no vocabulary has to be downloaded. The special
tokens are those of the released Nemotron VL checkpoints.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SPECIAL_TOKENS = (
    "<unk>",
    "<s>",
    "</s>",
    "<|im_start|>",
    "<|im_end|>",
    "<image>",
    "<img>",
    "</img>",
    "<video>",
    "<so_start>",
    "<so_embedding>",
    "<so_end>",
)
PAD_ID = SPECIAL_TOKENS.index("<unk>")
BOS_ID = SPECIAL_TOKENS.index("<s>")
EOS_ID = SPECIAL_TOKENS.index("<|im_end|>")
IMAGE_ID = SPECIAL_TOKENS.index("<image>")
AUDIO_ID = SPECIAL_TOKENS.index("<so_embedding>")
VOCAB_SIZE = len(SPECIAL_TOKENS) + 256

# Every message renders on its own, without a look at its neighbours: the text of a longer conversation
# therefore starts with the text of a shorter one, and a later turn can be appended to token ids.
CHAT_TEMPLATE = (
    "{%- if tools -%}{{- '<|im_start|>system\n' -}}"
    "{%- for tool in tools -%}{{- '<tool>' + (tool.function | tojson) + '</tool>' -}}{%- endfor -%}"
    "{{- '<|im_end|>\n' -}}{%- endif -%}"
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message['role'] + '\n' -}}"
    "{%- if message['content'] is string -%}{{- message['content'] -}}"
    "{%- elif message['content'] -%}{%- for part in message['content'] -%}"
    "{%- if part['type'] in ['image', 'image_url', 'input_image'] -%}{{- '<image>\n' -}}"
    "{%- elif part['type'] in ['video', 'video_url', 'input_video'] -%}{{- '<video>\n' -}}"
    "{%- elif part['type'] in ['text', 'input_text', 'output_text'] -%}{{- part['text'] -}}"
    "{%- else -%}{{- raise_exception('unknown content part type ' + part['type']) -}}{%- endif -%}"
    "{%- endfor -%}{%- endif -%}"
    "{%- for call in message.get('tool_calls') or [] -%}"
    "{{- '<tool_call>' + (call.get('function', call) | tojson) + '</tool_call>' -}}"
    "{%- endfor -%}"
    "{{- '<|im_end|>\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"
)


def build_byte_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of `VOCAB_SIZE` tokens: the special tokens first, then one token per byte."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {token: index for index, token in enumerate(SPECIAL_TOKENS)}
    for symbol in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocab[symbol] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL_TOKENS])
    named = {"unk_token": "<unk>", "pad_token": "<unk>", "bos_token": "<s>", "eos_token": "<|im_end|>"}
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        additional_special_tokens=[t for t in SPECIAL_TOKENS if t not in named.values()],
        model_max_length=1_000_000,
        clean_up_tokenization_spaces=False,
        **named,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def save_byte_tokenizer(out_dir: Path) -> None:
    """Write the tokenizer files and `chat_template.jinja` into `out_dir`."""
    build_byte_tokenizer().save_pretrained(str(out_dir))
    # vLLM reads the template from its own file.
    (out_dir / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
