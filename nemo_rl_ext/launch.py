# SPDX-License-Identifier: Apache-2.0
"""``python -m nemo_rl_ext.launch SCRIPT ...`` is ``nemo-rl-ext launch SCRIPT ...``, and a path for launch scripts."""

from nemo_rl_ext.integration.launch import main

if __name__ == "__main__":
    main()
