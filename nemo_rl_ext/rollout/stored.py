# SPDX-License-Identifier: Apache-2.0
"""Media tensors that lie in Ray's object store and stand in for themselves until a forward needs them.

A `StoredTensor` answers for its shape and dtype and travels as a reference; `torch.cat` and `F.pad` make it a tensor.
What it reads is a view of the store, which nobody may write to: every function that joins tensors copies.
"""

from __future__ import annotations

import hashlib
import logging
import math
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import ray
import torch
from ray.exceptions import RayError

from nemo_rl_ext.rollout.broker import report_lost
from nemo_rl_ext.rollout.losses import first_line, loss_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Blob:
    """One rendered item in the object store: a contiguous buffer, bfloat16 as uint16.

    `identity` says what it shows, in which frames, grid and dtype; equal identities are equal bytes. `remake` renders
    it again, called in whatever process finds out that it is lost.
    """

    identity: str
    ref: Any
    shape: tuple[int, ...]
    dtype: torch.dtype
    remake: Callable[[], torch.Tensor] = field(repr=False)

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def open(self) -> torch.Tensor:
        """The item's tensor: a view of the store, or rendered again where the store lost it.

        Raises:
            ValueError: when its medium is no longer what it was, or gone.
        """
        try:
            array = ray.get(self.ref)
        except RayError as error:
            if loss_of(error) is None:
                raise
            logger.warning("a stored medium is rendered again: %s", first_line(error))
            report_lost(self.identity)
            made = self.remake()
            if made.dtype != self.dtype or tuple(made.shape) != self.shape:
                raise ValueError(
                    f"a stored medium was lost and is no longer what it was: expected {self.dtype} "
                    f"{list(self.shape)}, got {made.dtype} {list(made.shape)}"
                ) from None
            return made
        with warnings.catch_warnings():
            # The view is read-only, and torch says so each time.
            warnings.simplefilter("ignore")
            tensor = torch.from_numpy(array)
        return tensor.view(self.dtype).view(self.shape)


def as_array(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """A tensor as the contiguous numpy buffer that the object store maps without a copy."""
    tensor = tensor.contiguous()
    return (tensor.view(torch.uint16) if tensor.dtype is torch.bfloat16 else tensor).numpy()


_opened: weakref.WeakValueDictionary[Any, torch.Tensor] = weakref.WeakValueDictionary()
"""Tensors that some pickle still holds, so that one file has each only once."""


class StoredTensor:
    """Blobs joined along their first axis, zero-padded to one shape: what a family's `pack` would have made of them."""

    def __init__(
        self,
        blobs: Sequence[Blob],
        shape: Sequence[int],
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.blobs = tuple(blobs)
        self.shape = torch.Size(shape)
        self.dtype = dtype or blobs[0].dtype
        self.device = device or torch.device("cpu")

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def identity(self) -> bytes:
        """16 bytes that are equal for equal contents and dtypes."""
        key = "|".join((str(self.dtype), *(blob.identity for blob in self.blobs)))
        return hashlib.sha256(key.encode()).digest()[:16]

    def __len__(self) -> int:
        return self.shape[0]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StoredTensor) and self.identity == other.identity

    def __hash__(self) -> int:
        return hash(self.identity)

    def __deepcopy__(self, memo: dict[int, Any]) -> StoredTensor:
        return self

    def numel(self) -> int:
        return self.shape.numel()

    def element_size(self) -> int:
        return self.dtype.itemsize

    def is_floating_point(self) -> bool:
        return self.dtype.is_floating_point

    def to(self, *args: Any, dtype: torch.dtype | None = None, device: Any = None, **_: Any) -> StoredTensor:
        """The same tensor in another dtype or on another device, when it is opened."""
        for value in args:
            if isinstance(value, torch.dtype):
                dtype = value
            elif value is not None:
                device = value
        return StoredTensor(
            self.blobs,
            self.shape,
            dtype or self.dtype,
            self.device if device is None else torch.device(device),
        )

    def open(self) -> torch.Tensor:
        """The tensor itself. It may be a view of the store: never write to it."""
        parts = [blob.open() for blob in self.blobs]
        parts = [part if part.ndim == self.ndim else part[None] for part in parts]
        if len(parts) == 1:
            joined = parts[0]
        else:
            joined = parts[0].new_zeros(self.shape)
            start = 0
            for part in parts:
                joined[(slice(start, start + len(part)), *(slice(side) for side in part.shape[1:]))] = part
                start += len(part)
        return joined.to(device=self.device, dtype=self.dtype)

    def __reduce__(self) -> tuple[Any, ...]:
        """A reference between processes of one cluster; in a file, which outlives it, the tensor itself."""
        if _travels_in_band():
            return StoredTensor, (self.blobs, tuple(self.shape), self.dtype, self.device)
        found = _opened.get(self)
        if found is None:
            found = self.open()
            _opened[self] = found
        return _itself, (found,)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return function(*_open_all(args), **_open_all(kwargs or {}))


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _open_all(value: Any) -> Any:
    if isinstance(value, StoredTensor):
        return value.open()
    if isinstance(value, list | tuple):
        return type(value)([_open_all(item) for item in value])
    if isinstance(value, dict):
        return {key: _open_all(item) for key, item in value.items()}
    return value


def _travels_in_band() -> bool:
    """Whether Ray is serializing this for another process, which takes part in counting its references."""
    if not ray.is_initialized():
        return False
    from ray._private.worker import global_worker

    context: Any = global_worker.get_serialization_context()  # type: ignore[no-untyped-call]
    return bool(context.is_in_band_serialization())
