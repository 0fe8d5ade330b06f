import multiprocessing as mp
import os
from pathlib import Path

import pytest
import torch

from megavlm.errors import UserError
from megavlm.pipeline.feature_cache import FeatureCache, encoder_hash


def cache_in(folder: Path, *, size: int = 2**30, encoder: bytes = b"weights") -> FeatureCache:
    return FeatureCache(folder, size=size, encoder=encoder)


def files(folder: Path) -> list[Path]:
    return list(folder.rglob("*.safetensors"))


def test_gives_back_what_it_got(tmp_path):
    features = torch.randn(5, 2, 8).bfloat16()
    cache_in(tmp_path).put("ab12", features)
    found = cache_in(tmp_path).get("ab12")
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, features)


def test_key_knows_pixels_layout_and_encoder(tmp_path):
    patches = torch.randn(4, 12)
    changed = patches.clone()
    changed[3, 11] += 1e-6
    keys = {
        cache_in(tmp_path).key(patches, ((2, 2),)),
        cache_in(tmp_path).key(changed, ((2, 2),)),
        cache_in(tmp_path).key(patches, ((1, 4),)),
        cache_in(tmp_path, encoder=b"others").key(patches, ((2, 2),)),
    }
    assert len(keys) == 4
    assert cache_in(tmp_path).key(patches.clone(), ((2, 2),)) in keys


def test_encoder_hash_knows_every_weight_and_the_configuration():
    weights = {"a": torch.zeros(3), "b": torch.zeros(2, 2)}
    changed = {**weights, "b": torch.tensor([[0.0, 0.0], [0.0, 1e-7]])}
    hashes = [
        encoder_hash(weights.items(), {"layers": 2}),
        encoder_hash(changed.items(), {"layers": 2}),
        encoder_hash(weights.items(), {"layers": 3}),
    ]
    assert len(set(hashes)) == 3
    assert hashes[0] == encoder_hash({name: value.clone() for name, value in weights.items()}.items(), {"layers": 2})


@pytest.mark.parametrize("damage", ["flip", "cut", "empty"])
def test_a_damaged_file_is_missed_and_deleted(tmp_path, damage):
    cache = cache_in(tmp_path)
    cache.put("ab12", torch.ones(4, 1, 8))
    (path,) = files(tmp_path)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes({"flip": bytes(data), "cut": bytes(data[:-7]), "empty": b""}[damage])
    assert cache.get("ab12") is None
    assert files(tmp_path) == []


def test_stays_within_its_size_and_keeps_what_was_used_last(tmp_path):
    cache = cache_in(tmp_path, size=10_000)
    for number in range(20):
        cache.put(f"{number:04}", torch.zeros(1, 1, 256))  # a little over 1 KiB
        for age, path in enumerate(sorted(files(tmp_path), key=lambda path: path.name, reverse=True)):
            os.utime(path, (1e9 - age, 1e9 - age))
        cache.get("0000")
    assert sum(path.stat().st_size for path in files(tmp_path)) <= 10_000
    assert {"0000", "0019"} <= {path.stem for path in files(tmp_path)}


def test_an_unwritable_folder_is_the_users_mistake(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="--vision-cache"):
        cache_in(tmp_path / "file" / "below")


def use(folder: str, seed: int) -> int:
    """Write and read the same names as others do, in a cache too small for all; returns wrong answers."""
    cache = cache_in(Path(folder), size=20_000)
    wrong = 0
    for step in range(300):
        number = (step * 7 + seed) % 30
        found = cache.get(f"{number:04}")
        wrong += found is not None and not torch.equal(found, torch.full((1, 1, 256), float(number)))
        if found is None:
            cache.put(f"{number:04}", torch.full((1, 1, 256), float(number)))
    return wrong


def test_processes_share_a_folder(tmp_path):
    with mp.get_context("fork").Pool(2) as pool:
        assert pool.starmap(use, [(str(tmp_path), seed) for seed in range(2)]) == [0, 0]
    assert not list(tmp_path.rglob(".*.safetensors.*"))
