from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest

from megavlm.data.records.media import file_below, image_of
from megavlm.data.types import ImageRef
from megavlm.inputs.bad_sample import Reason
from tests.support.hostile import reason_of

PNG = b"\x89PNG\r\n\x1a\n" + bytes(range(64))
ENCODED = base64.b64encode(PNG).decode()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "a.png").write_bytes(PNG)
    (tmp_path / "secret.png").write_bytes(PNG)
    return tmp_path / "images"


@pytest.mark.parametrize(
    "value",
    [
        PNG,
        {"bytes": PNG, "path": "not/looked/at.png"},
        ENCODED,
        f"data:image/png;base64,{ENCODED}",
        f"DATA:image/png;charset=x;BASE64,{ENCODED[:40]}\n{ENCODED[40:]}",
        {"url": f"data:image/png;base64,{ENCODED}"},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ENCODED}},
        {"type": "image", "image": {"bytes": PNG, "path": None}},
    ],
)
def test_images_within_the_record(value: Any, root: Path) -> None:
    assert image_of(value, lambda name: file_below(root, name)) == ImageRef(PNG)


@pytest.mark.parametrize("value", ["a.png", {"path": "a.png", "bytes": None}, {"path": "./../images/a.png"}])
def test_images_by_path(value: Any, root: Path) -> None:
    assert image_of(value, lambda name: file_below(root, name)) == ImageRef((root / "a.png").resolve())


@pytest.mark.parametrize("spelling", ["{}", "file://{}", "file://localhost{}", "FILE:{}", "file://{}%20two.png"])
def test_absolute_paths_and_file_urls_inside_the_folder(spelling: str, root: Path) -> None:
    (root / "a.png two.png").write_bytes(PNG)
    name = spelling.format(root / "a.png")
    wanted = ImageRef((root / ("a.png two.png" if "%20" in spelling else "a.png")).resolve())
    assert image_of(name, lambda name: file_below(root, name)) == wanted
    assert image_of(name, lambda name: file_below(Path("/"), name)) == wanted


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("b.png", Reason.MISSING),
        ("", Reason.NOT_A_RECORD),
        ("../secret.png", Reason.OUTSIDE),
        ("link.png", Reason.OUTSIDE),
        ("\ud800.png", Reason.MISSING),
        ("https://example.com/a.png", Reason.UNSUPPORTED),
        ("s3://bucket/a.png", Reason.UNSUPPORTED),
        ("file:///etc/passwd", Reason.OUTSIDE),
        ("file://elsewhere/a.png", Reason.UNSUPPORTED),
        ({"url": "HTTPS://example.com/a.png"}, Reason.UNSUPPORTED),
        ("data:image/png,raw", Reason.CORRUPT),
        ("data:image/png;base64,%%%", Reason.CORRUPT),
        (ENCODED[:-1], Reason.CORRUPT),
        (3, Reason.NOT_A_RECORD),
    ],
)
def test_reasons(value: Any, reason: Reason, root: Path) -> None:
    (root / "link.png").symlink_to(root.parent / "secret.png")
    assert reason_of(image_of, value, lambda name: file_below(root, name)) == reason
