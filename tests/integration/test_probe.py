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
            "experience/rollouts.py",
            "    _extract_mask_sample_flags()",
            "    ()",
            "does not call _extract_mask_sample_flags directly",
        ),
        (
            "experience/rollouts.py",
            "    _reattach_static_multimodal_payloads_to_result()",
            "    await _reattach_static_multimodal_payloads_to_result()",
            "does not call _reattach_static_multimodal_payloads_to_result directly",
        ),
        (
            "experience/rollouts.py",
            "def _reattach_static",
            "async def _reattach_static",
            "is not a plain function",
        ),
        ("algorithms/grpo.py", "'mask_sample'", "'mask'", "does not use mask_sample"),
        (
            "data/multimodal_utils.py",
            "message(message, images",
            "message(message, device, images",
            r"takes \(message, device, images, .* nothing else without a default",
        ),
        (
            "environments/nemo_gym.py",
            "def spinup_nemo_gym_actor",
            "def spin_up",
            "has no nemo_rl.environments.nemo_gym.spinup",
        ),
        ("environments/nemo_gym.py", "'run_examples'", "'stream'", "does not use run_examples"),
        (
            "environments/nemotron_utils.py",
            "NEMOTRON_VIDEO_PROCESSOR_NAMES",
            "VIDEO",
            "does not have NEMOTRON_VIDEO",
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


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        (
            "experience/rollouts.py",
            "mask_env_flagged_samples)",
            "mask_env_flagged_samples, reward_shaping_config)",
        ),
        ("data/multimodal_utils.py", "pad_dynamic_image_shapes)", "pad_dynamic_image_shapes, device=None)"),
        ("environments/nemo_gym.py", "def spinup_nemo_gym_actor()", "def spinup_nemo_gym_actor(env, more)"),
    ],
    ids=["forwarded by a wrapper", "has a default", "never called here"],
)
def test_an_added_parameter_is_no_reason_to_refuse(nemo_rl_tree, file, old, new):
    change(nemo_rl_tree, file, old, new)
    assert probe(nemo_rl_tree).in_tree == ()


UPSTREAM = {
    "a marker": (
        "experience/rollouts.py",
        "from nemo_rl.data.multimodal_utils import ROLLOUT_MATCHED_MEDIA_KEY\n",
        ("nemo_rl.experience.rollouts uses ROLLOUT_MATCHED_MEDIA_KEY",),
    ),
    "runs handed to the attach function": (
        "environments/nemo_gym.py",
        "def _attach_multimodal_data_to_user_message(message, *, images, placeholder_run_lengths=None): ...\n",
        (
            "nemo_rl.environments.nemo_gym._attach_multimodal_data_to_user_message takes placeholder_run_lengths",
        ),
    ),
}


@pytest.mark.parametrize("shape", UPSTREAM)
def test_alignment_in_the_tree_is_noticed_before_anything_is_compared(nemo_rl_tree, shape):
    file, code, evidence = UPSTREAM[shape]
    path = nemo_rl_tree / file
    # What the hooks know is gone as well.
    path.write_text(code + path.read_text().replace("def _postprocess", "def _other"))
    assert probe(nemo_rl_tree).in_tree == evidence


def test_a_mention_in_text_is_not_code(nemo_rl_tree):
    with (nemo_rl_tree / "experience" / "rollouts.py").open("a") as file:
        file.write('# ROLLOUT_MATCHED_MEDIA_KEY\nNOTE = "ROLLOUT_MATCHED_MEDIA_KEY"\n')
    assert probe(nemo_rl_tree).in_tree == ()


def test_what_upstream_does_beside_is_named(nemo_rl_tree):
    change(
        nemo_rl_tree,
        "experience/rollouts.py",
        "payload(target_message_log, source_message_log)",
        "payload(target_message_log, source_message_log, tokenizer=None)",
    )
    (nemo_rl_tree / "data" / "captured_media.py").write_text("")
    found = probe(nemo_rl_tree)
    assert found.in_tree == () and len(found.beside) == 2
    assert "compares fixed tiles" in found.beside[0] and "single controller" in found.beside[1]


def test_a_release_without_images_says_why(nemo_rl_tree):
    change(
        nemo_rl_tree, "environments/nemo_gym.py", "def _attach_multimodal_data_to_user_message", "def _none"
    )
    with pytest.raises(
        UnknownNemoRLError, match=r"sends no images through NeMo-Gym .*v0\.7\.0.*0\.6\.0 here"
    ):
        probe(nemo_rl_tree)


def test_without_nemo_rl_it_says_where_to_put_it():
    with pytest.raises(UnknownNemoRLError, match="not on the import path"):
        find_root()
