# SPDX-License-Identifier: Apache-2.0
"""Which weights drew which tokens: vLLM's own record where it keeps one (0.32), else how far each sample was.

Weights change between two steps of the engine in this process, so that what has been drawn then is known.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from nemo_rl_ext.grpo.engine.requests import EngineError

Spans = tuple[tuple[int, int, int], ...]

_SAMPLE = re.compile(r"(?:(?P<index>\d+)_)?(?P<name>\d+)(?:-[0-9a-f]{8})?")
"""vLLM's name of one sample of a request (vllm/v1/engine/input_processor.py and parallel_sampling.py)."""


class WeightVersions:
    """The versions of an engine's weights over the samples that are being drawn."""

    def __init__(self, engine: Any) -> None:
        from vllm.outputs import CompletionOutput

        self._engine = engine
        self.recorded_by_vllm = "weight_versions" in {
            field.name for field in dataclasses.fields(CompletionOutput)
        }
        self.current = 0
        self._first: dict[str, int] = {}
        self._changes: dict[tuple[str, int], list[tuple[int, int]]] = {}

    def change(self, version: int) -> None:
        """From now on tokens are drawn with these weights."""
        if hasattr(self._engine, "set_weight_version"):
            self._engine.set_weight_version(str(version))
        self.current = version
        scheduler = self._engine.engine_core.engine_core.scheduler
        for request in scheduler.requests.values():
            found = _SAMPLE.fullmatch(request.request_id)
            if found is None:
                raise EngineError(
                    f"vLLM calls a sample {request.request_id!r}, and which request it belongs to cannot be told; this "
                    "version of vLLM is not supported"
                )
            # With asynchronous scheduling the tokens of the step under way are drawn and not handed over.
            drawn = request.num_output_tokens + getattr(request, "num_output_placeholders", 0)
            sample = (found["name"], int(found["index"] or 0))
            self._changes.setdefault(sample, []).append((version, drawn))

    def begin(self, name: str) -> None:
        """A request was added."""
        self._first[name] = self.current

    def spans(self, name: str, index: int, num_tokens: int) -> Spans:
        """`(version, start, end)` of the tokens of sample `index` of a finished request; call once for each."""
        marks = [(self._first[name], 0), *self._changes.pop((name, index), ())]
        ends = [*(start for _, start in marks[1:]), num_tokens]
        return tuple(
            (version, start, min(end, num_tokens))
            for (version, start), end in zip(marks, ends, strict=True)
            if start < min(end, num_tokens)
        )

    def end(self, name: str) -> None:
        """A request has finished."""
        self._first.pop(name, None)
