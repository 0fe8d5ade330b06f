"""The preview page: what it says of files, that it needs nothing else, and that data cannot break out of it."""

from __future__ import annotations

import base64
import re
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from megavlm.command_line.parsing import parse
from megavlm.data.visuals import unpatchified
from megavlm.inputs.bad_sample import Reason, Skipped
from megavlm.inputs.patches import patchify
from megavlm.programs.prepare import main as prepare
from megavlm.programs.preview import _image, main, marked, page, skipped_samples
from tests.support.data_files import record, sources_of, write_all
from tests.support.html import told

EVIL = "</style><script>alert(1)</script>\" ' & <img src=x onerror=alert(1)>"


def images_of(text: str) -> list[np.ndarray]:
    """The pictures of a page; nothing else may be loaded."""
    found = re.findall(r'(?:src|href)="([^"]*)"', text)
    assert all(each.startswith("data:image/") for each in found)
    return [np.array(Image.open(BytesIO(base64.b64decode(each.partition(",")[2])))) for each in found]


def test_skipped_samples_have_their_reasons() -> None:
    skipped = [
        Skipped("a:3", "a", Reason.MISSING, EVIL),
        Skipped("a:2", "a", Reason.TOO_LONG, "2 of its turns", partly=True),
    ]
    text = skipped_samples(skipped, 5)
    assert "1 of 5 samples (20.0%)" in told(text)
    assert "a:3" in text
    assert "2 of its turns" in text
    assert "<script" not in text
    assert "all 5 samples can be used" in skipped_samples([], 5)


def test_text_keeps_its_spaces_and_its_image_tokens_are_counted() -> None:
    words = {0: "<i>", 1: "a", 2: "b", 3: EVIL}

    def decode(ids: list[int]) -> str:  # as SentencePiece: no space at the start
        return " ".join(words[token] for token in ids)

    text = marked([1, 0, 0, 2, 3], [False, False, False, False, True], image_tokens={0}, decode=decode)
    assert re.sub("<mark>.*</mark>", "M", text) == 'a<span class="image">image × 2</span> bM'
    assert "<mark> &lt;/style&gt;" in text
    assert "<script" not in text
    of_video = marked([0, 4, 4, 0], [False] * 4, image_tokens={0, 4}, video_tokens={4}, decode=decode)
    assert told(of_video) == "image × 1 video × 2 image × 1"


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
    text = page(parse(flags(data)), most=6, title=EVIL)
    assert "<script" not in text
    said = told(text)
    assert "samples looked at 64" in said
    assert str(Reason.NOT_A_RECORD) in said
    assert str(Reason.MISSING) in said
    filled = re.search(r"positions filled ([\d.]+)%", said)
    assert filled is not None
    assert 50 < float(filled[1]) <= 100
    articles = text.split("<article>")[1:]
    assert len(articles) == 6
    assert {re.findall(r"--source-(\d)", article)[0] for article in articles} == {"0", "1"}
    pictured = next(article for article in articles if "<img" in article)
    assert images_of(pictured)[0].shape == (32, 32, 3)
    answers = re.findall(r"<mark>(.*?)</mark>", pictured, re.DOTALL)
    assert answers
    assert all(answer.endswith("&lt;|im_end|&gt;") for answer in answers)


def test_what_is_found_in_tars(data: Path, tmp_path: Path) -> None:
    tars = tmp_path / "tars"
    assert prepare([str(data / "train.jsonl"), str(tars), "--image-root", str(data / "images")]) == 0
    given = ["--datasets", f"{tars},weight=3", str(data / "book.txt"), "--tokenizer", str(data / "tokenizer")]
    options = ["--seq-length", "96", "--packing-window", "48", "--run-dir", str(tmp_path / "run")]
    text = page(parse([*given, *options]), most=5, title="t")
    assert "samples looked at 48" in told(text)
    assert "tars 40 75.0% 75.0% book 20 25.0% 25.0%" in told(text)
    assert images_of(text)


def test_the_tool(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "page.html"
    assert main([*flags(data), "--out", str(out), "--samples", "3"]) == 0
    assert "train.jsonl:1" in told(out.read_text(encoding="utf-8"))
    config = tmp_path / "run.yaml"
    config.write_text(f"data: {{tokenizer: {data / 'tokenizer'}, datasets: [{{path: {data / 'book.txt'}}}]}}\n")
    assert main([str(config), "--out", str(out), "--packing-window", "32"]) == 0
    assert "book" in told(out.read_text(encoding="utf-8"))
    capsys.readouterr()
    assert main(["--seq-length", "64"]) == 2
    assert main([str(tmp_path / "none.yaml")]) == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert len(said) == 2
    assert "--datasets" in said[0]


def test_frames_of_a_video_have_their_times() -> None:
    frames = np.arange(3, dtype=np.uint8)[:, None, None, None].repeat(4, 1).repeat(4, 2).repeat(3, 3)  # [3, 4, 4, 3]
    pairs = np.stack([frames[[0, 1]], frames[[2, 2]]])  # two frames in a patch, the last one twice
    patches = pairs.reshape(2, 2, 2, 2, 2, 2, 3).transpose(0, 2, 4, 6, 1, 3, 5).reshape(8, 3 * 2 * 4) / 255
    normal = {"mean": (0.0,) * 3, "std": (1.0,) * 3}
    video = SimpleNamespace(
        film=SimpleNamespace(frames=(0, 5, 10), seconds=(0.0, 0.5, 1.0)),
        grids=((2, 2), (2, 2)),
        patches=lambda: torch.from_numpy(patches),
    )
    processor = SimpleNamespace(patch_size=2, video=SimpleNamespace(frames_per_patch=2, **normal))
    text = _image(SimpleNamespace(processor=processor), SimpleNamespace(images=[video]), 0)  # type: ignore[arg-type]
    assert [int(each.mean()) for each in images_of(text)] == [0, 1, 2]
    assert told(text) == "video: 3 frames of 4×4 pixels 0.00 s 0.50 s 1.00 s"
