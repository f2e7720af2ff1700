# SPDX-License-Identifier: Apache-2.0
"""Decoding that gives the training side the very pixels the engine saw."""
