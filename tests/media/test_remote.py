# SPDX-License-Identifier: Apache-2.0
"""Remote media against a real HTTP server on this machine."""

import http.server
import pickle
import threading
from dataclasses import replace

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
        elif self.path.startswith("/busy/"):
            _, _, status, times = self.path.split("/")
            self.server.asked += 1
            busy = self.server.asked <= int(times)
            self.send_response(int(status) if busy else 200)
            if busy and status == "429":
                self.send_header("Retry-After", "1")
            self.end_headers()
            self.wfile.write(b"" if busy else b"at last")
        elif self.path == "/to-a-name":
            self.send_response(302)
            # As servers write it that do not escape: UTF-8 in a header.
            self.send_header("Location", "/m\u00fc ller/\u56fe.png?q=\u00e9 1".encode().decode("latin-1"))
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
        httpd.stop, httpd.hosts, httpd.asked = threading.Event(), [], 0
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


@pytest.mark.parametrize("status, times", [(503, 1), (503, 2), (429, 1), (500, 1)])
def test_a_busy_server_is_asked_again(server, status, times):
    assert read_media_bytes(f"{server.url}/busy/{status}/{times}", HERE) == b"at last"
    assert server.asked == times + 1


def test_a_server_that_stays_busy_is_named(server):
    with pytest.raises(MediaUnavailableError, match="answered 503; try again later") as caught:
        read_media_bytes(f"{server.url}/busy/503/9", HERE, where="train.jsonl:3")
    assert server.asked == 3 and "train.jsonl:3" in str(caught.value)
    copy = pickle.loads(pickle.dumps(caught.value))
    assert copy.args == caught.value.args and copy.infrastructure
    with pytest.raises(MediaUnavailableError, match="answered 429"):
        read_media_bytes(f"{server.url}/busy/429/9", replace(HERE, timeout_s=0.5))
    with pytest.raises(MediaDecodeError, match="answered 404; check the URL"):
        read_media_bytes(f"{server.url}/status/404", HERE)


@pytest.mark.parametrize(
    "url, sent",
    [
        ("/a b.png", "/a%20b.png"),
        ("/m\u00fcller/\u56fe.png", "/m%C3%BCller/%E5%9B%BE.png"),
        ("/a%20b%2Fc.png", "/a%20b%2Fc.png"),
        ("/100%.png", "/100%.png"),
        ('/q?text=\u00e9 "1"&b=a%20b+c', "/q?text=%C3%A9%20%221%22&b=a%20b+c"),
        ("/a\\b.png", "/a/b.png"),
        ("/{x}|[y]", "/%7Bx%7D|[y]"),
        ("/a\nb", "/ab"),
    ],
)
def test_urls_are_quoted_as_browsers_do(server, url, sent):
    assert read_media_bytes(server.url + url, HERE) == b"body of " + sent.encode()
    assert read_media_bytes(f" {server.url}{url} ", HERE) == b"body of " + sent.encode()


def test_redirects_are_quoted_likewise(server):
    assert (
        read_media_bytes(f"{server.url}/to-a-name", HERE)
        == b"body of /m%C3%BC%20ller/%E5%9B%BE.png?q=%C3%A9%201"
    )


def test_a_hosts_name_is_sent_in_its_ascii_form():
    assert (
        remote.quoted("https://m\u00fcnchen.example:8443/\u00e4?x#y")
        == "https://xn--mnchen-3ya.example:8443/%C3%A4?x"
    )
    with pytest.raises(MediaUnavailableError, match="does not resolve"):
        read_media_bytes("http://m\u00fcnchen.invalid/a.png", replace(HERE, timeout_s=2))


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
        ("2002:808:808::", True),
        ("64:ff9b::808:808", True),
        # NAT64 prefixes of a network's own, site-local addresses, IPv4 in IPv6 of old, and other special ranges.
        ("64:ff9b:1::a00:1", False),
        ("64:ff9b:1::808:808", False),
        ("fec0::1", False),
        ("::7f00:1", False),
        ("::10.0.0.1", False),
        ("::ffff:0:10.0.0.1", False),
        ("100::1", False),
        ("5f00::1", False),
        ("4000::1", False),
        ("2001:db8::1", False),
        ("3fff::1", False),
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
