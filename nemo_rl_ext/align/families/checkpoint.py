# SPDX-License-Identifier: Apache-2.0
"""What families read of a checkpoint directory: configuration files and the tokenizer, no weights and no code."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

Decoder = Callable[[Sequence[int]], str]


def read_json(path: Path) -> dict[str, Any]:
    """One JSON object. Raises `ValueError` when the file is missing or broken, naming it."""
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(
            f"{path} is missing; a checkpoint directory with its processor files is expected"
        ) from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(read, dict):
        raise ValueError(f"{path}: an object is expected, found {type(read).__name__}")
    return read


def processor_part(model_dir: Path, kind: str) -> dict[str, Any]:
    """The configuration of a checkpoint's `image` or `video` processor; {} where it has none for videos.

    It stands in a file of its own, or, as transformers 5 saves it, in processor_config.json alone.

    Raises:
        ValueError: when neither file describes an image processor, naming both.
    """
    joint, prefix = model_dir / "processor_config.json", "" if kind == "image" else "video_"
    own = model_dir / f"{prefix}preprocessor_config.json"
    if own.is_file():
        return read_json(own)
    part = read_json(joint).get(f"{kind}_processor") if joint.is_file() else None
    if part is None and kind == "image":
        raise ValueError(
            f"{own} is missing, and {joint.name} {'has no image_processor' if joint.is_file() else 'is too'}; a "
            "checkpoint directory with its processor files is expected"
        )
    return dict(part or {})


def tokenizer_of(model_dir: Path) -> tuple[Mapping[str, int], Decoder]:
    """Token -> id and a decoder that keeps special tokens, from tokenizer.json, else through transformers."""
    path = model_dir / "tokenizer.json"
    if path.is_file():
        from tokenizers import Tokenizer

        fast = Tokenizer.from_file(str(path))
        vocabulary: Mapping[str, int] = fast.get_vocab(with_added_tokens=True)
        return vocabulary, lambda ids: str(fast.decode(list(ids), skip_special_tokens=False))
    if not model_dir.is_dir():
        raise ValueError(
            f"{model_dir} is not a directory; a checkpoint directory with a tokenizer is expected"
        )
    from transformers import AutoTokenizer

    slow = AutoTokenizer.from_pretrained(str(model_dir), local_files_only=True)
    return slow.get_vocab(), decoder_of(slow)


def decoder_of(tokenizer: Any) -> Decoder:
    """A decoder that keeps special tokens, from a transformers tokenizer."""
    return lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False))


def token_ids(vocabulary: Mapping[str, int], tokens: Sequence[str], origin: str, family: str) -> list[int]:
    """The ids of a family's media tokens. Raises `ValueError` naming those that the tokenizer does not know."""
    missing = [token for token in tokens if token not in vocabulary]
    if missing:
        raise ValueError(
            f"{origin}: the tokenizer has no {', '.join(missing)}; {family} checkpoint is expected, whose "
            f"tokenizer knows {', '.join(tokens[:-1])} and {tokens[-1]}"
        )
    return [vocabulary[token] for token in tokens]


def setting(config: Mapping[str, Any], origin: str, *names: str) -> Any:
    """The first of these settings that is there. Raises `ValueError` naming those that were looked for."""
    for name in names:
        if config.get(name) is not None:
            return config[name]
    raise ValueError(
        f"{origin}: the processor configuration has no {' or '.join(names)}; it has {', '.join(sorted(config))}"
    )


def triple(values: Sequence[float]) -> tuple[float, float, float]:
    """One number per colour. Raises `ValueError` for any other number of them."""
    red, green, blue = (float(value) for value in values)
    return red, green, blue
