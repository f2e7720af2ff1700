# SPDX-License-Identifier: Apache-2.0
"""From a media reference of a manifest to bytes, treating the reference as untrusted input."""

from __future__ import annotations

import base64
import binascii
import errno
import os
import re
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO
from urllib.parse import unquote, urlsplit

from nemo_rl_ext.media.errors import MediaDecodeError, MediaUnavailableError, describe
from nemo_rl_ext.media.policy import MediaPolicy, check_num_bytes, refused
from nemo_rl_ext.media.remote import fetch

_SCHEME = re.compile(r"^\s*([A-Za-z][A-Za-z0-9+.\-]*)://")

# Faults of the machine rather than of the path that a manifest names.
_TRANSIENT = {errno.EIO, errno.ESTALE, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ETIMEDOUT, errno.EINTR}


def read_media_bytes(
    ref: str, policy: MediaPolicy, base_dir: Path | None = None, *, where: str = ""
) -> bytes:
    """The encoded bytes behind `ref`: a path, a `file://` URL, a base64 `data:` URL or, if allowed, http(s).

    A relative path is relative to `base_dir`. Raises `MediaDecodeError` for anything that the policy refuses
    or that is not there, `MediaUnavailableError` where trying again may help.
    """
    kind = reference_kind(ref, where=where)
    if kind == "data":
        return _decode_data_url(ref, policy, where)
    if kind == "remote":
        if not policy.allow_remote:
            raise refused(ref, where, "remote media are not allowed", "download it or set allow_remote")
        return fetch(ref, policy, where=where)
    with open_local(ref, policy, base_dir, where=where) as handle:
        return read_opened(handle, ref, policy, where=where)


def read_opened(handle: BinaryIO, ref: str, policy: MediaPolicy, *, where: str = "") -> bytes:
    """All of what `open_local` opened. Raises as `read_media_bytes`."""
    try:
        data = handle.read(policy.max_bytes + 1)
    except OSError as error:
        raise _unreadable(ref, where, error) from None
    check_num_bytes(len(data), ref, policy, where)
    return data


@contextmanager
def open_media(
    ref: str, policy: MediaPolicy, base_dir: Path | None = None, *, where: str = ""
) -> Iterator[BinaryIO]:
    """The file behind `ref`, open: a local one itself, anything else as a file without a name. Raises likewise."""
    if reference_kind(ref, where=where) == "local":
        with open_local(ref, policy, base_dir, where=where) as handle:
            yield handle
        return
    data = read_media_bytes(ref, policy, base_dir, where=where)
    with tempfile.TemporaryFile() as handle:
        handle.write(data)
        handle.seek(0)
        yield handle


def reference_kind(ref: str, *, where: str = "") -> str:
    """`data`, `remote` or `local`; any other scheme is refused."""
    if not isinstance(ref, str) or not ref:
        raise refused(str(ref), where, "the reference is empty", "give a path, a file: URL or a data: URL")
    if ref[:5].lower() == "data:":
        return "data"
    match = _SCHEME.match(ref)
    scheme = match.group(1).lower() if match else "file"
    if scheme in ("http", "https"):
        return "remote"
    if scheme != "file":
        raise refused(
            ref, where, f"scheme {scheme!r} is not supported", "use a path, file://, data: or http(s)://"
        )
    return "local"


def resolve_local(ref: str, policy: MediaPolicy, base_dir: Path | None = None, *, where: str = "") -> Path:
    """The path of a local reference, symbolic links resolved, proven to be a file inside the roots.

    It holds for this moment only: whoever reads the file takes `open_local`, whose file cannot be exchanged.
    """
    return _resolved(ref, policy, base_dir, where)[0]


