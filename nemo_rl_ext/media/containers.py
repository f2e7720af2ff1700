# SPDX-License-Identifier: Apache-2.0
"""Whether a clip holds its own media: judged by its content, never by its name.

Playlists and manifests (HLS, DASH, ffconcat, IMF, SDP, ...) make a decoder open the files and addresses that they name,
past every root and every check of a network. Only containers known to hold their media are decoded.
"""

from __future__ import annotations

import re

HEAD_BYTES = 1 << 20
"""How much of a file FFmpeg looks at to guess its format (PROBE_BUF_MAX)."""

_ISO_BOXES = (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip", b"pnot", b"styp", b"moof")
_MAGIC = (
    b"\x1a\x45\xdf\xa3",  # Matroska, WebM
    b"\x30\x26\xb2\x75\x8e\x66\xcf\x11",  # ASF, WMV
    b"\x00\x00\x01",  # MPEG program streams, raw MPEG video, H.264, HEVC
    b"\x00\x00\x00\x01",
    b"\x06\x0e\x2b\x34",  # MXF
    b"\x89PNG\r\n\x1a\n",  # animated PNG
    b"\xff\xd8\xff",  # motion JPEG
    b"\x1f\x07\x00",  # DV
    b"FLV",
    b"OggS",
    b"GIF8",
    b"RIFF",
    b"DKIF",
    b".RMF",
    b"YUV4MPEG2 ",
    b"nut/multimedia container\x00",
)
_TS_PACKETS = ((188, 0), (192, 4), (204, 0))
_REFERRING = (
    (re.compile(rb"\s*#EXTM3U"), "an HLS playlist"),
    (re.compile(rb"\s*ffconcat"), "an ffconcat list"),
    (re.compile(rb"(?is).*<MPD\b.*dash:profile"), "a DASH manifest"),
    (re.compile(rb"(?is)\s*(<\?xml.*)?<MPD\b"), "a DASH manifest"),
    (re.compile(rb"(?s).*<CompositionPlaylist"), "an IMF playlist"),
    (re.compile(rb"(?is)\s*(<\?xml.*)?<(smil|playlist|asx|svg)\b"), "a document that names other files"),
    (re.compile(rb"\s*\[playlist\]"), "a playlist"),
    (re.compile(rb"v=0\s+o="), "an SDP description"),
)


def container_problem(head: bytes) -> str:
    """Why a file that starts like this is not decoded as a clip; empty when it holds its own media."""
    for pattern, name in _REFERRING:
        if pattern.match(head):
            return f"it is {name}, which refers to other files; name the clip itself"
    if head[4:8] in _ISO_BOXES or head.startswith(_MAGIC) or _is_transport_stream(head):
        return ""
    return f"no known container starts with {head[:8]!r}"


def _is_transport_stream(head: bytes) -> bool:
    """Sync bytes at the distance of packets, wherever the first packet begins."""
    for length, offset in _TS_PACKETS:
        for first in range(min(length, len(head))):
            places = range(first + offset, len(head), length)[:5]
            if len(places) > 1 and all(head[place] == 0x47 for place in places):
                return True
    return False
