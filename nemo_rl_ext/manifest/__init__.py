# SPDX-License-Identifier: Apache-2.0
"""Mixed image, video and text rows: their model, loading, checking, and the demo's own."""
