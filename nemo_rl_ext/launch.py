# SPDX-License-Identifier: Apache-2.0
"""``python -m nemo_rl_ext.launch SCRIPT ...`` is ``nemo-rl-ext launch SCRIPT ...``, and a path for launch scripts."""

import sys
from pathlib import Path

if __name__ == "__main__" and Path(sys.path[0]).resolve() == Path(__file__).resolve().parent:
    # Run by its path: the rooms of this package must not hide modules of other names, and the package must be found.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from nemo_rl_ext.integration.launch import main

if __name__ == "__main__":
    main()
