# SPDX-License-Identifier: Apache-2.0
"""One row of a NeMo-Gym style manifest, typed.

The shape is the Responses API's, as NeMo-Gym and NeMo-RL read it (nemo_rl/environments/nemo_gym_video.py):

    {"id": "clip-1",
     "responses_create_params": {"input": [
        {"role": "user", "content": [
            {"type": "input_image", "image_url": "images/a.png", "detail": "auto"},
            {"type": "input_text", "text": "What is left of the cup?"}]}]},
     "verifier_metadata": {"answer": "a spoon"},
     "agent_ref": {"type": "responses_api_agents", "name": "caption_qa"},
     "turns": [[{"role": "tool", "content": [...]}]]}

`turns` is this package's own key, which Gym carries along untouched: messages to append after the assistant's
first, second, ... answer, for rollouts whose later turns are known in advance (a tool's result, say).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import (
    AliasChoices,
    Discriminator,
    Field,
    PrivateAttr,
    Tag,
    field_validator,
    model_validator,
)

from nemo_rl_ext.manifest.tools import Frozen, Tool, ToolCall


class TextPart(Frozen):
    """Text of a message."""

    type: Literal["input_text", "output_text", "text"]
    text: str


class ImagePart(Frozen):
    """A still image, or one frame of a video whose frames were cached as images."""

    type: Literal["input_image"]
    image_url: str = Field(min_length=1)
    """Path, `file://` or `data:` URL, or http(s) where the policy allows it."""
    detail: str | None = None
    """Required by the Responses API, without effect here."""
    is_video_frame: bool = Field(default=False, alias="_is_video_frame")
    """True: this image is a frame of `video_source`; the frames of one video stand next to one another."""
    video_source: str | None = Field(default=None, alias="_video_source")
    """Which video a frame belongs to."""
    video_frame_index: int | None = Field(default=None, alias="_video_frame_index", ge=0)
    """Index of the frame in that video; the position in the list when absent."""
    video_fps: float | None = Field(default=None, alias="_video_fps", gt=0)
    """Frames per second that the indices count in; equal for all frames of one video."""

    @field_validator("image_url", mode="before")
    @classmethod
    def _flatten_url(cls, value: Any) -> Any:
        return _url_of(value)

    @field_validator("video_fps", mode="before")
    @classmethod
    def _accept_integers(cls, value: Any) -> Any:
        return float(value) if type(value) is int else value

    @model_validator(mode="after")
    def _frame_names_its_video(self) -> ImagePart:
        if self.is_video_frame and not self.video_source:
            raise ValueError("a frame (_is_video_frame) must name its video in _video_source")
        return self


class VideoPart(Frozen):
    """A video file."""

    type: Literal["input_video"]
    video_url: str = Field(
        min_length=1,
        validation_alias=AliasChoices("video_url", "video", "path", "url"),
        serialization_alias="video_url",
    )
    """Path or `file://` URL."""

    @field_validator("video_url", mode="before")
    @classmethod
    def _flatten_url(cls, value: Any) -> Any:
        return _url_of(value)


Part = Annotated[TextPart | ImagePart | VideoPart, Field(discriminator="type")]


_CALL = ("name", "arguments")


class Message(Frozen):
    """One message; a tool call becomes an assistant's, its output a message of the role `tool`."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[
        Annotated[str, Tag("string")] | Annotated[tuple[Part, ...], Tag("parts")],
        Discriminator(lambda value: "string" if isinstance(value, str) else "parts"),
    ] = ""
    tool_calls: tuple[ToolCall, ...] = ()
    """Calls of an assistant."""
    reasoning_content: str | None = None
    """What an assistant thought before it answered."""
    tool_call_id: str | None = None
    """Which call a tool's message answers."""
    name: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _from_response_item(cls, value: Any) -> Any:
        if not isinstance(value, dict) or "role" in value:
            return value
        kind = value.get("type")
        if kind == "function_call_output":
            return {
                **value,
                "role": "tool",
                "content": value.get("output", ""),
                "tool_call_id": value.get("call_id"),
            }
        if kind == "function_call":
            call = {
                "id": value.get("call_id"),
                "function": {key: value[key] for key in _CALL if key in value},
            }
            rest = {key: kept for key, kept in value.items() if key not in _CALL}
            return {**rest, "role": "assistant", "content": "", "tool_calls": [call]}
        if kind == "reasoning":
            thoughts = [part.get("text", "") for part in value.get("summary") or () if isinstance(part, dict)]
            thought = "\n".join(thoughts) or None
            return {**value, "role": "assistant", "content": "", "reasoning_content": thought}
        return value

    @field_validator("content", mode="before")
    @classmethod
    def _as_tuple(cls, value: Any) -> Any:
        if value is None:
            return ""
        return tuple(value) if isinstance(value, list) else value

    @field_validator("tool_calls", mode="before")
    @classmethod
    def _calls_as_tuple(cls, value: Any) -> Any:
        return tuple(value or ()) if isinstance(value, list | None) else value

    @model_validator(mode="after")
    def _assistants_call(self) -> Message:
        if self.tool_calls and self.role != "assistant":
            raise ValueError(f"tool_calls stand in messages of the role 'assistant', not {self.role!r}")
        return self

    @property
    def parts(self) -> tuple[TextPart | ImagePart | VideoPart, ...]:
        """The content as parts, also where it was written as a string."""
        if not isinstance(self.content, str):
            return self.content
        return (TextPart(type="input_text", text=self.content),) if self.content else ()


class AgentRef(Frozen):
    """The Gym agent that plays the row."""

    name: str
    type: str | None = None


