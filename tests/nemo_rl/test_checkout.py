# SPDX-License-Identifier: Apache-2.0
"""Says why the rest of this directory is missing where it is; collected everywhere, imports nothing."""

from importlib.util import find_spec

import pytest


@pytest.mark.skipif(
    find_spec("nemo_rl") is None,
    reason="NeMo-RL is not on the import path; `make test-nemo-rl NEMO_RL=/path/to/RL` runs all of tests/nemo_rl",
)
def test_the_hooks_know_this_checkout():
    from nemo_rl_ext.integration.probe import probe

    assert not probe().in_tree
