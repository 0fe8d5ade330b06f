"""The benchmark of packing and balance computes on today's configuration."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import data

OPTIONS = argparse.Namespace(packing_window=512, seq_length=8192, ranks=8, sequences_per_rank=8, steps=2)


def test_packing_fills_more_positions_than_padding():
    useful = {name: found["useful"] for name, found in data.packing(OPTIONS)["packing"].items()}
    assert useful["naive padding"] < useful["in order"] < useful["best fit, decreasing (ours)"] <= 1


def test_balancing_brings_the_largest_load_nearer_to_the_mean():
    before, after = data.balance(OPTIONS)["imbalance"].values()
    assert all(1 <= after[kind] < before[kind] for kind in ("vision", "language"))
