# SPDX-License-Identifier: Apache-2.0
"""Decode every image of a manifest once, so that a broken file stops a run before it starts."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

from nemo_rl_ext.manifest.loading import MAX_ERRORS, Manifest, ManifestError, RowFault
from nemo_rl_ext.media.errors import MediaDecodeError
from nemo_rl_ext.media.images import load_image


def verify_media(manifest: Manifest) -> None:
    """Decode each distinct image reference, in parallel.

    Raises:
        ManifestError: naming file and line of the first faults.
    """
    first_use = {ref.ref: row for row in reversed(manifest.rows) for ref in row.media_refs() if ref.kind != "video"}

    def fault(ref: str) -> RowFault | None:
        try:
            load_image(ref, manifest.policy, base_dir=manifest.base_dir)
        except MediaDecodeError as error:
            return RowFault(file=str(manifest.path), line=first_use[ref].line, field="", problem=str(error))
        return None

    # Pillow decodes without the interpreter lock.
    with ThreadPoolExecutor(os.cpu_count() or 1) as threads:
        faults = [found for found in threads.map(fault, first_use) if found is not None]
    if faults:
        faults.sort(key=lambda found: found.line)
        listed = "\n".join(f"  {found}" for found in faults[:MAX_ERRORS])
        more = f"\n  ... and {len(faults) - MAX_ERRORS} more" if len(faults) > MAX_ERRORS else ""
        raise ManifestError(f"{manifest.path}: {len(faults)} media files cannot be used:\n{listed}{more}")
