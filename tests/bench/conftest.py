"""Benchmarks are scripts of a folder: tests import them by name."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
