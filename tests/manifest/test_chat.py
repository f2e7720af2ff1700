# SPDX-License-Identifier: Apache-2.0
"""Tool calls, tools and thoughts reach the prompt or refuse the row by name."""

import dataclasses
import json

import pytest

from nemo_rl_ext.manifest.chat import LeftOutError, chat_messages, chat_tools, has_tools, render_chat
from nemo_rl_ext.manifest.check import CheckConfig, check_manifest
from nemo_rl_ext.manifest.forecast import EngineModel, forecast
from nemo_rl_ext.manifest.loading import scan_manifest
from nemo_rl_ext.manifest.rows import ManifestRow
from nemo_rl_ext.models.tokenizer import build_byte_tokenizer

ZOOM = {"type": "function", "name": "zoom", "parameters": {"type": "object", "properties": {"factor": {}}}}
USER = {"role": "user", "content": "Which half?"}
CALL = {"type": "function_call", "call_id": "1", "name": "zoom", "arguments": '{"factor": 2}'}
SECOND = CALL | {"call_id": "2", "arguments": '{"factor": 3}'}
RESULT = {"type": "function_call_output", "call_id": "1", "output": "zoomed"}
CHAT_CALL = {"id": "1", "type": "function", "function": {"name": "zoom", "arguments": {"factor": 2}}}
THOUGHT = {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "Closer."}]}


@pytest.fixture
def tokenizer():
    return build_byte_tokenizer()


def row(*items, tools=(ZOOM,), **more):
    return ManifestRow.from_json(
        {"responses_create_params": {"input": [USER, *items], "tools": list(tools)}, **more}
    )


@pytest.mark.parametrize(
    "calls",
    [
        [CALL],
        [{"role": "assistant", "content": None, "tool_calls": [CHAT_CALL]}],
        [
            {
                "role": "assistant",
                "tool_calls": [{"function": {"name": "zoom", "arguments": '{"factor": 2}'}, "id": "1"}],
            }
        ],
    ],
)
def test_every_form_of_a_call_is_written_by_the_template(tokenizer, calls):
    read = row(*calls, RESULT)
    text = render_chat(tokenizer, chat_messages(read.messages()), chat_tools(read))
    assert text == (
        '<|im_start|>system\n<tool>{"name": "zoom", "parameters": {"type": "object", "properties": {"factor": {}}}}'
        "</tool><|im_end|>\n<|im_start|>user\nWhich half?<|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>{"name": "zoom", "arguments": {"factor": 2}}</tool_call><|im_end|>\n'
        "<|im_start|>tool\nzoomed<|im_end|>\n<|im_start|>assistant\n"
    )


def test_the_parts_of_one_answer_are_one_message():
    said = {"role": "assistant", "content": [{"type": "output_text", "text": "Let me look."}]}
    chat = chat_messages(row(THOUGHT, said, CALL, SECOND, RESULT).messages())
    assert [message["role"] for message in chat] == ["user", "assistant", "tool"]
    assert chat[1]["reasoning_content"] == "Closer."
    assert chat[1]["content"] == [{"type": "text", "text": "Let me look."}]
    assert [call["function"]["arguments"] for call in chat[1]["tool_calls"]] == [{"factor": 2}, {"factor": 3}]
    assert chat[2]["tool_call_id"] == "1"
    apart = chat_messages(row(CALL, RESULT, SECOND, said).messages())
    assert [message["role"] for message in apart] == ["user", "assistant", "tool", "assistant", "assistant"]


PLAIN = (
    "{%- for m in messages -%}{%- if m.role != 'tool' or answers -%}{{- m.role + ':' + (m.content or '') -}}"
    "{%- endif -%}{%- for c in (m.tool_calls or [])[:calls] -%}{{- c.function.name -}}{%- endfor -%}{%- endfor -%}"
    "{%- if listed -%}{{- tools | tojson -}}{%- endif -%}"
)


