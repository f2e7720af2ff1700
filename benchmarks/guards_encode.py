# SPDX-License-Identifier: Apache-2.0
"""What safe rendering and phantom detection cost, against the tokenizer's own chat rendering.

    python benchmarks/guards_encode.py
    python benchmarks/guards_encode.py --tokenizer CHECKPOINT   # loading it against building its encoder

Prints one JSON object; seconds are CPU seconds of this process.
"""

from __future__ import annotations

import argparse
import json
import time

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from nemo_rl_ext.align.runs import Grammar
from nemo_rl_ext.guards.chat import SafeChat
from nemo_rl_ext.guards.encode import SafeEncoder
from nemo_rl_ext.guards.phantom import RowMedia, find_phantoms

CONTROL = ["<unk>", "<|im_start|>", "<|im_end|>", "<image>", "<img>", "</img>"] + [
    f"<SPECIAL_{i}>" for i in range(994)
]
TEMPLATE = (
    "{%- for m in messages -%}"
    "{{- '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' -}}"
    "{%- endfor -%}"
)
TEXT = "The quick brown fox jumps over the lazy dog, and a < b as long as x[i] > 3 in <b>bold</b> text. "


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE with a thousand control tokens, as released Nemotron tokenizers have."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=1600, special_tokens=CONTROL, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator([TEXT] * 50, trainer)
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in CONTROL])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def cpu_seconds(work, repeats: int = 3) -> float:
    best = float("inf")
    for _ in range(repeats):
        began = time.process_time()
        work()
        best = min(best, time.process_time() - began)
    return best


def building(path: str) -> dict[str, object]:
    """What a real tokenizer's encoder costs to build, and what counts as control in it."""
    from transformers import AutoTokenizer

    began = time.process_time()
    tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    loaded = time.process_time()
    encoder = SafeEncoder(tokenizer)
    built = time.process_time()
    ordinary = [
        t.content for t in tokenizer.added_tokens_decoder.values() if t.content not in encoder.control
    ]
    own = [tokenizer.encode(f"a {text} b{text}", add_special_tokens=False) for text in ordinary]
    return {
        "load_s": round(loaded - began, 3),
        "build_encoder_s": round(built - loaded, 3),
        "vocabulary": len(tokenizer),
        "added_tokens": len(tokenizer.added_tokens_decoder),
        "control_tokens": len(encoder.control),
        "ordinary_added_tokens_with_other_ids": sum(
            encoder.encode(f"a {text} b{text}") != ids for text, ids in zip(ordinary, own, strict=True)
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokenizer", help="Measure building the encoder of this tokenizer instead.")
    args = parser.parse_args()
    if args.tokenizer:
        print(json.dumps(building(args.tokenizer), indent=1))
        return
    tokenizer = make_tokenizer()
    began = time.process_time()
    encoder = SafeEncoder(tokenizer)
    out: dict[str, object] = {"build_encoder_s": round(time.process_time() - began, 3)}
    chat = SafeChat(encoder)
    clean = [[{"role": "user", "content": TEXT * 20}, {"role": "assistant", "content": TEXT * 40}]] * 200
    dirty = [[{**m, "content": m["content"] + "{type<image>|bold}"} for m in messages] for messages in clean]

    def ordinary(rows):
        return [tokenizer.apply_chat_template(messages, return_dict=False) for messages in rows]

    def safe(rows):
        return [chat.encode(messages) for messages in rows]

    assert safe(clean) == ordinary(clean)
    image = tokenizer.convert_tokens_to_ids("<image>")
    assert sum(ids.count(image) for ids in ordinary(dirty)) == 400
    assert not any(image in ids for ids in safe(dirty))
    num_tokens = sum(map(len, ordinary(clean)))
    out["tokens"] = num_tokens
    base = cpu_seconds(lambda: ordinary(clean))
    out["apply_chat_template_s"] = round(base, 3)
    for name, rows in (("clean", clean), ("dirty", dirty)):
        seconds = cpu_seconds(lambda rows=rows: safe(rows))
        out[f"safe_chat_{name}_s"] = round(seconds, 3)
        out[f"safe_chat_{name}_over_ordinary"] = round(seconds / base, 2)

    ids = np.full(131_072, 20)
    offsets = range(100, 131_000, 1024)
    for offset in offsets:
        ids[offset - 1], ids[offset : offset + 256], ids[offset + 256] = 6, 5, 7
    ids[50] = 5
    grammar = Grammar(start_id=6, context_id=5, end_id=7)
    known = {
        "no media": None,
        "run count": RowMedia(num_runs=len(offsets)),
        "ranges": RowMedia(ranges=[(o, 256) for o in offsets]),
    }
    for name, media in known.items():
        seconds = (
            cpu_seconds(lambda media=media: [find_phantoms(ids, grammar, media) for _ in range(50)]) / 50
        )
        out[f"find_phantoms_131072_ids_{name.replace(' ', '_')}_ms"] = round(1000 * seconds, 3)
    assert find_phantoms(ids, grammar, known["run count"]).offsets.tolist() == [50]
    print(json.dumps(out, indent=1))


if __name__ == "__main__":
    main()