class RequestParams(Frozen):
    """`responses_create_params`: the request that starts the rollout."""

    input: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    """Functions that the policy may call."""
    metadata: dict[str, str] | None = None
    """Strings only, as the Responses API and Gym demand."""

    @model_validator(mode="before")
    @classmethod
    def _no_instructions(cls, value: Any) -> Any:
        if isinstance(value, dict) and value.get("instructions"):
            raise ValueError(
                "`instructions` reach no prompt, here or through NeMo-Gym; write them as the first message of `input`, "
                "with the role 'system'"
            )
        return value

    @field_validator("tools", mode="before")
    @classmethod
    def _tools_as_tuple(cls, value: Any) -> Any:
        return tuple(value or ()) if isinstance(value, list | None) else value

    @field_validator("input", mode="before")
    @classmethod
    def _as_messages(cls, value: Any) -> Any:
        if isinstance(value, str):
            return ({"role": "user", "content": value},)
        return tuple(value) if isinstance(value, list) else value


@dataclass(frozen=True, kw_only=True)
class MediaRef:
    """One media part of a row, in prompt order."""

    kind: Literal["image", "video", "frame"]
    """`frame` is one image of a cached frame list; consecutive frames of one source make one video."""
    ref: str
    """The reference as the manifest has it."""
    turn: int
    """0 for the initial request, k for the messages appended after the k-th answer."""
    message_index: int
    """Index within the messages of that turn."""
    part_index: int
    """Index within the parts of that message."""
    video_source: str | None = None
    frame_index: int | None = None
    fps: float | None = None

    @property
    def field(self) -> str:
        """The path of its part within the row, dots between."""
        place = "responses_create_params.input" if self.turn == 0 else f"turns.{self.turn - 1}"
        return f"{place}.{self.message_index}.content.{self.part_index}"


class ManifestRow(Frozen):
    """One row; unknown keys are kept in `model_extra`."""

    responses_create_params: RequestParams
    verifier_metadata: dict[str, Any] = Field(default_factory=dict)
    """Ground truth and whatever else the verifier reads."""
    agent_ref: AgentRef | None = None
    id: str | int | None = Field(default=None, validation_alias=AliasChoices("id", "uuid", "uid", "task_id"))
    """Unique within the manifest where given."""
    image_max_num_tiles: int | None = Field(default=None, ge=1)
    """Tiles per image for processors with fixed tiles, for this row."""
    num_frames: int | None = Field(default=None, ge=1)
    """Frames to sample from each video of this row."""
    metadata: dict[str, str] | None = None
    turns: tuple[tuple[Message, ...], ...] = ()
    """Messages to append after the first, second, ... answer of the assistant."""

    _line: int = PrivateAttr(default=0)
    _file: str = PrivateAttr(default="")

    @field_validator("turns", mode="before")
    @classmethod
    def _as_tuples(cls, value: Any) -> Any:
        if isinstance(value, list):
            return tuple(tuple(turn) if isinstance(turn, list) else turn for turn in value)
        return value

    @model_validator(mode="after")
    def _prompt_is_playable(self) -> ManifestRow:
        if not any(message.role == "user" for message in self.responses_create_params.input):
            raise ValueError("responses_create_params.input needs at least one message with role 'user'")
        for index, turn in enumerate(self.turns):
            if not turn:
                raise ValueError(f"turns.{index} has no message")
            if any(message.role == "assistant" for message in turn):
                raise ValueError(f"turns.{index} has an assistant message: the policy writes those")
        return self

    @classmethod
    def from_json(cls, value: Any, *, file: str = "", line: int = 0) -> ManifestRow:
        """The row of one decoded JSON object. Raises `pydantic.ValidationError`."""
        row = cls.model_validate(value)
        row._line, row._file = line, file
        return row

    @property
    def line(self) -> int:
        """Line of the manifest, from 1; 0 for a row that was not loaded from a file."""
        return self._line

    @property
    def where(self) -> str:
        """`file:line`, for messages."""
        return f"{self._file}:{self._line}" if self._file else f"row {self.row_id}"

    @property
    def row_id(self) -> str:
        """The row's own id, or `line-N`."""
        return f"line-{self._line}" if self.id is None else str(self.id)

    @property
    def num_turns(self) -> int:
        """Answers that the policy gives: one, and one more per entry of `turns`."""
        return 1 + len(self.turns)

    def messages(self, turn: int = 0) -> tuple[Message, ...]:
        """The messages that come before answer number `turn`, those of earlier turns not repeated."""
        return self.responses_create_params.input if turn == 0 else self.turns[turn - 1]

    def media_refs(self) -> tuple[MediaRef, ...]:
        """Every media part of every turn, in prompt order."""
        return tuple(self._walk())

    def _walk(self) -> Iterator[MediaRef]:
        for turn in range(self.num_turns):
            for message_index, message in enumerate(self.messages(turn)):
                for part_index, part in enumerate(message.parts):
                    place = functools.partial(
                        MediaRef, turn=turn, message_index=message_index, part_index=part_index
                    )
                    if isinstance(part, VideoPart):
                        yield place(kind="video", ref=part.video_url)
                    elif isinstance(part, ImagePart) and not part.is_video_frame:
                        yield place(kind="image", ref=part.image_url)
                    elif isinstance(part, ImagePart):
                        yield place(
                            kind="frame",
                            ref=part.image_url,
                            video_source=part.video_source,
                            frame_index=part.video_frame_index,
                            fps=part.video_fps,
                        )


def _url_of(value: Any) -> Any:
    """The chat API nests a URL as `{"url": ...}`; the Responses API does not."""
    if isinstance(value, dict):
        return value.get("url") or value.get("path")
    return value
