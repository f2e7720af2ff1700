# SPDX-License-Identifier: Apache-2.0
"""Takes receipts in a vLLM process: what its front end does with every media item of a request.

`install` wraps functions that vLLM 0.25 and 0.32 share. Decoded items are seen where the multimodal processor is
applied, with everything that the processor cache hides from later stages; the request that they belong to where it is
made ready for the engine core. A vLLM that is laid out otherwise is left alone.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from nemo_rl_ext.media.identity import encoded_bytes, file_digest, item_digest
from nemo_rl_ext.receipts.receipt import Frames, ItemReceipt, Receipt, prompt_digest

logger = logging.getLogger(__name__)

PARTS_KEY = "media_receipt"
"""Where a processed prompt carries what was seen of its media until a request takes it over."""

MAX_GEOMETRY_NUMBERS = 64
MAX_PENDING = 8192
MAX_CACHED = 65536

_MARK = "_nemo_rl_ext_original"
_CACHE_MODULES = (
    "vllm.multimodal.cache",
    *(f"vllm.multimodal.cache.{name}" for name in ("base", "lru", "shm")),
)


@dataclass(frozen=True, kw_only=True)
class _Made:
    """What made the tensors that a cache keeps under a hash."""

    geometry: dict[str, Any] | None
    pixels: str | None


@dataclass(kw_only=True)
class _Applying:
    """One application of the processor, in the thread that runs it."""

    pixels: Mapping[str, Sequence[str | None]]
    order: Iterator[tuple[str, int, str]] = iter(())
    served: dict[tuple[str, int], _Made | None] = field(default_factory=dict)
    cached: dict[tuple[str, int], bool] = field(default_factory=dict)


class _State(threading.local):
    applying: _Applying | None = None


_state = _State()
_lock = threading.Lock()
_pending: OrderedDict[str, Receipt] = OrderedDict()


def install() -> str | None:
    """Wrap vLLM in this process, once; returns None, or in one sentence why this vLLM gives no receipts."""
    try:
        processing = importlib.import_module("vllm.multimodal.processing")
        requests = importlib.import_module("vllm.v1.engine.input_processor")
        processor = processing.BaseMultiModalProcessor
        targets = [
            (processor, "apply", _applied, ("inputs",)),
            (processor, "_get_cache_missing_items", _looked_up, ("mm_hashes",)),
            (requests.InputProcessor, "process_inputs", _requested, ("request_id", "prompt")),
        ]
        caches = _sender_caches()
    except (ImportError, AttributeError) as error:
        return f"this vLLM is not laid out as expected: {error}"
    for owner, name, _, parameters in targets:
        function = inspect.unwrap(getattr(owner, name, None) or install)
        missing = [word for word in parameters if word not in inspect.signature(function).parameters]
        if function is install or missing:
            return f"this vLLM's {owner.__name__}.{name} is missing or takes no {', '.join(missing) or 'arguments'}"
    if not caches:
        return "this vLLM has no processor cache of a known form"
    for owner, name, make, _ in targets:
        _wrap(owner, name, make)
    for cache in caches:
        _wrap(cache, "get_and_update_item", _cached)
    return None


def take(request_id: str) -> Receipt | None:
    """The receipt of a request, once; None where none was taken."""
    with _lock:
        return _pending.pop(request_id, None)


def _wrap(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    current = owner.__dict__[name]
    if not hasattr(current, _MARK):
        replacement = functools.wraps(current)(make(current))
        setattr(replacement, _MARK, current)
        setattr(owner, name, replacement)


def _sender_caches() -> list[type]:
    """The classes that hold processed media in the front end; receivers stand in the engine core."""
    found: dict[type, None] = {}
    for name in _CACHE_MODULES:
        try:
            module = importlib.import_module(name)
        except ImportError:
            continue
        for value in vars(module).values():
            if (
                isinstance(value, type)
                and "get_and_update_item" in vars(value)
                and "Receiver" not in value.__name__
            ):
                found[value] = None
    return [cache for cache in found if hasattr(cache, "is_cached_item") and not inspect.isabstract(cache)]


def _applied(original: Any) -> Any:
    def apply(self: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        items = {kind: list(found.get_all_items_for_hash()) for kind, found in inputs.mm_data_items.items()}
        pixels = {kind: [item_digest(item) for item in found] for kind, found in items.items()}
        outer, applying = _state.applying, _Applying(pixels=pixels)
        _state.applying = applying
        try:
            made = original(self, inputs, *args, **kwargs)
        finally:
            _state.applying = outer
        try:
            made[PARTS_KEY] = {
                "items": _item_parts(inputs, items, applying, made),
                "budget": {
                    "max_model_len": self.info.ctx.model_config.max_model_len,
                    "mm_processor_kwargs": dict(inputs.hf_processor_mm_kwargs or {}),
                    "processor_cache": _class_name(
                        getattr(inputs, "cache", None) or getattr(self, "cache", None)
                    ),
                },
            }
        except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
            logger.warning("no receipt was taken of a request's media: %s: %s", type(error).__name__, error)
        return made

    return apply


def _item_parts(
    inputs: Any, items: Mapping[str, Sequence[Any]], applying: _Applying, made: Mapping[str, Any]
) -> dict[str, list[ItemReceipt]]:
    """Receipts of every kind's items, without their places in the prompt, which the request knows."""
    parts: dict[str, list[ItemReceipt]] = {}
    for kind, hashes in made["mm_hashes"].items():
        uuids = (getattr(inputs, "mm_uuid_items", None) or {}).get(kind)
        about = getattr(inputs.mm_data_items[kind], "metadata", None)
        parts[kind] = []
        for index in range(len(hashes)):
            item, place = items[kind][index], (kind, index)
            arrived = applying.pixels[kind][index]
            if place in applying.served:
                origin = applying.served[place]
            else:
                origin = _Made(geometry=_geometry(made["mm_kwargs"][kind][index]), pixels=arrived)
            data = encoded_bytes(item)
            parts[kind].append(
                ItemReceipt(
                    kind=kind,
                    pixels=arrived,
                    served=origin.pixels if origin is not None else None,
                    file=file_digest(data) if data is not None else None,
                    named=bool(uuids and uuids[index] is not None),
                    cached=applying.cached.get(place, False),
                    size=tuple(map(int, _shape(item))),
                    geometry=origin.geometry if origin is not None else None,
                    frames=_frames(_metadata(item, about, index)),
                )
            )
    return parts


