# SPDX-License-Identifier: Apache-2.0
"""Remote media against a real HTTP server on this machine."""

import http.server
import threading

import pytest

from nemo_rl_ext.media import remote
from nemo_rl_ext.media.errors import MediaDecodeError, MediaUnavailableError
from nemo_rl_ext.media.policy import MediaPolicy
from nemo_rl_ext.media.sources import read_media_bytes

HERE = MediaPolicy(allow_remote=True, allow_private_addresses=True, timeout_s=10, max_bytes=1000)


class _Pages(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.server.hosts.append(self.headers["Host"])
        if self.path.startswith("/to?"):
            self.send_response(302)
            self.send_header("Location", self.path[4:])
            self.end_headers()
        elif self.path == "/loop":
            self.send_response(301)
            self.send_header("Location", "/loop")
            self.end_headers()
        elif self.path.startswith("/status/"):
            self.send_response(int(self.path[8:]))
            self.end_headers()
        elif self.path == "/big":
            self.send_response(200)
            self.end_headers()
            for _ in range(100):
                self.wfile.write(b"x" * 100)
        elif self.path == "/short":
            self.send_response(200)
            self.send_header("Content-Length", "50")
            self.end_headers()
            self.wfile.write(b"x" * 10)
        elif self.path == "/drip":
            self.wfile.write(b"HTTP/1.1 200 OK\r\nX-Slow: ")
            while not self.server.stop.wait(0.02):
                self.wfile.write(b"x")
        else:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"body of " + self.path.encode())

    def log_message(self, *args):
        pass


@pytest.fixture
def server():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Pages) as httpd:
        httpd.stop, httpd.hosts = threading.Event(), []
        httpd.handle_error = lambda *args: None  # clients that hang up are the point of some tests
        thread = threading.Thread(target=httpd.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        httpd.url = f"http://127.0.0.1:{httpd.server_port}"
        yield httpd
        httpd.stop.set()
        httpd.shutdown()
        thread.join()


def test_fetches_the_body(server):
    assert read_media_bytes(server.url + "/a?b=1#fragment", HERE) == b"body of /a?b=1"


def test_remote_and_private_are_off_by_default(server):
    with pytest.raises(MediaDecodeError, match="not allowed"):
        read_media_bytes(server.url, MediaPolicy())
    with pytest.raises(MediaDecodeError, match="127.0.0.1, which is not a public address"):
        read_media_bytes(server.url, MediaPolicy(allow_remote=True))
    with pytest.raises(MediaDecodeError, match="not a public address"):
        read_media_bytes(f"http://localhost:{server.server_port}", MediaPolicy(allow_remote=True))
    assert not server.hosts


@pytest.mark.parametrize(
    "address, public",
    [
        ("8.8.8.8", True),
        ("2606:4700:4700::1111", True),
        ("127.0.0.1", False),
        ("10.1.2.3", False),
        ("172.16.0.1", False),
        ("192.168.1.1", False),
        ("100.64.0.1", False),
        ("169.254.169.254", False),
        ("0.0.0.0", False),
        ("224.0.0.1", False),
        ("255.255.255.255", False),
        ("::1", False),
        ("::", False),
        ("fe80::1%eth0", False),
        ("fc00::1", False),
        ("ff02::1", False),
        ("::ffff:127.0.0.1", False),
        ("::ffff:8.8.8.8", True),
        ("64:ff9b::7f00:1", False),
        ("2002:7f00:1::", False),
    ],
)
def test_public_addresses(address, public):
    assert remote.is_public(address) is public


def test_every_address_of_a_host_must_be_public(monkeypatch):
    answers = [(2, 1, 6, "", ("8.8.8.8", 80)), (2, 1, 6, "", ("10.0.0.1", 80))]
    monkeypatch.setattr(remote.socket, "getaddrinfo", lambda *args, **kwargs: answers)
    with pytest.raises(MediaDecodeError, match="10.0.0.1"):
        read_media_bytes("http://rebinding.example/a.png", MediaPolicy(allow_remote=True))


def test_the_checked_address_is_the_one_that_is_used(server, monkeypatch):
    """A name that resolves elsewhere on the second question gains nothing: there is no second question."""
    questions, resolve = [], remote.socket.getaddrinfo

    def answers_once(host, *args, **kwargs):
        if host != "media.example":
            return resolve(host, *args, **kwargs)
        questions.append(host)
        target = "127.0.0.1" if len(questions) == 1 else "192.0.2.1"
        return resolve(target, *args, **kwargs)

    monkeypatch.setattr(remote.socket, "getaddrinfo", answers_once)
    body = read_media_bytes(f"http://media.example:{server.server_port}/pinned", HERE)
    assert body == b"body of /pinned" and questions == ["media.example"]
    assert server.hosts == [f"media.example:{server.server_port}"]


def test_redirects_are_followed_and_checked_again(server, monkeypatch):
    assert read_media_bytes(server.url + "/to?/next", HERE) == b"body of /next"
    monkeypatch.setattr(remote, "is_public", lambda address: address == "127.0.0.1")
    strict = MediaPolicy(allow_remote=True)
    with pytest.raises(MediaDecodeError, match="169.254.169.254, which is not a public address"):
        read_media_bytes(server.url + "/to?http://169.254.169.254/latest", strict)
    with pytest.raises(MediaDecodeError, match="not an http"):
        read_media_bytes(server.url + "/to?file:///etc/hostname", strict)
    with pytest.raises(MediaDecodeError, match="redirects"):
        read_media_bytes(server.url + "/loop", HERE)


@pytest.mark.parametrize("status, retry", [(404, False), (403, False), (408, True), (429, True), (503, True)])
def test_status_says_whether_to_try_again(server, status, retry):
    with pytest.raises(MediaDecodeError, match=str(status)) as caught:
        read_media_bytes(f"{server.url}/status/{status}", HERE)
    assert caught.value.infrastructure is retry


def test_limits_hold_while_streaming(server):
    with pytest.raises(MediaDecodeError, match="over the limit of 1000"):
        read_media_bytes(server.url + "/big", HERE)
    with pytest.raises(MediaUnavailableError, match="IncompleteRead"):
        read_media_bytes(server.url + "/short", HERE)


def test_a_slow_drip_of_headers_ends_at_the_deadline(server):
    """Every single read is quick; without a deadline for the whole exchange this would never end."""
    policy = MediaPolicy(allow_remote=True, allow_private_addresses=True, timeout_s=0.3)
    with pytest.raises(MediaUnavailableError, match="timed out"):
        read_media_bytes(server.url + "/drip", policy)


@pytest.mark.parametrize(
    "url, problem",
    [
        ("http://user:secret@127.0.0.1/", "credentials"),
        ("http:///nohost", "with a host"),
        ("http://127.0.0.1:port/", "not a URL"),
        ("http://127.0.0.1:1/", "fetching failed"),
        ("http://no-such-host.invalid/", "does not resolve"),
    ],
)
def test_hopeless_urls(url, problem):
    with pytest.raises(MediaDecodeError, match=problem):
        read_media_bytes(url, HERE)
