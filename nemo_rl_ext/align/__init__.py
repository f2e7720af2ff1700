# SPDX-License-Identifier: Apache-2.0
"""The core: placeholder runs, patch grids, pixels and verdicts. Knows neither Ray nor NeMo-RL."""
