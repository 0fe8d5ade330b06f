"""The preview page: what it says, that it needs nothing else, and that data cannot break out of it."""

from __future__ import annotations

import base64
from html.parser import HTMLParser
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from megavlm.command_line.parsing import parse
from megavlm.inputs.bad_sample import Reason, Skipped
from megavlm.inputs.patches import patchify
from megavlm.programs.prepare import main as prepare
from megavlm.programs.preview.collect import (
    PreviewContent,
    Shown,
    SourceShare,
    Stretch,
    look,
    stretches_of,
    unpatchified,
)
from megavlm.programs.preview.page import page
from megavlm.programs.preview.preview import main
from tests.support.data_files import record, sources_of, write_all

EVIL = "</style><script>alert(1)</script>\" ' & <img src=x onerror=alert(1)>"
VOID = {"meta", "img"}


class Read(HTMLParser):
    """Tags, attributes and text; every tag that is opened is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.images: list[str] = []
        self.marked: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in VOID:
            self.open.append(tag)
        if tag == "mark":
            self.marked.append("")
        for name, value in attributes:
            assert not name.startswith("on")
            if name in ("src", "href"):
                assert value is not None
                assert value.startswith("data:image/png;base64,")
                self.images.append(value.partition(",")[2])

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data
        if "mark" in self.open:
            self.marked[-1] += data


def content(**changes: object) -> PreviewContent:
    picture = np.arange(4 * 6 * 3, dtype=np.uint8).reshape(4, 6, 3)
    whole = {
        "title": "Data of a, b",
        "facts": (("trained on", "assistant"),),
        "read": 5,
        "sources": (SourceShare("a", 30, 3.0, 4), SourceShare("b", None, 1.0, 1)),
        "skipped": (
            Skipped("a:3", "a", Reason.MISSING, "x.jpg is not a file"),
            Skipped("a:2", "a", Reason.TOO_LONG, "2 of its turns", partly=True),
        ),
        "shown": (
            Shown(
                "a:1",
                0,
                6,
                ((picture,), (picture, picture)),
                ((), (0.0, 0.5)),
                (Stretch("What? ", False), Stretch("4", False, True), Stretch("A cat.", True)),
            ),
        ),
        **changes,
    }
    return PreviewContent(**whole)  # type: ignore[arg-type]


def test_what_it_says() -> None:
    found = content()
    read = Read(page(found))
    for said in ("x.jpg is not a file", "missing_file", "too_long", "1 of 5 samples", "image × 4", "stream"):
        assert said in read.text
    assert read.marked[1:] == ["A cat."]  # the first is the legend
    pixels = np.array(Image.open(BytesIO(base64.b64decode(read.images[0]))))
    assert (pixels == found.shown[0].images[0][0]).all()


def test_data_cannot_break_out() -> None:
    evil = content(
        title=EVIL,
        facts=((EVIL, EVIL),),
        sources=(SourceShare(EVIL, 1, 1.0, 1),),
        skipped=(Skipped(EVIL, EVIL, Reason.MISSING, EVIL),),
        shown=(Shown(EVIL, 0, 1, (), (), (Stretch(EVIL, True), Stretch(EVIL, False))),),
        warnings=(EVIL,),
    )
    read = Read(page(evil))
    assert "script" not in read.tags
    assert read.marked[-1] == EVIL


def test_stretches_keep_spaces_and_count_image_tokens() -> None:
    words = {0: "<i>", 1: "a", 2: "b", 3: "c"}

    def decode(ids: list[int]) -> str:  # as SentencePiece: no space at the start
        return " ".join(words[token] for token in ids)

    found = stretches_of([1, 0, 0, 2, 3, 3], [False, False, False, False, True, True], image_tokens={0}, decode=decode)
    assert found == (
        Stretch("a", False),
        Stretch("2", trained=False, image=True),
        Stretch(" b", False),
        Stretch(" c c", True),
    )
    marks = stretches_of([0, 4, 4, 0], [False] * 4, image_tokens={0, 4}, video_tokens={4}, decode=decode)
    assert [(each.text, each.video) for each in marks] == [("1", False), ("2", True), ("1", False)]


def test_frames_of_a_video_have_their_times() -> None:
    frames = tuple(np.full((30, 40, 3), number, dtype=np.uint8) for number in range(14))
    seconds = tuple(number / 2 for number in range(14))
    shown = Shown("x:1", 0, 9, (frames,), (seconds,), (Stretch("14", trained=False, image=True, video=True),))
    content = PreviewContent("t", (), 1, (SourceShare("x", 1, 1.0, 1),), (), (shown,), ())
    read = Read(page(content))
    assert len(read.images) == 14
    assert "video: 14 frames of 30×40 pixels" in read.text
    assert "6.50 s" in read.text
    assert "video × 14" in read.text


def test_pixels_come_back_from_patches() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (8, 12, 3), dtype=np.uint8)
    mean, std = (0.48, 0.46, 0.41), (0.27, 0.26, 0.28)
    patches = patchify(pixels, 4, mean=mean, std=std)
    assert isinstance(patches, torch.Tensor)
    assert (unpatchified(patches, (2, 3), patch=4, mean=mean, std=std) == pixels).all()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_all(tmp_path_factory.mktemp("data"), samples=40)
    with (folder / "train.jsonl").open("a") as file:
        file.write("garbage {\n" + record("<image>\na cat ?", image="none.png") + "\n")
    return folder


def flags(data: Path) -> list[str]:
    return [*sources_of(data), "--seq-length", "96", "--packing-window", "64", "--no-shuffle"]


def test_what_is_found_in_files(data: Path) -> None:
    found = look(parse(flags(data)), shown=6, title="t")
    assert found.read == 64
    assert {skip.reason for skip in found.skipped} >= {Reason.NOT_A_RECORD, Reason.MISSING}
    assert sum(source.drawn for source in found.sources) == 64
    assert len(found.shown) == 6
    assert {shown.source for shown in found.shown} == {0, 1}
    assert 0.5 < float(dict(found.facts)["positions filled"].rstrip("%")) / 100 <= 1
    pictured = next(shown for shown in found.shown if shown.images)
    assert pictured.images[0][0].shape == (32, 32, 3)
    answers = [stretch.text for stretch in pictured.stretches if stretch.trained]
    assert answers
    assert all(answer.endswith("<|im_end|>") for answer in answers)


def test_what_is_found_in_tars(data: Path, tmp_path: Path) -> None:
    tars = tmp_path / "tars"
    assert prepare([str(data / "train.jsonl"), str(tars), "--image-root", str(data / "images")]) == 0
    given = ["--datasets", f"{tars},weight=3", str(data / "book.txt"), "--tokenizer", str(data / "tokenizer")]
    options = ["--seq-length", "96", "--packing-window", "48", "--run-dir", str(tmp_path / "run")]
    found = look(parse([*given, *options]), shown=5, title="t")
    assert found.read == 48
    assert [(source.records, source.drawn) for source in found.sources] == [(None, 36), (20, 12)]
    assert {shown.source for shown in found.shown} == {0, 1}
    assert any(shown.images for shown in found.shown)


def test_the_tool(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "page.html"
    assert main([*flags(data), "--out", str(out), "--samples", "3"]) == 0
    assert "train.jsonl:1" in Read(out.read_text(encoding="utf-8")).text
    config = tmp_path / "run.yaml"
    config.write_text(f"data: {{tokenizer: {data / 'tokenizer'}, datasets: [{{path: {data / 'book.txt'}}}]}}\n")
    assert main([str(config), "--out", str(out), "--packing-window", "32"]) == 0
    assert "book" in Read(out.read_text(encoding="utf-8")).text
    capsys.readouterr()
    assert main(["--seq-length", "64"]) == 2
    assert main([str(tmp_path / "none.yaml")]) == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert len(said) == 2
    assert "--datasets" in said[0]
