# SPDX-License-Identifier: Apache-2.0
"""The probe over source text that fulfils the contract, and over text that no longer does."""

import pytest

from nemo_rl_ext.integration.probe import UnknownNemoRLError, find_root, probe
from nemo_rl_ext.integration.upstream_contract import KNOWN_COMMIT


def change(root, file, old, new):
    path = root / file
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_what_the_contract_says_is_accepted(nemo_rl_tree):
    found = probe(nemo_rl_tree)
    assert (found.root, found.version, found.in_tree) == (nemo_rl_tree, "0.6.0", ())


@pytest.mark.parametrize(
    ("file", "old", "new", "named"),
    [
        (
            "experience/rollouts.py",
            "_reattach_static_multimodal_payloads_to_result(result",
            "_reattach_static_multimodal_payloads_to_result(rollout",
            "takes",
        ),
        (
            "environments/nemo_gym.py",
            "def spinup_nemo_gym_actor",
            "def spin_up",
            "has no nemo_rl.environments.nemo_gym.spinup",
        ),
        ("environments/nemo_gym.py", "'run_examples'", "'stream'", "no longer uses run_examples"),
        (
            "environments/nemotron_utils.py",
            "NEMOTRON_VIDEO_PROCESSOR_NAMES",
            "VIDEO",
            "no longer has NEMOTRON_VIDEO",
        ),
        (
            "environments/nemo_gym.py",
            "class NemoGym:",
            "class Gym:",
            "has no nemo_rl.environments.nemo_gym.NemoGym",
        ),
    ],
)
def test_anything_else_is_refused_in_one_sentence(nemo_rl_tree, file, old, new, named):
    change(nemo_rl_tree, file, old, new)
    with pytest.raises(UnknownNemoRLError, match=named) as refusal:
        probe(nemo_rl_tree)
    assert KNOWN_COMMIT in str(refusal.value) and "remove grpo.media_alignment" in str(refusal.value)


def test_without_nemo_rl_it_says_where_to_put_it():
    with pytest.raises(UnknownNemoRLError, match="not on the import path"):
        find_root()
