# SPDX-License-Identifier: Apache-2.0
"""Keep what a VLM policy trains on equal to what it saw while it generated."""

__version__ = "0.1.0"