@pytest.mark.parametrize(
    ("switches", "lost"),
    [
        ("listed = true, calls = 2, answers = true", None),
        ("listed = false, calls = 2, answers = true", "leaves out the tool 'zoom'"),
        ("listed = true, calls = 1, answers = true", "leaves out a call of 'zoom'"),
        ("listed = true, calls = 2, answers = false", "leaves out a tool's answer"),
    ],
)
def test_a_template_that_leaves_a_part_out_refuses_the_row(tokenizer, switches, lost):
    names = dict(part.split(" = ") for part in switches.split(", "))
    tokenizer.chat_template = "".join(f"{{%- set {k} = {v} -%}}" for k, v in names.items()) + PLAIN
    read = row(CALL, SECOND, RESULT)
    chat = (tokenizer, chat_messages(read.messages()), chat_tools(read))
    if lost is None:
        assert render_chat(*chat).count("zoom") == 4
        return
    with pytest.raises(LeftOutError, match=lost):
        render_chat(*chat)


def test_thoughts_that_no_template_writes_and_conversations_that_it_refuses(tokenizer):
    with pytest.raises(LeftOutError, match="leaves out what an assistant thought"):
        render_chat(tokenizer, chat_messages(row(THOUGHT, tools=()).messages()))
    tokenizer.chat_template = "{{- raise_exception('only user and assistant roles') -}}"
    with pytest.raises(LeftOutError, match="does not take this conversation: only user and assistant roles"):
        render_chat(tokenizer, chat_messages(row().messages()))


def test_only_rows_with_such_parts_are_rendered_at_the_start():
    assert not has_tools(row(tools=()))
    later = row(tools=(), turns=[[RESULT]])
    assert (
        has_tools(row()) and has_tools(row(CALL, tools=())) and has_tools(later) and has_tools(row(THOUGHT))
    )


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"input": [USER, CALL | {"arguments": "factor=2"}]}, "not the text of a JSON object"),
        ({"input": [USER, CALL | {"arguments": "[2]"}]}, "valid dictionary"),
        ({"input": [USER, {"role": "user", "content": "x", "tool_calls": [CHAT_CALL]}]}, "role 'assistant'"),
        ({"input": [USER], "tools": [{"type": "web_search"}]}, "function"),
        ({"input": [USER], "instructions": "Be brief."}, "first message of `input`"),
    ],
)
def test_forms_that_no_template_takes_are_faults_by_file_and_line(tmp_path, change, problem):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"responses_create_params": change}) + "\n")
    faults = [item for item in scan_manifest(path) if not isinstance(item, ManifestRow)]
    assert faults and faults[0].line == 1 and any(problem in fault.problem for fault in faults), faults


def test_check_names_the_row_and_counts_calls_and_tools(tmp_path, tokenizer):
    path = tmp_path / "rows.jsonl"
    values = [
        {
            "responses_create_params": {"input": [USER, CALL, RESULT], "tools": [ZOOM]},
            "verifier_metadata": {"answer": "a"},
        },
        {"responses_create_params": {"input": [USER]}, "verifier_metadata": {"answer": "a"}},
    ]
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    with_template = EngineModel(tokenizer=tokenizer)
    report = check_manifest(path, CheckConfig(engine=with_template))
    assert not report.faults
    with_calls, without = report.forecasts
    read = ManifestRow.from_json(values[0])
    text = render_chat(tokenizer, chat_messages(read.messages()), chat_tools(read))
    assert with_calls.sequence_tokens == len(tokenizer(text, add_special_tokens=False).input_ids)
    estimated = [
        forecast(ManifestRow.from_json(value), [], EngineModel()).sequence_tokens for value in values
    ]
    assert estimated[0] > estimated[1] + 20
    tokenizer.chat_template = tokenizer.chat_template.replace("message.get('tool_calls')", "[]")
    report = check_manifest(path, CheckConfig(engine=dataclasses.replace(with_template, tokenizer=tokenizer)))
    (fault,) = report.faults
    assert (fault.line, "leaves out a call of 'zoom'" in fault.problem) == (1, True)
