"""Small tars for the tests."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path


def sample(answer: str) -> dict[str, bytes]:
    spoken = [{"from": "human", "value": "<image>What?"}, {"from": "gpt", "value": answer}]
    return {"json": json.dumps({"conversations": spoken}).encode(), "jpg": answer.encode() * 200}


def write_tar(path: Path, samples: Sequence[Mapping[str, bytes]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for number, parts in enumerate(samples):
            for part, data in parts.items():
                entry = tarfile.TarInfo(f"{path.stem}-{number:03}.{part}")
                entry.size = len(data)
                tar.addfile(entry, io.BytesIO(data))
    return path


def write_shards(folder: Path, *, count: int, each: int) -> list[str]:
    """Tars `0.tar` … whose samples answer `shard-number`; the answers."""
    for shard in range(count):
        write_tar(folder / f"{shard}.tar", [sample(f"{shard}-{number}") for number in range(each)])
    return [f"{shard}-{number}" for shard in range(count) for number in range(each)]
