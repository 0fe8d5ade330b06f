"""A small VLM's run, for the planner to place."""

from __future__ import annotations

from dataclasses import replace

from megavlm.command_line.parsing import parse
from megavlm.rules.defaults import resolve_model

SMALL_FLAGS = (
    "--set model.vision.num_layers=6 model.vision.hidden_size=256 model.vision.ffn_hidden_size=1024 "
    "model.vision.num_attention_heads=4 model.vision.image_size=64 model.language.num_layers=6 "
    "model.language.hidden_size=512 model.language.ffn_hidden_size=1536 model.language.num_attention_heads=8 "
    "model.language.vocab_size=4096 --precision bf16 --seq-length 256 --global-batch-size 16 --data synthetic"
)
_GIVEN = parse(SMALL_FLAGS.split())
SMALL = replace(_GIVEN, model=resolve_model(_GIVEN.model))
