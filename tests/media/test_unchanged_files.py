# SPDX-License-Identifier: Apache-2.0
"""A file that did not change is not read again; one that did is, whatever its name, size and time say."""

import os
import time

import pytest
from PIL import Image

from nemo_rl_ext.media import reader as reading
from nemo_rl_ext.media import unchanged_files
from nemo_rl_ext.media.policy import MediaPolicy
from nemo_rl_ext.media.reader import MediaReader, MediaSource


@pytest.fixture
def reader(tmp_path):
    return MediaReader(
        policy=MediaPolicy(roots=(tmp_path,)),
        base_dir=tmp_path,
        num_frames=2,
        frames_per_tubelet=1,
        backend="opencv",
    )


@pytest.fixture
def later(monkeypatch):
    """Makes this moment look later by so many seconds."""

    class Clock:
        passed = 0.0

        def time(self):
            return time.time() + self.passed

    clock = Clock()
    monkeypatch.setattr(unchanged_files, "time", clock)
    return clock


@pytest.fixture
def reads(monkeypatch):
    """Names of the files that were read to their end."""
    read, names = reading.read_opened, []

    def counting(handle, ref, policy, **kwargs):
        names.append(ref)
        return read(handle, ref, policy, **kwargs)

    monkeypatch.setattr(reading, "read_opened", counting)
    return names


def write(path, shade):
    Image.new("RGB", (64, 48), (shade, shade, shade)).save(path, format="BMP")


def test_a_file_that_did_not_change_is_read_once_and_measured_alike(tmp_path, reader, later, reads):
    write(tmp_path / "a.bmp", 10)
    later.passed = unchanged_files.SETTLED_S + 1
    items = [reader.measure(MediaSource(ref="a.bmp", where=f"row {row}")) for row in range(3)]
    assert reads == ["a.bmp"]
    assert {(item.size, item.content_hash) for item in items} == {((48, 64), items[0].content_hash)}
    (tmp_path / "linked.bmp").symlink_to(tmp_path / "a.bmp")
    assert reader.measure(MediaSource(ref="linked.bmp")).content_hash == items[0].content_hash
    assert reads == ["a.bmp"], "the file, not its name"


def test_other_content_of_equal_size_and_time_is_seen(tmp_path, reader, later, reads):
    path = tmp_path / "a.bmp"
    write(path, 10)
    before = os.stat(path)
    later.passed = unchanged_files.SETTLED_S + 1
    first = reader.measure(MediaSource(ref="a.bmp"))
    write(path, 20)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert os.stat(path).st_size == before.st_size
    assert reader.measure(MediaSource(ref="a.bmp")).content_hash != first.content_hash


def test_a_file_put_in_anothers_place_is_seen(tmp_path, reader, later, reads):
    for name, shade in (("a.bmp", 10), ("b.bmp", 20)):
        write(tmp_path / name, shade)
    later.passed = unchanged_files.SETTLED_S + 1
    first = reader.measure(MediaSource(ref="a.bmp"))
    os.replace(tmp_path / "b.bmp", tmp_path / "a.bmp")
    assert reader.measure(MediaSource(ref="a.bmp")).content_hash != first.content_hash


def test_a_file_that_changed_a_moment_ago_is_read_every_time(tmp_path, reader, later, reads):
    write(tmp_path / "a.bmp", 10)
    for _ in range(2):
        reader.measure(MediaSource(ref="a.bmp"))
    assert reads == ["a.bmp", "a.bmp"]


def test_what_cannot_be_measured_is_tried_again(tmp_path, reader, later, reads):
    (tmp_path / "a.bmp").write_bytes(b"no image")
    later.passed = unchanged_files.SETTLED_S + 1
    for _ in range(2):
        assert "a.bmp" in reader.measure(MediaSource(ref="a.bmp")).error
    assert reads == ["a.bmp", "a.bmp"]
