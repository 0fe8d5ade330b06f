"""A small VLM's run, for the planner to place."""

from __future__ import annotations

from megavlm.config.schema import (
    Config,
    DataConfig,
    LanguageConfig,
    ModelConfig,
    PrecisionConfig,
    TrainConfig,
    VisionConfig,
)
from megavlm.rules.defaults import resolve_model

SMALL = Config(
    model=resolve_model(
        ModelConfig(
            vision=VisionConfig(
                num_layers=6, hidden_size=256, ffn_hidden_size=1024, num_attention_heads=4, image_size=64
            ),
            language=LanguageConfig(
                num_layers=6, hidden_size=512, ffn_hidden_size=1536, num_attention_heads=8, vocab_size=4096
            ),
        )
    ),
    precision=PrecisionConfig("bf16"),
    train=TrainConfig(seq_length=256, global_batch_size=16),
    data=DataConfig(kind="synthetic"),
)
