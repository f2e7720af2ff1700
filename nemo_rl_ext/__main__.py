# SPDX-License-Identifier: Apache-2.0
"""``python -m nemo_rl_ext`` is ``nemo-rl-ext``."""

from nemo_rl_ext.cli import main

if __name__ == "__main__":
    main()
