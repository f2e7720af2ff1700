# SPDX-License-Identifier: Apache-2.0
"""Errors of the aligners. Each carries one string, so that it survives a process hop unchanged."""


class AlignerDiedError(RuntimeError):
    """Infrastructure: actors died under the same work. Trying again may help."""


class AlignerFailedError(RuntimeError):
    """An aligner raised where it never should: a bug or a broken installation. Trying again will not help."""


class MaskedFractionError(ValueError):
    """Too large a share of the rows is masked: a configuration error, not noise."""
