# SPDX-License-Identifier: Apache-2.0
"""Media that reach for other files or for the whole machine: each is refused or right; nothing outside is read."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from nemo_rl_ext.media import sources
from nemo_rl_ext.media.containers import container_problem
from nemo_rl_ext.media.errors import MediaDecodeError
from nemo_rl_ext.media.images import load_image
from nemo_rl_ext.media.policy import MediaPolicy
from nemo_rl_ext.media.sources import open_local, read_media_bytes
from nemo_rl_ext.media.video import load_video, probe_video

POLICY = MediaPolicy(timeout_s=120)
SMALL = "carphone_pristine.mp4"


def _texts(outside):
    """Files that name `outside`, by every way of naming it."""
    relative = f"../outside/{outside.name}"
    dash = f"""<?xml version="1.0"?>
<MPD xmlns="urn:mpeg:dash:schema:mpd:2011" profiles="urn:mpeg:dash:profile:isoff-main:2011" type="static"
 mediaPresentationDuration="PT4S"><Period><AdaptationSet mimeType="video/mp4"><Representation id="1" bandwidth="1">
<BaseURL>{outside.as_uri()}</BaseURL></Representation></AdaptationSet></Period></MPD>"""
    playlists = {
        f"{name}.m3u8": f"#EXTM3U\n#EXT-X-TARGETDURATION:4\n#EXTINF:4,\n{target}\n#EXT-X-ENDLIST\n"
        for name, target in (
            ("absolute", outside),
            ("relative", relative),
            ("uri", outside.as_uri()),
            ("concat", f"concat:{outside}"),
            ("subfile", f"subfile,,start,0,end,0,,:{outside}"),
            ("remote", "http://127.0.0.1:9/a.ts"),
        )
    }
    return playlists | {
        "blank_lines.m3u8": f"\n\n#EXTM3U\n#EXTINF:4,\n{outside}\n#EXT-X-ENDLIST\n",
        "byte_order_mark.m3u8": f"\ufeff#EXTM3U\n#EXTINF:4,\n{outside}\n#EXT-X-ENDLIST\n",
        "key.m3u8": f'#EXTM3U\n#EXT-X-KEY:METHOD=AES-128,URI="{outside}"\n#EXTINF:4,\n{outside}\n#EXT-X-ENDLIST\n',
        "map.m3u8": f'#EXTM3U\n#EXT-X-MAP:URI="{outside}"\n#EXTINF:4,\n{outside}\n#EXT-X-ENDLIST\n',
        "list.ffconcat": f"ffconcat version 1.0\nfile {outside}\n",
        "list.txt": f"file '{outside}'\n",
        "stream.mpd": dash,
        "stream.ism": f'<?xml version="1.0"?><SmoothStreamingMedia><a src="{outside}"/></SmoothStreamingMedia>',
        "package.xml": f'<?xml version="1.0"?><CompositionPlaylist><a>{outside}</a></CompositionPlaylist>',
        "list.asx": f'<asx version="3.0"><entry><ref href="{outside}"/></entry></asx>',
        "list.smil": f'<smil><body><video src="{outside}"/></body></smil>',
        "list.xspf": f'<?xml version="1.0"?><playlist><trackList><location>{outside}</location></trackList></playlist>',
        "list.pls": f"[playlist]\nFile1={outside}\n",
        "session.sdp": "v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nt=0 0\nm=video 5004 RTP/AVP 96\n",
        "script.avs": f'FFmpegSource2("{outside}")\n',
        "script.vpy": f"import vapoursynth\n# {outside}\n",
        "list.cue": f'FILE "{outside}" BINARY\n',
        "subtitles.idx": "# VobSub index file, v7\nid: en, index: 0\n",
        "picture.svg": f'<svg xmlns:xlink="http://www.w3.org/1999/xlink"><image xlink:href="{outside}"/></svg>',
        "picture.mvg": f"viewbox 0 0 8 8\nimage over 0,0 8,8 '{outside}'\n",
        "picture.msl": f'<?xml version="1.0"?><image><read filename="{outside}"/></image>',
        "page.ps": f"%!PS\n({outside}) (r) file\n",
        "link.url": f"[InternetShortcut]\nURL={outside.as_uri()}\n",
    }


@pytest.fixture
def hostile(tmp_path, clips):
    """A folder of files that all name a clip outside it, under honest and false suffixes."""
    imageio_ffmpeg = pytest.importorskip("imageio_ffmpeg")
    outside = tmp_path / "outside" / "secret.ts"
    outside.parent.mkdir()
    ffmpeg = (imageio_ffmpeg.get_ffmpeg_exe(), "-loglevel", "error", "-i", str(clips / SMALL))
    subprocess.run([*ffmpeg, "-c", "copy", str(outside)], check=True, stdin=subprocess.DEVNULL)
    folder = tmp_path / "inside"
    folder.mkdir()
    for name, text in _texts(outside).items():
        for copy in (name, f"{name}.mp4", f"{name}.gif", f"{name}.png"):
            (folder / copy).write_text(text)
    return folder, outside


def test_files_that_refer_to_others_are_refused_as_clip_and_as_image(hostile):
    folder, _ = hostile
    names = sorted(path.name for path in folder.iterdir())
    assert len(names) > 100
    for name in names:
        for use in (load_video, probe_video, load_image):
            with pytest.raises(MediaDecodeError, match="row 5") as caught:
                use(name, POLICY, base_dir=folder, where="row 5")
            assert name in str(caught.value)
    with pytest.raises(
        MediaDecodeError, match="an HLS playlist, which refers to other files; name the clip itself"
    ):
        load_video("absolute.m3u8.mp4", POLICY, base_dir=folder)


def test_the_decoder_alone_follows_no_reference_either(hostile, monkeypatch):
    """FFmpeg's own limits hold where a file passes for a clip's container."""
    folder, _ = hostile
    monkeypatch.setattr("nemo_rl_ext.media.video.container_problem", lambda head: "")
    for path in sorted(folder.glob("*.mp4")):
        with pytest.raises(MediaDecodeError, match="cannot open it|counts no frames|does not read"):
            load_video(path.name, POLICY, base_dir=folder)


def test_the_references_would_be_followed_without_those_limits(hostile):
    """The files are what they are meant to be: a decoder that is not confined reads the clip outside."""
    folder, _ = hostile
    script = "import cv2, sys; print(cv2.VideoCapture(sys.argv[1], cv2.CAP_FFMPEG).grab())"
    followed = [
        subprocess.run(
            [sys.executable, "-c", script, str(folder / name)], capture_output=True, text=True, check=True
        )
        for name in ("absolute.m3u8", "relative.m3u8", "uri.m3u8")
    ]
    assert all(run.stdout.strip() == "True" for run in followed)


def test_containers_are_told_by_their_content(clips):
    assert container_problem((clips / SMALL).read_bytes()[:4096]) == ""
    stream = bytearray(188 * 8)
    stream[::188] = b"\x47" * 8
    assert container_problem(bytes(stream)) == "" and container_problem(b"junk" + bytes(stream)) == ""
    assert "no known container" in container_problem(b"\x47" + bytes(1000))
    assert "no known container" in container_problem(b"")
    disguised = b"GIF89a" + b" " * 100 + b'<MPD profiles="urn:mpeg:dash:profile:isoff-live:2011">'
    assert "DASH" in container_problem(disguised)


def _swap(folder, name, outside, stop):
    """Exchange a file, a link and the folder itself for what lies outside, for ever."""
    inside, parked = folder / "a", folder / "parked"
    while not stop.is_set():
        (folder / "other").symlink_to(outside.parent)
        os.rename(inside, parked)
        os.rename(folder / "other", inside)
        time.sleep(0)
        os.unlink(inside)
        os.rename(parked, inside)


@pytest.mark.parametrize("read", [read_media_bytes, lambda *a, **k: open_local(*a, **k).read()])
def test_a_folder_that_becomes_a_link_between_check_and_open_gains_nothing(tmp_path, read):
    outside, folder = tmp_path / "outside" / "x.png", tmp_path / "inside"
    outside.parent.mkdir()
    outside.write_bytes(b"secret")
    (folder / "a").mkdir(parents=True)
    (folder / "a" / "x.png").write_bytes(b"public")
    stop = threading.Event()
    swapper = threading.Thread(target=_swap, args=(folder, "x.png", outside, stop))
    swapper.start()
    try:
        for _ in range(1000):
            try:
                data = read("a/x.png", POLICY, folder)
            except MediaDecodeError:
                continue
            assert data == b"public"
    finally:
        stop.set()
        swapper.join()


def test_what_is_opened_is_what_was_checked(tmp_path, monkeypatch):
    """The same, at the very moment between resolving a name and opening it."""
    outside, folder = tmp_path / "outside", tmp_path / "inside"
    outside.mkdir()
    (outside / "x.png").write_bytes(b"secret")
    (folder / "a").mkdir(parents=True)
    (folder / "a" / "x.png").write_bytes(b"public")
    opened = os.open

    def exchange_and_open(path, *args, **options):
        if str(path).endswith("x.png"):
            os.rename(folder / "a", folder / "parked")
            os.symlink(outside, folder / "a")
        return opened(path, *args, **options)

    monkeypatch.setattr(sources.os, "open", exchange_and_open)
    with pytest.raises(MediaDecodeError, match="another file took its place while it was opened"):
        read_media_bytes("a/x.png", POLICY, folder)


def test_a_clip_is_decoded_from_the_file_that_was_checked(tmp_path, clips, monkeypatch):
    """A clip that is exchanged before the decoder looks at it changes nothing: the decoder opens no name."""
    clip = tmp_path / "a.mp4"
    clip.write_bytes((clips / SMALL).read_bytes())
    before = load_video("a.mp4", POLICY, num_frames=2, base_dir=tmp_path)
    checked = container_problem

    def check_and_exchange(head):
        clip.unlink()
        clip.write_bytes((clips / "bikes.mp4").read_bytes())
        return checked(head)

    monkeypatch.setattr("nemo_rl_ext.media.video.container_problem", check_and_exchange)
    after = load_video("a.mp4", POLICY, num_frames=2, base_dir=tmp_path)
    assert after.content_hash == before.content_hash


def test_devices_and_kernel_files_are_no_media(tmp_path):
    policy = MediaPolicy(roots=(Path("/dev"), Path("/proc"), tmp_path), timeout_s=10)
    (tmp_path / "link.mp4").symlink_to("/dev/zero")
    (tmp_path / "mem.mp4").symlink_to("/proc/self/mem")
    for ref in ("/dev/zero", "/dev/stdin", "/proc/self/mem", "/proc/self/environ", "link.mp4", "mem.mp4"):
        for use in (load_video, load_image):
            with pytest.raises(MediaDecodeError):
                use(ref, policy, base_dir=tmp_path)


def test_a_clip_that_claims_to_be_huge_is_refused_before_it_is_decoded(tmp_path, clips):
    """The frame size in the track header is no allocation."""
    data = bytearray((clips / SMALL).read_bytes())
    for place in range(len(data) - 8):
        # The sample entry of H.264: width and height stand 24 bytes behind its name.
        if data[place : place + 4] == b"avc1" and data[place + 4 : place + 10] == bytes(6):
            data[place + 28 : place + 32] = b"\x7f\xff\x7f\xff"
    (tmp_path / "huge.mp4").write_bytes(data)
    try:
        assert load_video("huge.mp4", POLICY, num_frames=2, base_dir=tmp_path).size == (144, 176)
    except MediaDecodeError as error:
        assert "pixels" in str(error) or "decoding failed" in str(error)


def test_pictures_that_expand_are_bounded(tmp_path):
    Image.new("L", (9000, 9000)).save(tmp_path / "large.png")
    assert (tmp_path / "large.png").stat().st_size < 200_000
    with pytest.raises(MediaDecodeError, match="over the limit of 1000000"):
        load_image("large.png", MediaPolicy(max_pixels=1_000_000), base_dir=tmp_path)
    frames = [Image.fromarray(np.full((600, 600), level, np.uint8)) for level in (0, 200)]
    frames[0].save(tmp_path / "large.gif", save_all=True, append_images=frames[1:])
    with pytest.raises(MediaDecodeError, match="over the limit of 1000 pixels"):
        load_video("large.gif", MediaPolicy(max_pixels=1000, timeout_s=60), base_dir=tmp_path)
