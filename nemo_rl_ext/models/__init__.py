# SPDX-License-Identifier: Apache-2.0
"""Checkpoints as this package loads and makes them: weights, vision encoding, tokenizer, the tiny model."""
