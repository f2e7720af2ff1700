# SPDX-License-Identifier: Apache-2.0
"""What the pages name exists: links, files, commands with their options, make targets, configuration keys."""

import ast
import glob
import re
import shlex
import shutil
from pathlib import Path

import pytest
import typer
import yaml

from nemo_rl_ext import cli
from nemo_rl_ext.config.faults import known_keys
from nemo_rl_ext.distill.config import DistillConfig
from nemo_rl_ext.grpo.config import Config

REPOSITORY = Path(__file__).parents[1]
PAGES = sorted(
    [*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").rglob("*.md")],
    key=lambda path: str(path.relative_to(REPOSITORY)),
)
NAMES = [str(path.relative_to(REPOSITORY)) for path in PAGES]
FOLDERS = "nemo_rl_ext|tests|docs|configs|scripts|requirements|benchmarks|gym_resources"
# Keys of NeMo-RL and vLLM that the embedded run does not have.
FOREIGN = re.compile(
    r"megatron_cfg|dtensor_cfg|automodel|sequence_packing|env\.nemo_gym\.|\.vllm_kwargs|data\.default|bad_words|"
    r"policy\.tokenizer"
)


@pytest.fixture(scope="module")
def text():
    return {str(path.relative_to(REPOSITORY)): path.read_text(encoding="utf-8") for path in PAGES}


def blocks(text, *languages):
    found = re.findall(r"^ *```(\w*)\n(.*?)^ *```", text, re.M | re.S)
    return [body for language, body in found if language in languages]


def inline(text):
    return re.findall(r"`([^`\n]+)`", re.sub(r"^ *```.*?^ *```", "", text, flags=re.M | re.S))


@pytest.mark.parametrize("page", NAMES)
def test_links_lead_somewhere(page, text):
    for target in re.findall(r"\]\(([^)\s]+)\)", text[page]):
        if "://" not in target and not target.startswith("#"):
            path = (REPOSITORY / page).parent / target.partition("#")[0]
            assert path.exists(), f"{page}: {target}"


@pytest.mark.parametrize("page", NAMES)
def test_files_exist(page, text):
    named = {word.rstrip(".,:") for span in inline(text[page]) for word in span.split()}
    for name in sorted(named):
        if re.fullmatch(rf"(?:{FOLDERS})/[\w./-]+", name) and page != "CHANGELOG.md":
            elsewhere = name.startswith(("docs/api", "tests/unit"))  # written by `make docs`; NeMo-RL's
            assert elsewhere or (REPOSITORY / name).exists(), f"{page}: {name}"


def commands(text):
    """Every `nemo-rl-ext ...` of code blocks and inline code, lines that go on joined."""
    for body in blocks(text, "bash", "sh", ""):
        for line in body.replace("\\\n", " ").splitlines():
            yield line.partition(" #")[0]
    yield from inline(text)


@pytest.mark.parametrize("page", NAMES)
def test_commands_and_their_options_exist(page, text):
    app = typer.main.get_command(cli.build_app())
    common = {"--debug", "--quiet", "-q", "--log-format", "--help", "-h"}
    for line in commands(text[page]):
        match = re.search(r"(?:^|\s|bin/)nemo-rl-ext ((?!\.\.\.).*)", line)
        if not match:
            continue
        try:
            words = shlex.split(match.group(1))
        except ValueError:
            continue
        words = [word for word in words if word not in common]
        if not words or not words[0].isalpha() or "|" in words[0]:
            continue
        command = app.commands.get(words[0])
        assert command is not None, f"{page}: {line}"
        known = {name for option in command.params for name in (*option.opts, *option.secondary_opts)}
        if words[0] != "launch":
            for word in words[1:]:
                if re.fullmatch(r"-{1,2}[a-z][a-z-]*(?:=.*)?", word):
                    assert word.partition("=")[0] in known, f"{page}: {word} in {line}"


@pytest.mark.parametrize("page", NAMES)
def test_make_targets_exist(page, text):
    makefile = (REPOSITORY / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.M))
    for line in commands(text[page]):
        for target in re.findall(r"(?:^|\s)make ([a-z][a-z-]*)", line):
            assert target in targets, f"{page}: make {target}"


@pytest.mark.parametrize("page", NAMES)
def test_configuration_keys_exist(page, text):
    known = {*known_keys(Config), *known_keys(DistillConfig)}
    roots = "|".join(Config.model_fields)
    for span in [*inline(text[page]), *blocks(text[page], "bash", "sh")]:
        for key in re.findall(rf"(?<![\w./-])((?:{roots})(?:\.[a-z_0-9]+)+)(?=[=:`\s,)]|$)", span):
            if not FOREIGN.search(key) and page not in ("docs/nemo_rl.md", "ARCHITECTURE.md", "CHANGELOG.md"):
                file = re.fullmatch(r".*\.(py|md|yaml|jsonl|json)", key)
                assert file or key in known, f"{page}: {key}"


@pytest.mark.parametrize("page", NAMES)
def test_code_blocks_are_whole(page, text):
    for body in blocks(text[page], "python"):
        ast.parse(body)
    for body in blocks(text[page], "yaml"):
        yaml.safe_load(body)


@pytest.fixture
def reader(tmp_path, monkeypatch, tiny_checkpoint, text):
    """The directory of a reader who has followed the page on manifests, with a checkpoint beside."""
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text(blocks(text["docs/manifest.md"], "jsonl")[0])
    exec(compile(blocks(text["docs/manifest.md"], "python")[0], "manifest.md", "exec"), {})
    Path("rows.jsonl").rename("manifest.jsonl")
    Path("data").mkdir()
    Path("data/rows.jsonl").write_text('{"text": "nothing in here"}\n')
    shutil.copytree(tiny_checkpoint, "CHECKPOINT")
    return tmp_path


@pytest.mark.parametrize("page", ["docs/prevention.md", "docs/guards.md"])
def test_the_commands_of_a_page_run(page, reader, text, command):
    lines = [line for body in blocks(text[page], "sh") for line in body.splitlines() if line]
    assert lines
    for line in lines:
        program, *arguments = shlex.split(line)
        arguments = [
            name for word in arguments for name in (sorted(glob.glob(word)) if "*" in word else [word])
        ]
        done = command(*arguments)
        assert program == "nemo-rl-ext" and done.returncode == 0, (line, done.stdout, done.stderr)


def test_the_run_with_a_reward_function_would_start(reader, text, command):
    Path("rewards.py").write_text(blocks(text["docs/rewards.md"], "python")[0])
    (line,) = blocks(text["docs/rewards.md"], "bash")
    _, *arguments = shlex.split(line)
    inputs = ["policy.model_name=CHECKPOINT", "policy.build_tiny_checkpoint=false", "data.validation=null"]
    inputs += ["data.train.data_path=manifest.jsonl", "data.build_demo_manifest=false"]
    done = command(*arguments, *inputs, "--dry-run")
    assert "nothing was started" in done.stdout, done.stderr
