# SPDX-License-Identifier: Apache-2.0
"""Model families: each one knows its token grammar, its tiler and its tensor layout."""
