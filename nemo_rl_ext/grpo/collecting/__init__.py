# SPDX-License-Identifier: Apache-2.0
"""From manifest rows to prompt groups of aligned rollouts, ahead of training."""
