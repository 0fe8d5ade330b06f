"""The valid range of each numeric option; `rules.py` relates options to one another.

A test checks that every numeric field of the schema is in exactly one range or in `UNRANGED`, or says its own
(`option(valid=…)`), as those of extensions do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from megavlm.config.fields import Option, options, value_at
from megavlm.config.option import Valid
from megavlm.config.schema import Config


@dataclass(frozen=True)
class Range:
    """`holds(value)` is true for valid values of the options `keys`; messages say "must be " + `words`."""

    words: str
    holds: Callable[[float], bool]
    keys: tuple[str, ...]


RANGES = (
    Range(
        "from 1 to 10,000",  # plans and dry runs look at each
        lambda value: 1 <= value <= 10_000,
        ("model.vision.num_layers", "model.language.num_layers"),
    ),
    Range("from 0 to 10,000", lambda value: 0 <= value <= 10_000, ("data.images_per_sample",)),
    Range("from 1 to 1,048,576", lambda value: 1 <= value <= 2**20, ("train.global_batch_size",)),
    Range(
        "at least 1",
        lambda value: value >= 1,
        (
            "model.vision.hidden_size",
            "model.vision.ffn_hidden_size",
            "model.vision.num_attention_heads",
            "model.vision.image_size",
            "model.vision.patch_size",
            "model.vision.in_channels",
            "model.vision.temporal_patch_size",
            "model.vision.window_size",
            "model.language.window_size",
            "model.projector.hidden_size",
            "model.projector.merge_channels",
            "model.projector.pixel_shuffle",
            "model.projector.anyres_max_tiles",
            "model.language.hidden_size",
            "model.language.ffn_hidden_size",
            "model.language.num_attention_heads",
            "model.language.num_query_groups",
            "model.language.kv_channels",
            "model.language.vocab_size",
            "model.language.rope_original_positions",
            "model.language.max_positions",
            "model.objective.matryoshka_widths",
            "model.experts.router_topk",
            "model.experts.ffn_hidden_size",
            "model.experts.shared_ffn_hidden_size",
            "model.experts.router_num_groups",
            "model.experts.router_group_topk",
            "parallel.tensor_model_parallel_size",
            "parallel.compress_group_size",
            "parallel.pipeline_model_parallel_size",
            "parallel.virtual_pipeline_model_parallel_size",
            "parallel.context_parallel_size",
            "parallel.expert_model_parallel_size",
            "parallel.expert_tensor_parallel_size",
            "parallel.vision_tensor_model_parallel_size",
            "placement.encoder_chunk_patches",
            "execution.loss_chunk_tokens",
            "parallel.hybrid_shard_size",
            "parallel.secondary_shard_size",
            "parallel.ddp_bucket_size",
            "train.train_iters",
            "train.micro_batch_size",
            "train.seq_length",
            "run.world_size",
            "precision.fp8_amax_history_len",
            "optimizer.lr_decay_iters",
            "optimizer.loss_scale_window",
            "optimizer.hysteresis",
            "optimizer.lr_wsd_decay_iters",
            "data.image_sizes",
            "data.max_image_pixels",
            "data.min_pixels",
            "data.max_pixels",
            "data.video_max_frames",
            "data.video_max_tokens",
            "data.packing_window",
            "evaluation.eval_samples",
            "evaluation.eval_iters",
            "evaluation.sample_count",
            "evaluation.sample_max_new_tokens",
            "logging.log_interval",
            "logging.profile_step_end",
            "numerics.max_consecutive_skips",
        ),
    ),
    Range(
        "at least 0",
        lambda value: value >= 0,
        (
            "lora.rank",
            "precision.num_layers_at_start_in_bf16",
            "precision.num_layers_at_end_in_bf16",
            "precision.fp8_margin",
            "placement.encoder_keep_chunks",
            "optimizer.min_lr",
            "optimizer.vision_lr",
            "optimizer.projector_lr",
            "optimizer.language_lr",
            "optimizer.lr_warmup_iters",
            "optimizer.weight_decay",
            "optimizer.clip_grad",
            "model.vision.full_attention_layers",
            "model.language.full_attention_layers",
            "model.experts.dense_layers",
            "model.experts.router_bias_update_rate",
            "model.experts.aux_loss_coeff",
            "model.experts.z_loss_coeff",
            "model.vision.deepstack_layers",
            "model.language.mrope_section",
            "model.image_token",
            "model.video_token",
            "data.imageless_samples",
            "data.num_workers",
            "data.worker_timeout",
            "checkpoint.save_interval",
            "checkpoint.keep_checkpoints",
            "checkpoint.keep_every",
            "evaluation.eval_interval",
            "evaluation.sample_interval",
            "logging.profile_step_start",
            "logging.profile_ranks",
            "numerics.check_weight_hash_across_dp_replicas_interval",
            "numerics.verify_micro_batch_interval",
            "run.hang_timeout",
        ),
    ),
    Range(
        "greater than 0",
        lambda value: value > 0,
        (
            "model.init_method_std",
            "model.objective.temperature",
            "model.video_steps_per_second",
            "data.video_fps",
            "model.vision.rotary_base",
            "model.vision.norm_epsilon",
            "model.language.rotary_base",
            "model.projector.norm_epsilon",
            "model.language.norm_epsilon",
            "model.language.local_rotary_base",
            "model.language.softmax_scale",
            "model.language.embedding_scale",
            "model.experts.router_topk_scaling_factor",
            "model.language.rope_scaling_factor",
            "model.language.rope_beta_fast",
            "model.language.rope_beta_slow",
            "model.language.rope_low_freq_factor",
            "model.language.rope_high_freq_factor",
            "parallel.distributed_timeout_minutes",
            "placement.vision_cache_size",
            "lora.alpha",
            "train.epochs",
            "optimizer.lr",
            "optimizer.qk_clip_threshold",
            "optimizer.initial_loss_scale",
            "optimizer.min_loss_scale",
        ),
    ),
    Range("0 or greater than 1", lambda value: value == 0 or value > 1, ("numerics.spike_factor",)),
    Range(
        "at least 0 and less than 1",
        lambda value: 0 <= value < 1,
        (
            "model.attention_dropout",
            "model.hidden_dropout",
            "lora.dropout",
            "optimizer.lr_warmup_fraction",
            "data.validation_split",
            "optimizer.ema_decay",
        ),
    ),
    Range(
        "between 0 and 1",
        lambda value: 0 <= value <= 1,
        ("data.imageless_share", "data.max_bad_sample_rate", "optimizer.qk_clip_alpha"),
    ),
    Range(
        "greater than 0 and at most 1",
        lambda value: 0 < value <= 1,
        ("data.answer_share", "model.language.rotary_percent"),
    ),
    # The seeds that all random generators of a run accept; numpy has the tightest bound.
    Range("between 0 and 2**32 − 1", lambda value: 0 <= value < 2**32, ("train.seed",)),
    Range("0, or at least 2", lambda value: value == 0 or value >= 2, ("model.experts.num_experts",)),
)

# The bounds of these depend on other options; rules.py and the planner check them.
UNRANGED = ("model.vision.feature_layer", "model.objective.sigmoid_bias", "placement.pipeline_cuts")


def out_of_range(config: Config) -> Iterator[str]:
    """Yield a message for each value outside its range, in the order of `RANGES`, and of options that say theirs."""
    table = {option.key: option for option in options()}
    ranges: list[tuple[Option, Range | Valid]] = [(table[key], allowed) for allowed in RANGES for key in allowed.keys]
    ranges += [(option, option.valid) for option in table.values() if option.valid is not None]
    for option, valid in ranges:
        value = value_at(config, option.path)
        for number in value if option.kind.many else (value,):
            if number is not None and not valid.holds(number):
                yield f"{option.flag} {number} must be {valid.words}"