def open_local(ref: str, policy: MediaPolicy, base_dir: Path | None = None, *, where: str = "") -> BinaryIO:
    """A local reference's file, open for reading: of the opened file it is proven that it lies inside the roots."""
    path, roots = _resolved(ref, policy, base_dir, where)
    try:
        # The path was resolved; a link or a pipe that took its place since then is refused, not followed.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise _unreadable(ref, where, error) from None
    handle = os.fdopen(descriptor, "rb")
    try:
        # A directory on the way may have become a link since then; the kernel knows what was opened in the end.
        opened = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if not any(opened.is_relative_to(root) for root in roots):
            raise refused(ref, where, "another file took its place while it was opened", "leave it alone")
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            found = _file_type(status.st_mode)
            raise refused(ref, where, f"expected a file, found {found}", "name the media file itself")
        check_num_bytes(status.st_size, ref, policy, where)
    except OSError as error:
        handle.close()
        raise _unreadable(ref, where, error) from None
    except MediaDecodeError:
        handle.close()
        raise
    return handle


def _resolved(
    ref: str, policy: MediaPolicy, base_dir: Path | None, where: str
) -> tuple[Path, tuple[Path, ...]]:
    """The resolved path of a file inside the roots, and the resolved roots."""
    path = _local_path(ref, where)
    if not path.is_absolute():
        if base_dir is None:
            raise refused(ref, where, "a relative path without a base directory", "give an absolute path")
        path = Path(base_dir) / path
    roots = policy.roots or ((Path(base_dir),) if base_dir is not None else ())
    if not roots:
        raise refused(ref, where, "no directory is open for local media", "set roots in the media policy")
    try:
        resolved, real_roots = path.resolve(), tuple(Path(root).resolve() for root in roots)
        inside = any(resolved.is_relative_to(root) for root in real_roots)
        # The file is looked at only if it is inside: the answer tells nothing about what exists elsewhere.
        mode = resolved.stat().st_mode if inside else 0
    except FileNotFoundError:
        raise refused(ref, where, "no such file", "check the path or restore the file") from None
    except (OSError, ValueError, RuntimeError) as error:
        raise _unreadable(ref, where, error) from None
    if not inside:
        listed = ", ".join(str(root) for root in roots)
        raise refused(ref, where, f"it lies outside the media roots ({listed})", "move it or add its root")
    if not stat.S_ISREG(mode):
        raise refused(ref, where, f"expected a file, found {_file_type(mode)}", "name the media file itself")
    return resolved, real_roots


def _local_path(ref: str, where: str) -> Path:
    if not _SCHEME.match(ref):
        return Path(ref)
    parts = urlsplit(ref)
    if parts.netloc not in ("", "localhost"):
        raise refused(ref, where, f"a file URL on host {parts.netloc!r}", "use file:///absolute/path")
    if parts.query or parts.fragment:
        raise refused(ref, where, "a file URL with a query or fragment", "percent-encode '?' and '#'")
    return Path(unquote(parts.path))


def _decode_data_url(ref: str, policy: MediaPolicy, where: str) -> bytes:
    # RFC 2397; only base64, as in vllm/multimodal/media/connector.py.
    header, comma, payload = ref[5:].partition(",")
    if not comma or header.rpartition(";")[2] != "base64":
        raise refused(ref, where, "not a base64 data URL", "write it as data:TYPE;base64,PAYLOAD")
    check_num_bytes(len(payload) * 3 // 4, ref, policy, where)
    try:
        return base64.b64decode(payload, validate=True)
    except (binascii.Error, ValueError) as error:
        raise refused(ref, where, f"the base64 payload is broken ({error})", "encode it again") from None


def _file_type(mode: int) -> str:
    names = {
        stat.S_ISDIR: "a directory",
        stat.S_ISFIFO: "a named pipe",
        stat.S_ISSOCK: "a socket",
        stat.S_ISCHR: "a character device",
        stat.S_ISBLK: "a block device",
    }
    return next((name for test, name in names.items() if test(mode)), "something else")


def _unreadable(ref: str, where: str, error: Exception) -> MediaDecodeError:
    transient = isinstance(error, OSError) and error.errno in _TRANSIENT
    kind = MediaUnavailableError if transient else MediaDecodeError
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    advice = "try again" if transient else "check the path and its permissions"
    return kind(describe("media", ref, where, f"it cannot be read ({reason})", advice))
