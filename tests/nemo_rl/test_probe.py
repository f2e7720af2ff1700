# SPDX-License-Identifier: Apache-2.0
"""The probe accepts the checkout that the hooks know, and names the first difference of any other."""

import shutil

import pytest

from nemo_rl_ext.integration.probe import UnknownNemoRLError, find_root, probe
from nemo_rl_ext.integration.upstream_contract import KNOWN_COMMIT, NAMES, TARGETS


@pytest.fixture
def other(tmp_path):
    """A copy of the probed files that a test may change."""
    root = tmp_path / "nemo_rl"
    for module in {target.module for target in TARGETS} | {*NAMES, "nemo_rl.package_info"}:
        relative = "/".join(module.split(".")[1:])
        relative += "/__init__.py" if (find_root() / relative).is_dir() else ".py"
        (root / relative).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(find_root() / relative, root / relative)
    return root


def change(root, file, old, new):
    path = root / file
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_this_checkout_is_known(other):
    assert probe().root == find_root()
    assert probe(other).version == probe().version
    assert not probe(other).in_tree


@pytest.mark.parametrize(
    ("file", "old", "new", "named"),
    [
        (
            "experience/rollouts.py",
            "def _reattach_static_multimodal_payloads_to_result(\n    result:",
            "def _reattach_static_multimodal_payloads_to_result(\n    rollout:",
            r"takes \(rollout, source_message_log\), expected \(result, source_message_log\)",
        ),
        (
            "environments/nemo_gym.py",
            "def spinup_nemo_gym_actor(",
            "def spin_up_gym(",
            "has no nemo_rl.environments.nemo_gym.spinup_nemo_gym_actor, which driver needs",
        ),
        (
            "environments/nemo_gym.py",
            "self.rch.run_examples(",
            "self.rch.stream(",
            "NemoGym.run_rollouts in .* does not use run_examples",
        ),
        (
            "environments/nemotron_utils.py",
            "NEMOTRON_VIDEO_PROCESSOR_NAMES",
            "VIDEO_PROCESSORS",
            "nemo_rl.environments.nemotron_utils in .* does not have NEMOTRON_VIDEO_PROCESSOR_NAMES",
        ),
        (
            "experience/rollout_manager.py",
            "attach_static_multimodal_payload(",
            "attach_payload(",
            "AsyncNemoGymRolloutImpl.run_rollout in .* does not use attach_static_multimodal_payload",
        ),
    ],
)
def test_another_nemo_rl_is_refused_in_one_sentence(other, file, old, new, named):
    change(other, file, old, new)
    with pytest.raises(UnknownNemoRLError, match=named) as refusal:
        probe(other)
    assert KNOWN_COMMIT in str(refusal.value) and "remove grpo.media_alignment" in str(refusal.value)


def test_a_missing_file_is_named(other):
    (other / "experience" / "rollouts.py").unlink()
    with pytest.raises(UnknownNemoRLError, match=r"no nemo_rl/experience/rollouts\.py"):
        probe(other)


def test_behaviour_in_the_tree_is_noticed(other):
    change(
        other,
        "experience/rollouts.py",
        "TokenizerType = ",
        'ROLLOUT_MATCHED_MEDIA_KEY = "x"\nTokenizerType = ',
    )
    assert probe(other).in_tree == ("nemo_rl.experience.rollouts uses ROLLOUT_MATCHED_MEDIA_KEY",)


def test_an_added_keyword_is_passed_on(other):
    change(
        other,
        "experience/rollouts.py",
        "    mask_env_flagged_samples: bool = True,\n",
        "    mask_env_flagged_samples: bool = True,\n    reward_shaping_config: dict | None = None,\n",
    )
    assert not probe(other).in_tree
