# SPDX-License-Identifier: Apache-2.0
"""The probe over the history and the branches of a full clone of NeMo-RL; prints what it says of each."""

import functools
import os
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from nemo_rl_ext.integration.probe import UnknownNemoRLError, probe
from nemo_rl_ext.integration.upstream_contract import ATTACHING, KNOWN_COMMIT, NAMES, TARGETS

CLONE = os.environ.get("NEMO_RL_CLONE", "")
MODULES = sorted(
    {target.module for target in TARGETS}
    | {module for module, _ in ATTACHING}
    | {*NAMES, "nemo_rl.package_info", "nemo_rl.data.captured_media"}
)
NUM_BRANCHES = 60
FIRST = "7571a7d5a"
"""The commit of 20 August 2026 that gave NeMo-Gym's rollouts static video, and with it the last of the seams."""


def git(*arguments):
    return subprocess.run(["git", "-C", CLONE, *arguments], capture_output=True, text=True)


pytestmark = pytest.mark.skipif(
    not CLONE or git("cat-file", "-e", "v0.7.0^{commit}").returncode != 0,
    reason="no full clone of NeMo-RL with its tags: NEMO_RL_CLONE names one",
)


@functools.cache
def judged(blobs):
    """The probe's answer for a set of (path, blob) pairs."""
    import tempfile

    with tempfile.TemporaryDirectory() as directory:
        for path, blob in blobs:
            target = Path(directory, path)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(git("cat-file", "blob", blob).stdout, encoding="utf-8")
        try:
            found = probe(Path(directory, "nemo_rl"))
        except UnknownNemoRLError as error:
            return "refused", str(error).replace(f"{directory}/", "")
        return ("stands aside", "; ".join(found.in_tree)) if found.in_tree else ("accepted", "")


def answer(revision):
    names = [module.replace(".", "/") for module in MODULES]
    paths = [f"{name}{end}" for name in names for end in (".py", "/__init__.py")]
    listed = git("ls-tree", revision, "--", *paths).stdout.splitlines()
    return judged(tuple((line.split("\t")[1], line.split()[2]) for line in listed))


def show(title, answers):
    print(f"\n{title}: {dict(Counter(kind for kind, _ in answers.values()))}")
    for revision, (kind, reason) in answers.items():
        print(f"  {revision:60.60}  {kind:12}  {reason[:150]}")


def test_releases_are_refused_because_they_send_no_images():
    answers = {tag: answer(tag) for tag in ("v0.4.0", "v0.5.0", "v0.6.0", "v0.7.0")}
    show("releases", answers)
    assert all(
        kind == "refused" and "sends no images through NeMo-Gym" in reason
        for kind, reason in answers.values()
    )


def test_main_is_accepted_from_the_first_commit_that_has_the_seams():
    commits = git("log", "--first-parent", "--format=%h %cs", "-60", KNOWN_COMMIT).stdout.split("\n")
    answers = {line: answer(line.split()[0]) for line in commits if line}
    show("main", answers)
    kinds = [kind for kind, _ in answers.values()]
    first = next(index for index, line in enumerate(answers) if line.startswith(FIRST))
    assert set(kinds[: first + 1]) == {"accepted"} and set(kinds[first + 1 :]) == {"refused"}


def test_no_branch_is_refused_for_an_added_parameter():
    listed = git(
        "for-each-ref",
        "--sort=-committerdate",
        "--format=%(refname)",
        f"--count={NUM_BRANCHES}",
        "refs/heads",
    ).stdout.split()
    answers = {branch: answer(branch) for branch in listed}
    show("branches", answers)
    assert not [reason for _, reason in answers.values() if " takes (" in reason]
