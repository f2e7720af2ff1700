# SPDX-License-Identifier: Apache-2.0
"""Repeatable measurements with their baselines in the same run: `python -m benchmarks NAME`."""
