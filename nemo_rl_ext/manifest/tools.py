# SPDX-License-Identifier: Apache-2.0
"""Tools of a request and calls of them, in the Responses form and in the chat form."""

from __future__ import annotations

import json
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator


class Frozen(BaseModel):
    """A part of a manifest row."""

    # Gym rows carry keys of their verifiers and agents at every level: typed where known, kept where not.
    model_config = ConfigDict(frozen=True, extra="allow", populate_by_name=True, strict=True)


class FunctionCall(Frozen):
    """What an assistant called."""

    name: str = Field(min_length=1)
    arguments: dict[str, Any] = Field(default_factory=dict)
    """An object, or the text of one."""

    @field_validator("arguments", mode="before")
    @classmethod
    def _parsed(cls, value: Any) -> Any:
        # Chat templates write objects (vLLM parses them, too: vllm/entrypoints/chat_utils.py).
        if not isinstance(value, str):
            return value
        try:
            return json.loads(value or "{}")
        except (json.JSONDecodeError, RecursionError):
            raise ValueError("the arguments of a tool call are not the text of a JSON object") from None


class ToolCall(Frozen):
    """A call within an assistant's message."""

    type: Literal["function"] = "function"
    id: str | None = None
    function: FunctionCall

    def for_template(self) -> dict[str, Any]:
        """The call as chat templates take it."""
        function = {"name": self.function.name, "arguments": self.function.arguments}
        named = {} if self.id is None else {"id": self.id}
        return {"type": "function", **named, "function": function}


class Tool(Frozen):
    """A function that the policy may call; the Responses API writes its fields beside `type`."""

    type: Literal["function"] = "function"
    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """A JSON schema."""

    @model_validator(mode="before")
    @classmethod
    def _flat(cls, value: Any) -> Any:
        if isinstance(value, dict) and isinstance(value.get("function"), dict):
            return {"type": value.get("type", "function"), **value["function"]}
        return value

    def for_template(self) -> dict[str, Any]:
        """The tool as chat templates take it; `strict` is for servers that enforce schemas, as in NeMo-Gym's."""
        fields = {"description": self.description, "parameters": self.parameters}
        known = {key: value for key, value in fields.items() if value is not None}
        return {"type": "function", "function": {"name": self.name, **known}}
