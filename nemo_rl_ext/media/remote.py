# SPDX-License-Identifier: Apache-2.0
"""Fetching media over http(s) without letting a manifest reach the inside of a network.

The host is resolved once, every address it has must be public, and the connection goes to that very address,
so a name that changes its answer between check and use gains nothing. Redirects are followed by hand, each
checked like the first. Proxies from the environment are not used: behind one, nothing could be pinned.
"""

from __future__ import annotations

import contextlib
import http.client
import ipaddress
import socket
import ssl
import threading
import time
from urllib.parse import SplitResult, quote, urljoin, urlsplit

from nemo_rl_ext.media.errors import MediaDecodeError, MediaUnavailableError, describe
from nemo_rl_ext.media.policy import MediaPolicy, check_num_bytes, refused

_MAX_REDIRECTS = 5
_REDIRECTS = (301, 302, 303, 307, 308)
_CHUNK = 1 << 16
_PAUSES = (0.25, 1.0)
# Of IPv6 only this is handed out to the public; special ranges in it are excluded one by one.
_GLOBAL_UNICAST = ipaddress.ip_network("2000::/3")
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_DOCUMENTATION = ipaddress.ip_network("3fff::/20")
# What the URL standard leaves alone in a path and in a query; an escape that is there already stays as it is.
_PATH_SAFE = "/%:@!$&'()*+,;=-._~|[]"
_QUERY_SAFE = _PATH_SAFE.replace("'", "") + "?`{}^\\"


def fetch(url: str, policy: MediaPolicy, *, where: str = "") -> bytes:
    """The body behind a URL; a server that is busy or out of order is asked up to three times.

    Raises `MediaDecodeError`, `MediaUnavailableError` if a later try may do.
    """
    deadline = time.monotonic() + policy.timeout_s
    for pause in _PAUSES:
        try:
            return _fetch(url, deadline, policy, where)
        except MediaUnavailableError as error:
            wait = max(pause, getattr(error, "retry_after_s", 0.0))
            if time.monotonic() + wait >= deadline:
                raise
            time.sleep(wait)
    return _fetch(url, deadline, policy, where)


def quoted(url: str) -> str:
    """A URL as browsers send it: spaces and non-ASCII letters escaped, the host's name in its ASCII form.

    Raises `ValueError` for what is no URL.
    """
    parts = urlsplit(url.strip())
    netloc = parts.netloc
    if not netloc.isascii():
        host = (parts.hostname or "").encode("idna").decode("ascii")
        netloc = netloc.replace(netloc.rpartition("@")[2].partition(":")[0], host)
    return parts._replace(
        netloc=netloc,
        path=quote(parts.path.replace("\\", "/"), safe=_PATH_SAFE),
        query=quote(parts.query, safe=_QUERY_SAFE),
        fragment="",
    ).geturl()


def _fetch(url: str, deadline: float, policy: MediaPolicy, where: str) -> bytes:
    current = url
    for _ in range(_MAX_REDIRECTS + 1):
        parts = _checked(current, url, where)
        address = public_address(parts, policy, where=where)
        response = _request(parts, address, deadline, policy, url, where)
        if isinstance(response, bytes):
            return response
        target = urljoin(current, response)
        if parts.scheme == "https" and urlsplit(target).scheme == "http":
            raise refused(url, where, f"redirected from https to {target!r}", "use the final https address")
        current = target
    raise refused(url, where, f"more than {_MAX_REDIRECTS} redirects", "use the final address")


