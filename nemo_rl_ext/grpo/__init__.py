# SPDX-License-Identifier: Apache-2.0
"""The embedded asynchronous GRPO run."""
