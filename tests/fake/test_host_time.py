"""Layers launch no more than they did: every operation of a layer costs the host some microseconds, in every layer."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fake.build import shim

ROOT = Path(__file__).parents[2]
# (forward, backward) on torch's layers, as `benchmarks/host_time.py` counts them. Lower them with the code.
MOST = {
    "LLaVA-1.5-7B": {"language.layers.1": (21, 39), "vision.layers.1": (16, 38), "output": (36, 11)},
    "Qwen2.5-VL-7B": {"language.layers.1": (25, 45), "vision.layers.2": (30, 68), "output": (36, 11)},
}


@pytest.mark.parametrize("shape", ["LLaVA-1.5-7B", pytest.param("Qwen2.5-VL-7B", marks=pytest.mark.slow)])
def test_layers_launch_no_more_than_they_did(
    shape: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    folder = Path(request.config.cache.mkdir("fake"))
    if shim(folder) is None:
        pytest.skip("no C++ compiler: autograd cannot follow a device that torch was not built for")
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import host_time  # type: ignore[import-not-found]

    found = host_time.child("megavlm", shape, folder=folder)[shape]
    assert 0 < sum(found["waits"].values()) <= 3
    for name, most in MOST[shape].items():
        for way, allowed in zip(("forward", "backward"), most, strict=True):
            stretch = found["stretches"][f"{name} {way}"]
            assert 3 < stretch["launches"] <= allowed, f"{name} {way}: {stretch}"
