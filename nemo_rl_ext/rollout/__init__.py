# SPDX-License-Identifier: Apache-2.0
"""Alignment over Ray: aligner actors, message logs, provenance and metrics."""
