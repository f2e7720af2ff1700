# SPDX-License-Identifier: Apache-2.0
"""References reach what the policy allows, and nothing else."""

import base64
import os
import socket
import stat

import pytest

from nemo_rl_ext.media.errors import MediaDecodeError, MediaUnavailableError
from nemo_rl_ext.media.policy import MediaPolicy
from nemo_rl_ext.media.sources import read_media_bytes, resolve_local


@pytest.fixture
def root(tmp_path):
    """`tmp_path/media` with `a.bin`, beside a `secret.bin` that lies outside."""
    media = tmp_path / "media"
    (media / "sub dir").mkdir(parents=True)
    (media / "a.bin").write_bytes(b"alpha")
    (media / "sub dir" / "b#1.bin").write_bytes(b"beta")
    (tmp_path / "secret.bin").write_bytes(b"secret")
    return media


def refusal(ref, policy, base_dir=None):
    with pytest.raises(MediaDecodeError) as caught:
        read_media_bytes(ref, policy, base_dir, where="rows.jsonl:2")
    assert "rows.jsonl:2" in str(caught.value)
    return str(caught.value)


def test_paths_and_urls(root):
    policy = MediaPolicy()
    assert read_media_bytes("a.bin", policy, root) == b"alpha"
    assert read_media_bytes("./sub dir/../a.bin", policy, root) == b"alpha"
    assert read_media_bytes(str(root / "a.bin"), policy, root) == b"alpha"
    assert read_media_bytes(f"file://{root}/a.bin", policy, root) == b"alpha"
    assert read_media_bytes(f"file://localhost{root}/sub%20dir/b%231.bin", policy, root) == b"beta"
    url = "data:image/png;base64," + base64.b64encode(b"gamma").decode()
    assert read_media_bytes(url, policy) == b"gamma"


def test_the_base_directory_is_the_only_root_by_default(root):
    assert "outside the media roots" in refusal("../secret.bin", MediaPolicy(), root)
    assert "outside the media roots" in refusal(str(root.parent / "secret.bin"), MediaPolicy(), root)
    assert "outside the media roots" in refusal("../no-such-file.bin", MediaPolicy(), root)
    assert "no directory is open" in refusal(str(root / "a.bin"), MediaPolicy())
    assert "relative path" in refusal("a.bin", MediaPolicy(roots=(root,)))


def test_roots_replace_the_base_directory(root):
    policy = MediaPolicy(roots=(root / "sub dir",))
    assert read_media_bytes("sub dir/b#1.bin", policy, root) == b"beta"
    assert "outside the media roots" in refusal("a.bin", policy, root)
    wide = MediaPolicy(roots=(root, root.parent))
    assert read_media_bytes("../secret.bin", wide, root) == b"secret"


def test_links_count_where_they_lead(root):
    (root / "link.bin").symlink_to(root.parent / "secret.bin")
    (root / "inner.bin").symlink_to("a.bin")
    (root / "up").symlink_to(root.parent)
    (root / "loop").symlink_to("loop")
    assert "outside the media roots" in refusal("link.bin", MediaPolicy(), root)
    assert "outside the media roots" in refusal("up/secret.bin", MediaPolicy(), root)
    assert read_media_bytes("inner.bin", MediaPolicy(), root) == b"alpha"
    assert "cannot be read" in refusal("loop", MediaPolicy(), root)
    alias = root.parent / "alias"
    alias.symlink_to(root)
    assert read_media_bytes("a.bin", MediaPolicy(roots=(alias,)), alias) == b"alpha"


def test_only_regular_files(root):
    os.mkfifo(root / "pipe")
    with socket.socket(socket.AF_UNIX) as server:
        here = os.getcwd()
        os.chdir(root)
        try:
            server.bind("sock")
        finally:
            os.chdir(here)
        assert "a named pipe" in refusal("pipe", MediaPolicy(), root)
        assert "a socket" in refusal("sock", MediaPolicy(), root)
        assert "a directory" in refusal("sub dir", MediaPolicy(), root)
        assert "a character device" in refusal("/dev/zero", MediaPolicy(roots=(root, "/dev")), root)


@pytest.mark.parametrize(
    "ref, problem",
    [
        ("", "empty"),
        ("missing.bin", "no such file"),
        ("a.bin/x", "cannot be read"),
        ("x" * 5000, "cannot be read"),
        ("nul\0.bin", "cannot be read"),
        ("ftp://host/a.bin", "scheme 'ftp'"),
        ("s3://bucket/a.bin", "scheme 's3'"),
        ("file://otherhost/a.bin", "on host"),
        ("file:///a.bin?x=1", "percent-encode"),
        ("http://example.com/a.bin", "remote media are not allowed"),
        ("HTTPS://example.com/a.bin", "remote media are not allowed"),
        ("data:image/png,plain", "not a base64 data URL"),
        ("data:image/png;base64", "not a base64 data URL"),
        ("data:image/png;base64,@@@@", "payload is broken"),
        ("data:image/png;base64,", "no bytes"),
    ],
)
def test_refusals_say_why(root, ref, problem):
    message = refusal(ref, MediaPolicy(), root)
    assert problem in message and len(message) < 500


def test_a_data_url_is_not_printed_in_full():
    message = refusal("data:image/png;base64," + "@" * 100_000, MediaPolicy())
    assert len(message) < 300 and "100022 characters" in message


def test_byte_limit(root):
    tight = MediaPolicy(max_bytes=4)
    assert "5 bytes, over the limit of 4" in refusal("a.bin", tight, root)
    assert "over the limit of 4" in refusal("data:;base64," + base64.b64encode(b"12345").decode(), tight)
    assert read_media_bytes("sub dir/b#1.bin", tight, root) == b"beta"


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_an_unreadable_file(root):
    (root / "a.bin").chmod(0)
    assert "Permission denied" in refusal("a.bin", MediaPolicy(), root)
    (root / "a.bin").chmod(stat.S_IRUSR)


def test_a_fault_of_the_machine_is_told_apart(root, monkeypatch):
    def out_of_files(*args, **kwargs):
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "open", out_of_files)
    with pytest.raises(MediaUnavailableError, match="Too many open files") as caught:
        read_media_bytes("a.bin", MediaPolicy(), root)
    assert caught.value.infrastructure


def test_resolve_local_returns_the_real_path(root):
    (root / "inner.bin").symlink_to("a.bin")
    assert resolve_local("inner.bin", MediaPolicy(), root) == (root / "a.bin").resolve()


@pytest.mark.parametrize("field", ["max_pixels", "max_bytes", "timeout_s"])
def test_a_limit_must_be_positive(field):
    with pytest.raises(ValueError, match=field):
        MediaPolicy(**{field: 0})