class _Busy(MediaUnavailableError):
    """The server asks for a pause."""

    def __init__(self, message: str, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


def public_address(parts: SplitResult, policy: MediaPolicy, *, where: str = "") -> str:
    """The address to connect to; refused when the host has any address that is not public."""
    url = parts.geturl()
    host = parts.hostname or ""
    try:
        found = socket.getaddrinfo(host, _port(parts), type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        message = describe("media", url, where, f"host {host!r} does not resolve ({error})", "check the URL")
        raise MediaUnavailableError(message) from None
    addresses = [str(entry[4][0]) for entry in found]
    if not policy.allow_private_addresses:
        for address in addresses:
            if not is_public(address):
                problem = f"host {host!r} resolves to {address}, which is not a public address"
                raise refused(url, where, problem, "set allow_private_addresses if that is meant")
    return addresses[0]


def is_public(address: str) -> bool:
    """Whether an IP address is public; one that embeds an IPv4 address is judged by that."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        embedded = ip.ipv4_mapped or ip.sixtofour or (ip.teredo[1] if ip.teredo else None)
        if embedded is None and ip in _NAT64:
            embedded = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
        if embedded is None:
            return ip.is_global and ip in _GLOBAL_UNICAST and ip not in _DOCUMENTATION
        ip = embedded
    return ip.is_global and not ip.is_multicast


def _port(parts: SplitResult) -> int:
    return parts.port or (443 if parts.scheme == "https" else 80)


def _checked(url: str, first: str, where: str) -> SplitResult:
    try:
        parts = urlsplit(quoted(url))
        parts.port  # noqa: B018  raises on a port that is no number
    except ValueError as error:
        raise refused(first, where, f"not a URL ({error})", "check the URL") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise refused(first, where, f"{url!r} is not an http(s) URL with a host", "check the URL")
    if parts.username is not None or parts.password is not None:
        raise refused(first, where, "the URL carries credentials", "serve it without a login in the URL")
    return parts


def _request(
    parts: SplitResult, address: str, deadline: float, policy: MediaPolicy, url: str, where: str
) -> bytes | str:
    """The body, or the target of a redirect."""
    connection = http.client.HTTPConnection(parts.hostname or "", _port(parts))
    # A socket timeout bounds one read; this one bounds the whole exchange, a slow drip of headers included.
    open_sockets: list[socket.socket] = []
    timer = threading.Timer(_left(deadline), _shut, args=(open_sockets,))
    timer.daemon = True
    try:
        # `HTTPConnection` asks its own resolver; handing it a connected socket is what pins the address.
        sock = socket.create_connection((address, connection.port), timeout=_left(deadline))
        open_sockets.append(sock)
        timer.start()
        if parts.scheme == "https":
            sock = ssl.create_default_context().wrap_socket(
                sock, server_hostname=parts.hostname, do_handshake_on_connect=False
            )
            open_sockets.append(sock)
            sock.do_handshake()
        connection.sock = sock
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        connection.request("GET", path, headers={"Accept-Encoding": "identity", "User-Agent": "nemo-rl-ext"})
        response = connection.getresponse()
        location = response.getheader("Location")
        if response.status in _REDIRECTS and location:
            # Headers arrive as Latin-1; what servers mean is UTF-8 wherever it can be that.
            with contextlib.suppress(UnicodeError):
                return location.encode("latin-1").decode("utf-8")
            return location
        if response.status != 200:
            problem = f"the server answered {response.status}"
            if response.status < 500 and response.status not in (408, 425, 429):
                raise MediaDecodeError(describe("media", url, where, problem, "check the URL"))
            after = response.getheader("Retry-After") or ""
            message = describe("media", url, where, problem, "try again later or fetch fewer at once")
            raise _Busy(message, float(after) if after.isdigit() else 0.0)
        length = response.getheader("Content-Length")
        if length and length.isdigit():
            check_num_bytes(int(length), url, policy, where)
        return _body(response, deadline, policy, url, where)
    except (OSError, http.client.HTTPException, ValueError) as error:
        if isinstance(error, MediaDecodeError):
            raise
        reason = "timed out" if time.monotonic() >= deadline else f"{type(error).__name__}: {error}"
        message = describe("media", url, where, f"fetching failed ({reason})", "try again")
        raise MediaUnavailableError(message) from None
    finally:
        timer.cancel()
        for sock in open_sockets:
            sock.close()
        connection.close()


def _body(
    response: http.client.HTTPResponse, deadline: float, policy: MediaPolicy, url: str, where: str
) -> bytes:
    chunks, total = [], 0
    while chunk := response.read1(_CHUNK):
        total += len(chunk)
        check_num_bytes(total, url, policy, where)
        chunks.append(chunk)
    # `read1` takes a connection cut in the middle, by the deadline too, for the end of the body.
    if time.monotonic() >= deadline:
        raise TimeoutError
    if response.length:
        raise http.client.IncompleteRead(b"", response.length)
    check_num_bytes(total, url, policy, where)
    return b"".join(chunks)


def _left(deadline: float) -> float:
    return max(0.001, deadline - time.monotonic())


def _shut(open_sockets: list[socket.socket]) -> None:
    for sock in open_sockets:
        # A socket that TLS took over is detached: shutting it is an error of no interest.
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
