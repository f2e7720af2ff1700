# SPDX-License-Identifier: Apache-2.0
"""Makes `responses_api_agents.second_look` importable however pytest is started."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[3]))
