# SPDX-License-Identifier: Apache-2.0
"""From prompt groups to weights: batches, the policy, its loss and its step."""
