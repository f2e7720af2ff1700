# SPDX-License-Identifier: Apache-2.0
"""The rollout engine: vLLM in a Ray actor, its requests, its client and its endpoint."""
