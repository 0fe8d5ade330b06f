"""A hardware profile is read back as it was written, and what is none is one line."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from megavlm.errors import UserError
from megavlm.planner.hardware import PROFILES, profile


@pytest.mark.parametrize("name", PROFILES)
def test_what_is_written_is_read(tmp_path: Path, name: str) -> None:
    (tmp_path / "a.json").write_text(json.dumps(asdict(PROFILES[name])))
    assert profile(str(tmp_path / "a.json")) == PROFILES[name]


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("memory",), "eight"),
        (("memory",), float("nan")),
        (("devices_per_node",), 2.5),
        (("near",), None),
        (("host", "link", "bandwidth"), "x"),
        (("host",), 7),
        (("other",), 1),
    ],
)
def test_a_value_of_another_kind_is_one_line(tmp_path: Path, place: tuple[str, ...], value: Any) -> None:
    written = json.loads(json.dumps(asdict(PROFILES["h100"])))
    inner = written
    for name in place[:-1]:
        inner = inner[name]
    inner[place[-1]] = value
    (tmp_path / "a.json").write_text(json.dumps(written))
    with pytest.raises(UserError, match="is no hardware profile") as caught:
        profile(str(tmp_path / "a.json"))
    assert len(str(caught.value).splitlines()) == 1
