"""Flags of the runs that several tests compare: models, dropout, half a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import yaml

from megavlm.command_line.parsing import parse
from megavlm.config.schema import Config
from megavlm.rules.defaults import resolve

_FLAGS: dict[str, str] = yaml.safe_load(Path(__file__).with_name("models.yaml").read_text(encoding="utf-8"))
MODELS = {name: flags.format_map(_FLAGS) for name, flags in _FLAGS.items()}

# Dropout on: the random state must be restored too, for the same layout to go on bit for bit.
DROPOUT = "--hidden-dropout 0.1 --attention-dropout 0.1".split()

PADDED = (
    "--set model.language.tie_embeddings=true model.language.num_query_groups=2 model.vision.num_attention_heads=3 "
    "model.vision.hidden_size=36"
)

HALF = "--train-iters 2".split()
# A run of four steps and its first half: enough where every bit must agree.
FOUR = "--lr-warmup-iters 1 --train-iters 4".split()
TWO = "--lr-warmup-iters 1 --train-iters 2".split()


def resolved(argv: Sequence[str]) -> Config:
    """Return the configuration of these flags with its defaults filled in, as a run plans and builds with it."""
    return resolve(parse(argv))
