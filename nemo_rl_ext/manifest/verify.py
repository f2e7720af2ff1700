# SPDX-License-Identifier: Apache-2.0
"""Decode every image of a manifest once, and open every clip, so that a broken file stops a run before it starts."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

from nemo_rl_ext.align.wording import counted
from nemo_rl_ext.manifest.loading import MAX_ERRORS, Manifest, ManifestError, RowFault
from nemo_rl_ext.media.errors import MediaDecodeError
from nemo_rl_ext.media.images import load_image
from nemo_rl_ext.media.video import Backend, load_video


def verify_media(manifest: Manifest, *, video_backend: Backend = "opencv") -> None:
    """Decode each distinct image, and the first and last frame of each clip as `video_backend` finds them, in parallel.

    Raises:
        ManifestError: naming file and line of the first faults.
    """
    first_use = {
        (ref.kind == "video", ref.ref): (row, ref)
        for row in reversed(manifest.rows)
        for ref in row.media_refs()
    }

    def fault(key: tuple[bool, str]) -> RowFault | None:
        is_video, ref = key
        row, media = first_use[key]
        try:
            if is_video:
                # A container that overstates its length still gives two frames; only sampling tells that.
                load_video(
                    ref, manifest.policy, num_frames=2, backend=video_backend, base_dir=manifest.base_dir
                )
            else:
                load_image(ref, manifest.policy, base_dir=manifest.base_dir)
        except Exception as error:  # whatever a decoder raises is this row's fault, by name
            problem = (
                str(error) if isinstance(error, MediaDecodeError) else f"{type(error).__name__}: {error}"
            )
            return RowFault(file=str(manifest.path), line=row.line, field=media.field, problem=problem)
        return None

    # Pillow decodes without the interpreter lock, clips are decoded in a child process.
    with ThreadPoolExecutor(os.cpu_count() or 1) as threads:
        faults = [found for found in threads.map(fault, first_use) if found is not None]
    if faults:
        faults.sort(key=lambda found: found.line)
        listed = "\n".join(f"  {found}" for found in faults[:MAX_ERRORS])
        more = f"\n  ... and {len(faults) - MAX_ERRORS} more" if len(faults) > MAX_ERRORS else ""
        raise ManifestError(
            f"{manifest.path}: {counted(len(faults), 'media file')} cannot be used:\n{listed}{more}"
        )
