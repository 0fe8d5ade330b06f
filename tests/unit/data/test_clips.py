"""Clips of all kinds are decoded frame by frame, and those that cannot be are told by their reasons."""

from __future__ import annotations

import io
import struct
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("av", reason="pip install av (the extra `video`)")

from megavlm.data import clips
from megavlm.errors import UserError
from megavlm.inputs.bad_sample import BadSample, Reason
from tests.support.clips import CORNER, HEIGHT, WIDTH, clip, number_of
from tests.support.hostile import reason_of

ANY = 10**6
IRREGULAR = (0.0, 0.1, 0.2, 1.0, 1.1, 3.0, 3.1, 9.0, 9.1, 9.5)


@pytest.mark.parametrize("kind", ["mp4", "mkv", "avi", "mpegts"])
def test_frames_of_all_containers(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = clips.probe(content := clip(20, rate=10, kind=kind), max_pixels=ANY)
    assert (found.height, found.width, len(found.times)) == (HEIGHT, WIDTH, 20)
    assert found.rate == pytest.approx(10)
    assert np.allclose(found.times, np.arange(20) / 10, atol=1e-3)
    decoded = count_decoded(monkeypatch)
    assert numbers(content, (0, 1, 13, 19)) == [0, 1, 13, 19]
    if kind != "mpegts":  # in which a key frame cannot be found exactly
        assert len(decoded) <= 2 + 2 + 2, "from the key frames 0, 12 and 18 on, no others are decoded"


@pytest.mark.parametrize(("kind", "count"), [("mp4", 3), ("mkv", 3), ("flv", 3), ("mpegts", 20)])
def test_a_clip_of_one_key_frame(kind: str, count: int) -> None:
    content = clip(count, kind=kind, group=250)
    assert len(clips.probe(content, max_pixels=ANY).times) == count
    assert numbers(content, tuple(range(count))) == list(range(count))


@pytest.mark.parametrize("kind", ["avi", "asf", "mpeg"])
def test_frames_of_containers_without_times_are_those_that_were_asked_for(kind: str) -> None:
    content = clip(20, kind=kind, codec="libx264", rate=25)
    assert np.allclose(clips.probe(content, max_pixels=ANY).times, np.arange(20) / 25, atol=1e-3)
    assert [numbers(content, (number,)) for number in range(20)] == [[number] for number in range(20)]
    assert numbers(content, (1, 2, 7, 13, 19)) == [1, 2, 7, 13, 19]


def test_frames_that_nothing_needs_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every frame of a long group is the same as where all are decoded, and of those beside it at most half are."""
    waves = np.add.outer(np.sin(np.arange(64) / 5), np.sin(np.arange(96) / 7))[..., None] * [60, 50, 40] + 128
    shown = [np.roll(waves, 3 * number, axis=1).astype(np.uint8) for number in range(24)]
    for kind in ("mp4", "mkv"):
        content = clip(24, kind=kind, frames=shown, group=24)
        monkeypatch.setattr(clips, "_SAYS_WHAT_IS_UNUSED", ())
        expected = list(clips.frames(content, range(24), max_pixels=ANY))
        monkeypatch.undo()
        decoded = count_decoded(monkeypatch)
        for number in range(24):
            (frame,) = clips.frames(content, (number,), max_pixels=ANY)
            assert np.array_equal(frame, expected[number])
        assert len(decoded) < 0.75 * sum(range(1, 25))
        monkeypatch.undo()


def test_of_a_trimmed_clip_the_frames_that_are_left_are_read() -> None:
    """As phones trim: the file still has all frames, and an edit list says which are shown."""
    content = bytearray(clip(30))
    at = content.index(b"elst") + 12
    duration, begin = struct.unpack_from(">Ii", content, at)
    struct.pack_into(">Ii", content, at, duration // 2, begin + 7 * 1024)
    assert len(clips.probe(bytes(content), max_pixels=ANY).times) == 15
    assert numbers(bytes(content), tuple(range(15))) == list(range(7, 22))


def test_frames_that_are_never_shown_are_none_of_a_clip() -> None:
    """VP8 has hidden frames, from which others are predicted, in packets of their own."""
    import av

    with (
        av.open(io.BytesIO(clip(20, kind="webm", codec="libvpx"))) as given,
        av.open(content := io.BytesIO(), "w", format="webm") as to,
    ):
        stream = to.add_stream_from_template(given.streams.video[0])
        for packet in given.demux(given.streams.video[0]):
            packets = [packet] if packet.size else []
            if packet.pts == 500:
                packets.append(av.Packet(bytes([bytes(packet)[0] & ~0x10]) + bytes(packet)[1:]))
                packets[1].pts, packets[1].time_base = packet.pts + 1, packet.time_base
            for each in packets:
                each.stream = stream
                to.mux(each)
    assert len(clips.probe(content.getvalue(), max_pixels=ANY).times) == 20
    assert numbers(content.getvalue(), tuple(range(20))) == list(range(20))


def test_frames_at_irregular_times() -> None:
    for kind in ("mp4", "mkv"):
        content = clip(10, times=IRREGULAR, kind=kind)
        assert np.allclose(clips.probe(content, max_pixels=ANY).times, IRREGULAR, atol=2e-3)
        assert numbers(content, (2, 3, 7)) == [2, 3, 7]


@pytest.mark.parametrize("kind", ["mp4", "mkv", "avi", "mpegts"])
def test_the_sound_of_all_containers(kind: str) -> None:
    content = clip(20, kind=kind, sound=True)
    assert len(clips.probe(content, max_pixels=ANY).times) == 20
    assert 4096 <= len(clips.sound(content, longest=ANY)) < 4096 + 2000  # the encoder adds silence


@pytest.mark.parametrize(
    ("samples", "reason"),
    [([], Reason.NO_FRAMES), ([0, np.nan], Reason.CORRUPT), ([-np.inf], Reason.CORRUPT), ([1e30], Reason.CORRUPT)],
)
def test_a_sound_without_finite_features_is_refused(samples: list[float], reason: Reason) -> None:
    values = np.array(samples, "<f4").tobytes()
    head = struct.pack("<8sIHHIIHH", b"WAVEfmt ", 16, 3, 1, 16000, 64000, 4, 32)
    content = b"RIFF" + struct.pack("<I", 36 + len(values)) + head + b"data" + struct.pack("<I", len(values)) + values
    assert reason_of(lambda: clips.sound(content, longest=ANY)) is reason


@pytest.mark.parametrize(("rotation", "corner"), [(90, (-1, 0)), (-90, (0, -1)), (180, (-1, -1))])
def test_a_clip_that_lies_is_turned(rotation: int, corner: tuple[int, int]) -> None:
    content = clip(3, rotation=rotation)
    found = clips.probe(content, max_pixels=ANY)
    (frame,) = clips.frames(content, (0,), max_pixels=ANY)
    assert frame.shape[:2] == (found.height, found.width) == ((HEIGHT, WIDTH) if rotation == 180 else (WIDTH, HEIGHT))
    rows = slice(0, CORNER) if corner[0] == 0 else slice(-CORNER, None)
    columns = slice(0, CORNER) if corner[1] == 0 else slice(-CORNER, None)
    assert frame[rows, columns].mean() > 200
    assert frame.mean() < 100


PLAYLISTS = {
    "it.m3u8": b"#EXTM3U\n#EXT-X-TARGETDURATION:5\n#EXTINF:5,\nsecret.mp4\n#EXT-X-ENDLIST\n",
    "it.mp4": b"ffconcat version 1.0\nfile secret.mp4\n",
}
BROKEN: dict[str, tuple[Any, Reason]] = {
    "nothing": (lambda: b"", Reason.NOT_A_VIDEO),
    "noise": (lambda: np.random.default_rng(0).bytes(5000), Reason.NOT_A_VIDEO),
    "text": (lambda: b"a man\n" * 500, Reason.NOT_A_VIDEO),
    "without its header": (lambda: clip(kind="mkv")[:200], Reason.NOT_A_VIDEO),
    "sound": (lambda: clip(0, sound=True), Reason.NO_FRAMES),
    "frames missing": (lambda: short_of_frames(clip()), Reason.TRUNCATED),
    "large": (lambda: clip(2, size=(1024, 1024)), Reason.TOO_LARGE),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_wrong_with_a_clip(name: str, tmp_path: Path) -> None:
    make, reason = BROKEN[name]
    (file := tmp_path / "it.mp4").write_bytes(make())
    for source in (file.read_bytes(), file):
        assert reason_of(clips.probe, source, max_pixels=ANY) == reason


@pytest.mark.parametrize("name", PLAYLISTS)
@pytest.mark.parametrize("other", ["format_whitelist", "protocol_whitelist"])
def test_a_playlist_opens_no_other_file(name: str, other: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of the two guards refuses it without the other one."""
    monkeypatch.delitem(clips._OPTIONS, other, raising=False)
    monkeypatch.chdir(tmp_path)
    Path("secret.mp4").write_bytes(clip())
    Path(name).write_bytes(PLAYLISTS[name])
    assert reason_of(lambda: clips.probe(Path(name), max_pixels=ANY)) is Reason.NOT_A_VIDEO


def test_bounds_of_a_clip(monkeypatch: pytest.MonkeyPatch) -> None:
    content = clip(20)
    monkeypatch.setattr(clips, "MAX_FRAMES", 19)
    assert reason_of(lambda: clips.probe(content, max_pixels=ANY)) is Reason.ENDLESS
    monkeypatch.setattr(clips, "MAX_FRAMES", 20)
    small = HEIGHT * WIDTH - 1
    assert reason_of(lambda: clips.probe(content, max_pixels=small)) is Reason.TOO_LARGE
    lying = clip(4, kind="avi").replace(*(struct.pack("<II", WIDTH, height) for height in (HEIGHT, 8)))
    assert reason_of(lambda: clips.probe(lying, max_pixels=small)) is Reason.TOO_LARGE
    monkeypatch.setattr(clips, "_MAX_DECODED", 3 * HEIGHT * WIDTH)
    assert numbers(content, (0, 2)) == [0, 2]
    assert reason_of(lambda: numbers(content, (0, 5))) is Reason.ENDLESS


def test_damage_inside_a_clip_never_ends_the_run() -> None:
    """Every damaged clip either gives frames of the right size or is told as bad."""
    whole, rng = clip(12, kind="mkv"), np.random.default_rng(1)
    bad = 0
    for _ in range(60):
        damaged = bytearray(whole)
        for place in rng.integers(0, len(whole), 12):
            damaged[place] = rng.integers(256)
        try:
            found = clips.probe(bytes(damaged), max_pixels=ANY)
            numbers(bytes(damaged), (0, len(found.times) - 1))
        except BadSample:
            bad += 1
    assert 30 < bad < 60


def test_without_pyav(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(UserError, match="pip install av"):
        clips.probe(b"", max_pixels=ANY)


def numbers(content: bytes, wanted: tuple[int, ...]) -> list[int]:
    """Which frames the decoded ones show themselves to be."""
    return [number_of(frame) for frame in clips.frames(content, wanted, max_pixels=ANY)]


def count_decoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let the list grow with every frame that is decoded, converted or not."""
    decoded: list[int] = []
    original = clips._forward

    def counting(*given: Any) -> Any:
        for frame in original(*given):
            decoded.append(frame.pts)
            yield frame

    monkeypatch.setattr(clips, "_forward", counting)
    return decoded


def short_of_frames(content: bytes) -> bytes:
    """The clip without its last 300 bytes of pictures, its header being at the front."""
    import av

    with tempfile.NamedTemporaryFile(suffix=".mp4") as file:
        with av.open(io.BytesIO(content)) as given, av.open(file.name, "w", options={"movflags": "faststart"}) as to:
            stream = to.add_stream_from_template(given.streams.video[0])
            for packet in given.demux(given.streams.video[0]):
                if packet.dts is not None:
                    packet.stream = stream
                    to.mux(packet)
        return Path(file.name).read_bytes()[:-300]
