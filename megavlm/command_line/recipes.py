"""Predefined configurations. A recipe is a function that returns a Config.

The demos train a model that learns to read handwritten digits in a few minutes on two CPU cores.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from megavlm.config.messages import did_you_mean, plain
from megavlm.config.schema import (
    CheckpointConfig,
    Config,
    DataConfig,
    EvaluationConfig,
    ExpertsConfig,
    LanguageConfig,
    LoggingConfig,
    ModelConfig,
    ObjectiveConfig,
    OptimizerConfig,
    ParallelConfig,
    ProjectorConfig,
    RunConfig,
    TrainConfig,
    VisionConfig,
)
from megavlm.errors import UserError


def demo() -> Config:
    """Return the configuration of a VLM with 0.4 million parameters for images of one to four digits.

    A patch is as large as a cell of the image, so that each digit is one vision token and the language model reads 4
    image tokens: with many more, learning their order would take most of the run. Narrow layers need a larger
    initial standard deviation than 0.02 (1/√96 is 0.1), and with normalised queries and keys the loss falls sooner.
    """
    return Config(
        model=ModelConfig(
            vision=VisionConfig(
                num_layers=2,
                hidden_size=96,
                ffn_hidden_size=192,
                num_attention_heads=8,
                image_size=64,
                patch_size=16,
                in_channels=1,
                qk_norm="head",
            ),
            projector=ProjectorConfig(kind="mlp"),
            language=LanguageConfig(
                num_layers=2,
                hidden_size=96,
                ffn_hidden_size=192,
                num_attention_heads=8,
                qk_norm=True,
            ),
            init_method_std=0.1,
        ),
        # Tensors have a few kilobytes, so that fewer collectives save more than smaller activations would.
        parallel=ParallelConfig(sequence_parallel=False),
        train=TrainConfig(train_iters=520, micro_batch_size=64, global_batch_size=128, seq_length=24),
        optimizer=OptimizerConfig(
            lr=1.5e-3, lr_decay_style="WSD", lr_warmup_iters=50, lr_wsd_decay_iters=220, weight_decay=0.1
        ),
        data=DataConfig(kind="digits"),
        run=RunConfig(run_dir="runs/demo"),
        checkpoint=CheckpointConfig(save_interval=200),
        evaluation=EvaluationConfig(eval_interval=200, eval_samples=96, sample_interval=100, sample_max_new_tokens=12),
        logging=LoggingConfig(log_interval=10),
    )


def demo_moe() -> Config:
    """Return the demo with a mixture of experts: 8 experts of half the MLP's width, 2 per token.

    Per token, matrix products have the FLOPs of the dense demo, plus the router's.
    """
    dense = demo()
    width = dense.model.language.ffn_hidden_size
    experts = ExpertsConfig(num_experts=8, router_topk=2, ffn_hidden_size=width // 2, aux_loss_coeff=0.01)
    return replace(
        dense,
        model=replace(dense.model, experts=experts),
        parallel=replace(dense.parallel, sequence_parallel=None),  # experts need it
        run=replace(dense.run, run_dir="runs/demo-moe"),
    )


def demo_embed() -> Config:
    """Return the demo with contrastive embeddings: it retrieves the image for a text and the text for an image."""
    answers = demo()
    return replace(
        answers,
        model=replace(answers.model, objective=ObjectiveConfig(kind="contrastive", learn_temperature=True)),
        train=TrainConfig(train_iters=300, micro_batch_size=64, global_batch_size=128, seq_length=28),
        optimizer=replace(answers.optimizer, lr_warmup_iters=30, lr_wsd_decay_iters=120),
        run=replace(answers.run, run_dir="runs/demo-embed"),
        evaluation=EvaluationConfig(eval_interval=100, eval_samples=200),
    )


RECIPES: dict[str, Callable[[], Config]] = {"demo": demo, "demo-embed": demo_embed, "demo-moe": demo_moe}


def recipe(name: str, *, train_iters: int | None = None) -> Config:
    """Return the configuration of a recipe, with `train_iters` in place of its own length if given.

    Warm-up and decay are then scaled to the new length, rounded down. Raises UserError, with a suggestion, for an
    unknown name.
    """
    if name not in RECIPES:
        hint = did_you_mean(name, RECIPES) or f": choose one of {', '.join(RECIPES)}"
        raise UserError(f"unknown recipe {plain(name)}{hint}")
    config = RECIPES[name]()
    if train_iters is None:
        return config
    # Options counted in iterations, with the lower bound of each.
    schedule = {
        option: max(least, length * train_iters // config.train.train_iters)
        for option, least in (("lr_warmup_iters", 0), ("lr_decay_iters", 1), ("lr_wsd_decay_iters", 1))
        if (length := getattr(config.optimizer, option)) is not None
    }
    return replace(config, optimizer=replace(config.optimizer, **schedule))