def _looked_up(original: Any) -> Any:
    """Remember in which order the cache will be asked: kind by kind, item by item, as the result is put together."""
    signature = inspect.signature(original)

    def get_cache_missing_items(self: Any, *args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(self, *args, **kwargs)
        result = original(self, *args, **kwargs)
        if _state.applying is not None:
            hashes = bound.arguments["mm_hashes"]
            _state.applying.order = iter(
                [(kind, index, name) for kind, names in hashes.items() for index, name in enumerate(names)]
            )
        return result

    return get_cache_missing_items


def _cached(original: Any) -> Any:
    def get_and_update_item(self: Any, mm_item: Any, mm_hash: str) -> Any:
        was_cached = self.is_cached_item(mm_hash)
        result = original(self, mm_item, mm_hash)
        applying = _state.applying
        if applying is None:
            return result
        kept: OrderedDict[str, _Made] = self.__dict__.setdefault("_media_receipts", OrderedDict())
        kind, index, expected = next(applying.order, ("", -1, ""))
        if expected != mm_hash:
            # Asked in another order than the prompt's: what belongs to whom is not known from here on.
            applying.order = iter(())
            kept.pop(mm_hash, None)
            return result
        if not was_cached:
            made = _Made(
                geometry=_geometry(mm_item[0]) if mm_item is not None else None,
                pixels=applying.pixels[kind][index],
            )
            earlier = kept.pop(mm_hash, made)
            if earlier.geometry != made.geometry:
                # Features are kept under the same hash, and a check of their number alone tells one grid's from
                # another's: which geometry the engine used is not certain.
                made = _Made(geometry=None, pixels=made.pixels)
            kept[mm_hash] = made
            while len(kept) > MAX_CACHED:
                kept.popitem(last=False)
        kept_item = kept.get(mm_hash)
        if kept_item is not None:
            kept.move_to_end(mm_hash)
        applying.served[kind, index] = kept_item
        applying.cached[kind, index] = was_cached
        return result

    return get_and_update_item


def _requested(original: Any) -> Any:
    def process_inputs(self: Any, request_id: str, prompt: Any, *args: Any, **kwargs: Any) -> Any:
        request = original(self, request_id, prompt, *args, **kwargs)
        try:
            receipt = _receipt(request, prompt, self.vllm_config.cache_config.enable_prefix_caching)
        except (AttributeError, KeyError, IndexError, TypeError, ValueError, StopIteration) as error:
            logger.warning(
                "no receipt was taken of request %s: %s: %s", request_id, type(error).__name__, error
            )
            return request
        if receipt is not None:
            with _lock:
                _pending.pop(request_id, None)
                _pending[request_id] = receipt
                while len(_pending) > MAX_PENDING:
                    _pending.popitem(last=False)
        return request

    return process_inputs


def _receipt(request: Any, prompt: Any, prefix_caching: bool) -> Receipt | None:
    """None for a request whose media were not seen: they were processed before the wraps, or elsewhere."""
    ids = request.prompt_token_ids
    if ids is None:
        return None
    features = request.mm_features or ()
    parts = prompt.get(PARTS_KEY) if hasattr(prompt, "get") else None
    if features and parts is None:
        return None
    taken = {kind: iter(found) for kind, found in (parts["items"] if parts else {}).items()}
    items = []
    # Without either cache vLLM names every item itself, and no name is ever looked up.
    looked_up = prefix_caching or (parts is not None and parts["budget"]["processor_cache"] is not None)
    # Features stand in prompt order; those of one kind keep the order in which they were given.
    for feature in features:
        place = feature.mm_position
        items.append(
            msgspec.structs.replace(
                item := next(taken[feature.modality]),
                named=item.named and looked_up,
                range=(int(place.offset), int(place.length)),
                runs=tuple(
                    (int(first), int(last) - int(first) + 1) for first, last in place.extract_embeds_range()
                ),
            )
        )
    return Receipt(
        prompt_tokens=len(ids),
        prompt=prompt_digest(ids),
        items=tuple(items),
        **(parts["budget"] if parts else {}),
    )


def _class_name(value: Any) -> str | None:
    return type(value).__name__ if value is not None else None


def _shape(item: Any) -> tuple[int, ...]:
    """Of decoded pixels: `[height, width, 3]` or `[frames, height, width, 3]`; empty where it is not known."""
    item = item[0] if isinstance(item, tuple) else item
    media = getattr(item, "media", item)
    media = media[0] if isinstance(media, tuple) else media
    if hasattr(media, "getbands"):
        return (media.height, media.width, len(media.getbands()))
    return tuple(getattr(media, "shape", ()))


def _metadata(item: Any, about: Any, index: int) -> Mapping[str, Any] | None:
    """A clip's description by vLLM's loader or the client: beside the frames, or in the items' own list."""
    if isinstance(item, tuple) and len(item) == 2 and isinstance(item[1], Mapping):
        return item[1]
    if isinstance(about, Mapping):
        return about
    return about[index] if isinstance(about, list | tuple) and index < len(about) else None


def _frames(metadata: Mapping[str, Any] | None) -> Frames | None:
    if not metadata:
        return None
    indices, total = metadata.get("frames_indices"), metadata.get("total_num_frames")
    return Frames(
        indices=tuple(int(index) for index in indices) if indices is not None else (),
        fps=float(metadata["fps"]) if metadata.get("fps") is not None else None,
        total=int(total) if total is not None else None,
    )


def _geometry(item: Any) -> dict[str, Any] | None:
    """Small numbers of a processed item by key, and the shapes of its large tensors; None where it carries none."""
    if item is None:
        return None
    out: dict[str, Any] = {}
    for key, element in item.items():
        data = getattr(element, "data", element)
        if hasattr(data, "numel"):
            small = data.numel() <= MAX_GEOMETRY_NUMBERS
            out[key] = data.tolist() if small else {"shape": list(data.shape)}
        elif isinstance(data, bool | int | float):
            out[key] = data
        elif isinstance(data, list | tuple) and len(data) <= MAX_GEOMETRY_NUMBERS:
            out[key] = [float(value) if isinstance(value, float) else int(value) for value in data]
    return out or None
