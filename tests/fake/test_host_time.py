"""Layers launch no more than they did: each operation costs the host. They move what the planner's table says."""

from __future__ import annotations

from pathlib import Path

import pytest

from megavlm.planner.terms import TORCH, memory_traffic
from tests.fake.build import shim

ROOT = Path(__file__).parents[2]
# (forward, backward) on torch's layers, as `benchmarks/host_time.py` counts them. Lower them with the code.
MOST = {
    "LLaVA-1.5-7B": {"language.layers.1": (18, 30), "vision.layers.1": (16, 32), "output": (272, 162)},
    "Qwen2.5-VL-7B": {"language.layers.1": (19, 32), "vision.layers.1": (22, 38), "output": (932, 602)},
}


@pytest.mark.slow
@pytest.mark.parametrize("shape", MOST)
def test_layers_launch_no_more_than_they_did(shape, monkeypatch, request):
    folder = Path(request.config.cache.mkdir("fake"))
    if shim(folder) is None:
        pytest.skip("no C++ compiler: autograd cannot follow a device that torch was not built for")
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import gpu_model  # type: ignore[import-not-found]
    import host_time  # type: ignore[import-not-found]
    import predict_gpu  # type: ignore[import-not-found]

    sizes = {each.name: each for each in gpu_model.shapes(small=False)}

    found = host_time.child("megavlm", shape, folder=folder)[shape]
    assert 0 < sum(found["waits"].values()) <= 3
    for name, most in MOST[shape].items():
        for way, allowed in zip(("forward", "backward"), most, strict=True):
            stretch = found["stretches"][f"{name} {way}"]
            assert 3 < stretch["launches"] <= allowed, f"{name} {way}: {stretch}"
        if name in ("language.layers.1", "vision.layers.1"):
            terms = memory_traffic(name, predict_gpu.case(sizes[shape]), TORCH)
            for way, size in zip(("forward", "backward"), map(sum, zip(*terms.values(), strict=True)), strict=True):
                counted = found["stretches"][f"{name} {way}"]["moved_bytes"]
                assert size == pytest.approx(counted, rel=0.01), f"{name} {way}: {terms}"
