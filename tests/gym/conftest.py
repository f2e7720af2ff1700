# SPDX-License-Identifier: Apache-2.0
"""The resources servers live outside the package, in Gym's own layout."""

import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.append(str(REPOSITORY / "gym_resources"))
