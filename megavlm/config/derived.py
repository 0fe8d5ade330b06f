"""Facts about a run that follow from several options: sharding, overlap, FP8, and sizes of the model's features."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, get_args

from megavlm.config.schema import Config, LanguageConfig, ModelConfig, VisionConfig
from megavlm.storage import is_url
from megavlm.storage.hub import repository

_COPY_MINUTES = 60.0  # to copy a model of 150 GB at 40 MB/s
Offloaded = Literal["optimizer", "activations", "parameters"]
Precision = str  # of a layer's linear layers: "high" (that of --precision) or "fp8"


def sequence_parallel(config: Config) -> bool:
    """Return whether sequence parallelism is on: --sequence-parallel, or its default (on if TP > 1)."""
    asked = config.parallel.sequence_parallel
    return config.parallel.tensor_model_parallel_size > 1 if asked is None else asked


def replica_size(config: Config) -> int:
    """Return the number of ranks of a model replica: TP × CP × PP."""
    parallel = config.parallel
    tp, cp = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    return tp * cp * parallel.pipeline_model_parallel_size


def has_experts(model: ModelConfig, layer: int) -> bool:
    """Return whether language layer number `layer` has experts in place of its MLP."""
    return model.experts.num_experts > 0 and layer not in model.experts.dense_layers


def expert_tensor_parallel(config: Config) -> int:
    """Return the number of ranks that split each expert: --etp, or its default (TP if EP is 1, else 1)."""
    parallel = config.parallel
    if parallel.expert_tensor_parallel_size is not None:
        return parallel.expert_tensor_parallel_size
    return parallel.tensor_model_parallel_size if parallel.expert_model_parallel_size == 1 else 1


def shards_gradients(config: Config) -> bool:
    """Return whether gradients are sharded (ZeRO-2 and 3, by torch's fully_shard; stages 0 and 1 use megatron-core)."""
    return config.parallel.data_parallel_sharding in ("optimizer_gradients", "full")


def offloaded(config: Config) -> tuple[Offloaded, ...]:
    """Return the kinds of tensors that `--offload` keeps in host memory or on a disk."""
    words = {word.partition("=")[0] for word in config.execution.offload}
    return tuple(kind for kind in get_args(Offloaded) if kind in words)


MOST_QUEUES = 32  # CUDA's maximum number of hardware queues


def moments_folder(config: Config) -> Path | None:
    """Return the folder of `--offload optimizer=nvme:DIR`; None if optimizer state is in memory."""
    folders = (word.partition("=nvme:")[2] for word in config.execution.offload)
    return next((Path(folder) for folder in folders if folder), None)


def device_queues(config: Config) -> int | None:
    """Return the number of hardware queues for a GPU's kernels (CUDA_DEVICE_MAX_CONNECTIONS); None: CUDA's default.

    In one queue, kernels start in the order of their launch; on GPUs before Blackwell, tensor-parallel communication
    then starts together with the matrix products that it overlaps. FSDP2's transfers and --encode-ahead need the
    opposite: their kernels must be able to start before earlier launches of other streams.
    """
    if shards_gradients(config) or config.placement.encode_ahead:
        return MOST_QUEUES
    return 1 if config.parallel.tensor_model_parallel_size > 1 else None


def starts_from(config: Config) -> dict[str, str]:
    """Return the folders, URLs and hub names of initial weights, by the option that names them."""
    given = config.checkpoint
    places = {
        "--init-from": given.init_from,
        "--vision-from": given.vision_from,
        "--language-from": given.language_from,
        "--projector-from": given.projector_from,
    }
    return {option: place for option, place in places.items() if place}


def minutes_to_meet(config: Config) -> float:
    """Return the minutes that ranks wait for one another at the start.

    Before they meet, each node copies a model from a store or the hub, which takes minutes without a local copy.
    """
    timeout = config.parallel.distributed_timeout_minutes
    copied = any(is_url(place) or repository(place, "") for place in starts_from(config).values())
    return max(timeout, _COPY_MINUTES) if copied else timeout


def overlapped(config: Config, *, dp: int) -> Config:
    """Return the configuration with unset overlap options at their defaults: on if there are several replicas.

    The defaults are the same on every device. A CPU gains nothing, but its tests run what a GPU runs.
    """
    parallel = config.parallel
    pays = dp > 1 and not shards_gradients(config)  # FSDP2 overlaps on its own
    reduce, gather = parallel.overlap_grad_reduce, parallel.overlap_param_gather
    if reduce is None:
        reduce = pays or bool(gather)
    if gather is None:
        sharded = parallel.data_parallel_sharding != "none"
        gather = pays and reduce and sharded
    return replace(config, parallel=replace(parallel, overlap_grad_reduce=reduce, overlap_param_gather=gather))


def layer_precision(name: str, config: Config) -> Precision:
    """Return the precision of a layer's linear layers, by its global name: "fp8" or "high".

    "fp8" are the transformer layers of `--fp8-parts`, except first and last ones kept in bf16. Patch embedding,
    projector, embedding, norms, attention scores and the output layer are always "high".
    """
    part, _, rest = name.partition(".layers.")
    precision = config.precision
    if precision.fp8 == "none" or part not in precision.fp8_parts or not rest:
        return "high"
    number, last = int(rest.partition(".")[0]), layers_that_run(part, config)
    if precision.first_last_layers_bf16:
        inside = precision.num_layers_at_start_in_bf16 <= number < last - precision.num_layers_at_end_in_bf16
        return "fp8" if inside else "high"
    return "fp8"


def decoder_layers(language: LanguageConfig) -> int:
    """Return the number of transformer layers of the language model, including those of multi-token prediction."""
    return language.num_layers + language.mtp_layers


def layers_that_run(part: str, config: Config) -> int:
    """Return the number of a part's layers that run; vision layers after model.vision.feature_layer do not."""
    if part == "language":
        return config.model.language.num_layers
    return config.model.vision.num_layers + 1 + config.model.vision.feature_layer


def fp8_multiple(recipe: str) -> int:
    """Return the multiple of tokens and channels that FP8 matrix products need: 16 (cuBLAS), 32 (MXFP8 blocks)."""
    return 32 if recipe == "mxfp8" else 16


def fp8_in(part: str, config: Config) -> bool:
    """Return whether any layer of a part of the model may run in FP8."""
    return config.precision.fp8 != "none" and part in config.precision.fp8_parts


def sequence_multiple(part: str, config: Config, *, tp: int) -> int:
    """Return the multiple to which a part's sequence length is padded, for sequence parallelism and FP8."""
    shards = tp if sequence_parallel(config) else 1
    return shards * fp8_multiple(config.precision.fp8_recipe) if fp8_in(part, config) else shards


def masks_attention(language: LanguageConfig) -> bool:
    """Return whether some layers need attention masks: for sliding windows, or because all layers need masks."""
    return language.window_size is not None or masks_all_layers(language)


def masks_all_layers(language: LanguageConfig) -> bool:
    """Return whether all layers need attention masks: images or prefixes are bidirectional, or attention is eager."""
    return language.bidirectional_images or language.bidirectional_prefix or needs_eager_attention(language)


def needs_eager_attention(language: LanguageConfig) -> bool:
    """Return whether attention runs operation by operation, as no fused kernel here has a softcap or sinks."""
    return language.attention_softcap is not None or language.attention_sinks


def attends_in_window(language: LanguageConfig, layer: int) -> bool:
    """Return whether language layer number `layer` has a sliding window."""
    return language.window_size is not None and layer not in language.full_attention_layers


def attends_both_ways(language: LanguageConfig) -> bool:
    """Return whether tokens of an image attend to one another both ways, in all layers or in those with a window."""
    return language.bidirectional_images or language.bidirectional_windows


def of_layer(language: LanguageConfig, layer: int) -> LanguageConfig:
    """Return the language model as its layer number `layer` sees it: heads may be others without a sliding window."""
    return (windowed if attends_in_window(language, layer) else unwindowed)(language)


def windowed(language: LanguageConfig) -> LanguageConfig:
    """Return the language model as its layers with a sliding window see it."""
    return _with(language, keys_as_values=False) if language.keys_as_values else language


def unwindowed(language: LanguageConfig) -> LanguageConfig:
    """Return the language model as its layers without a sliding window see it."""
    width, groups = language.global_kv_channels, language.global_query_groups
    if width is None and groups is None:
        return language
    return _with(
        language, kv_channels=width or language.kv_channels, num_query_groups=groups or language.num_query_groups
    )


@lru_cache(maxsize=256)
def _with(language: LanguageConfig, **changed: Any) -> LanguageConfig:
    return replace(language, **changed)


def learned_positions(vision: VisionConfig) -> int:
    """Return the number of learned positions of the vision encoder, that of the class token included."""
    if vision.position_embedding == "rope2d":
        return 0
    if vision.position_embedding == "axes_rope2d":
        return 2 * vision.axis_positions
    return (vision.image_size // vision.patch_size) ** 2 + vision.class_token


def is_gated(vision: VisionConfig) -> bool:
    """Return whether the vision MLP has a gate."""
    return vision.activation in ("swiglu", "geglu")


def norms_of_layer(language: LanguageConfig) -> int:
    """Return the number of norms of hidden states in a language layer, both input norms and output norms."""
    return (2 - language.parallel_block) * language.input_norms + 2 * language.post_norms


def has_norms_apart(language: LanguageConfig) -> bool:
    """Return whether norms cannot be fused into linear layers: no input norm, one for both branches, or LayerNorm."""
    return not language.input_norms or language.parallel_block or language.normalization == "LayerNorm"


def is_linear(language: LanguageConfig, layer: int) -> bool:
    """Return whether language layer number `layer` has linear attention."""
    return layer in language.linear_attention_layers


def is_latent(language: LanguageConfig) -> bool:
    """Return whether the layers of a language model have multi-head latent attention."""
    return language.kv_lora_rank is not None


def has_vision(model: ModelConfig) -> bool:
    """Return whether a model takes images: it has a vision encoder, or embeds patches without one."""
    return model.vision.num_layers > 0 or model.vision.encoder_free


def tower_merge(vision: VisionConfig) -> int:
    """Return the side in patches of the blocks that the vision encoder itself merges; 1 if it merges none."""
    return 1 if vision.merger_layer is None else 2


def audio_tower(model: ModelConfig) -> VisionConfig:
    """Return the options of the audio encoder's layers as a vision encoder's; they differ by a bias of keys alone.

    A bias of keys adds the same number to all scores of a query, so that softmax and gradients do not depend on it.
    """
    audio = model.audio
    return VisionConfig(
        num_layers=audio.num_layers,
        hidden_size=audio.hidden_size,
        ffn_hidden_size=audio.ffn_hidden_size,
        num_attention_heads=audio.num_attention_heads,
    )


def usual_side(model: ModelConfig) -> int:
    """Return the side in pixels of a typical image: model.vision.image_size, rounded down to whole features."""
    feature = model.vision.patch_size * model.projector.pixel_shuffle
    return max(model.vision.image_size // feature, 1) * feature


def block_side(model: ModelConfig) -> int:
    """Return the side of the blocks that the projector merges, in patches after the vision encoder's own merging."""
    return model.projector.pixel_shuffle // tower_merge(model.vision)


def block_channels(model: ModelConfig) -> int:
    """Return the number of channels of all patches together in a block that the projector merges."""
    return model.vision.hidden_size * block_side(model) ** 2


def projector_inputs(model: ModelConfig) -> int:
    """Return the channels of a merged feature: of all patches of a block, `merge_channels`, or those of one patch."""
    if model.projector.merge == "concatenate":
        return block_channels(model)
    return model.projector.merge_channels or model.vision.hidden_size


def rotary_channels(language: LanguageConfig) -> int:
    """Return how many channels of an attention head have rotary embedding."""
    if is_latent(language):
        return language.qk_pos_emb_head_dim
    if language.rope_scaling == "proportional":
        return language.kv_channels
    return int(language.kv_channels * language.rotary_percent)
