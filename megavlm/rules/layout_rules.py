"""Rules about the layout: constraints of tensor and pipeline parallelism on the model and the number of processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

from megavlm.arch.tensor_split import share_runs
from megavlm.config.derived import Offloaded, offloaded, replica_size, sequence_parallel
from megavlm.config.lora import frozen_parts
from megavlm.config.messages import divisors, nearest, plain
from megavlm.config.registry import registered
from megavlm.config.schema import Config, ModelConfig
from megavlm.rules.defaults import is_set, resolve_model
from megavlm.rules.expert_rules import EXPERT_LAYOUT_RULES, expert_ranks_divide
from megavlm.rules.sharding_rules import CONTEXT_RULES, SCHEDULE_RULES, SHARDING_RULES


def every_rank_has_a_part_of_mlps(config: Config) -> str | None:
    """Refuse widths of which a rank would hold padding alone; others that TP does not divide are padded."""
    parallel, model = config.parallel, config.model
    language, vision = ("--tensor-model-parallel-size", parallel.tensor_model_parallel_size), _vision_tp(config)
    widths = (
        (("model.vision.ffn_hidden_size", model.vision.ffn_hidden_size), vision),
        (("model.language.ffn_hidden_size", model.language.ffn_hidden_size), language),
        (_projector_width(model), vision),
    )
    for (flag, width), (option, tp) in widths:
        if not share_runs(width, tp, tp - 1):
            return f"{flag} {width} is too small for {option} {tp}: {nearest(width, tp)}"
    return _of_connector(model, *vision)


def _of_connector(model: ModelConfig, option: str, tp: int) -> str | None:
    """Refuse a layout in which a rank would hold padding alone of a weight that the connector divides."""
    connector: Any = registered("connectors")[model.projector.kind]
    for leaf, split in connector.splits(resolve_model(model)).items():

        def leaves_nothing(ranks: int, split: Any = split) -> bool:
            part = split.part(ranks, ranks - 1)
            return part is not None and not part.runs

        if leaves_nothing(tp):
            fits = next(ranks for ranks in range(tp - 1, 0, -1) if not leaves_nothing(ranks))
            return (
                f"{option} {tp} leaves ranks without a part of {leaf} of --projector-kind {connector.name}: use {fits}"
            )
    return None


def _vision_tp(config: Config) -> tuple[str, int]:
    """Return the option that sets the tensor parallelism of vision tower and projector, and its value."""
    parallel = config.parallel
    if config.placement.encoder == "stages":
        return "--tensor-model-parallel-size", parallel.tensor_model_parallel_size
    return "--vision-tp", parallel.vision_tensor_model_parallel_size


def encoders_divide_replica(config: Config) -> str | None:
    """--vision-tp must divide the ranks of a replica; such encoders communicate, so --encode-ahead is excluded."""
    parallel = config.parallel
    shared = parallel.vision_tensor_model_parallel_size
    if shared == 1:
        return None
    if config.placement.encoder != "colocated":
        return (
            f"--vision-tp {shared} needs a colocated encoder: add --placement colocated, or leave it out "
            "(in pipeline stages the encoder uses --tp)"
        )
    ranks = replica_size(config)
    if ranks % shared:
        return (
            f"--vision-tp {shared} does not divide the {ranks} processes of a model replica "
            f"(TP × CP × PP): set --vision-tp to {divisors(ranks)}"
        )
    if config.placement.encode_ahead:
        return (
            f"--encode-ahead runs the encoder concurrently with other communication, but with --vision-tp "
            f"{shared} the encoder communicates itself: leave one of them out"
        )
    return None


def _projector_width(model: ModelConfig) -> tuple[str, int]:
    if model.projector.kind != "linear" and is_set(model.projector, "hidden_size"):
        return "model.projector.hidden_size", model.projector.hidden_size
    return "model.language.hidden_size (the width of the projector)", model.language.hidden_size


def sequence_parallel_has_tp(config: Config) -> str | None:
    if config.parallel.sequence_parallel and config.parallel.tensor_model_parallel_size == 1:
        return (
            "--sequence-parallel shards over tensor-parallel ranks, but --tensor-model-parallel-size is 1: raise it, "
            "or leave --sequence-parallel out"
        )
    return None


def sequence_divides_over_tp(config: Config) -> str | None:
    tp, length = config.parallel.tensor_model_parallel_size, config.train.seq_length
    if sequence_parallel(config) and length % tp:
        return (
            f"--seq-length {length} is not divisible by --tensor-model-parallel-size {tp}, over which it is sharded: "
            f"{nearest(length, tp)}, or give --no-sequence-parallel"
        )
    return None


def interleaving_has_stages(config: Config) -> str | None:
    vpp = config.parallel.virtual_pipeline_model_parallel_size
    if vpp > 1 and config.parallel.pipeline_model_parallel_size == 1:
        return (
            f"--virtual-pipeline-model-parallel-size {vpp} interleaves pipeline stages, but "
            f"--pipeline-model-parallel-size is 1: raise it, or leave --virtual-pipeline-model-parallel-size at 1"
        )
    return None


def features_can_be_reused(config: Config) -> str | None:
    """Features computed before their step or by another run must not depend on the time of computation."""
    model, placement = config.model, config.placement
    asked = {"--encode-ahead": placement.encode_ahead, "--vision-cache": placement.vision_cache is not None}
    for option in (name for name, given in asked.items() if given):
        if placement.encoder != "colocated":
            return f"{option} needs a colocated encoder: add --placement colocated, or leave it out"
        if not {"vision", "projector"} <= {*frozen_parts(config)}:
            return f"{option} needs a frozen encoder: add --freeze vision projector, or leave it out"
        if model.hidden_dropout or model.attention_dropout:
            return f"{option} needs features without dropout: set --hidden-dropout and --attention-dropout to 0"
    return None


def offload_is_known(config: Config) -> str | None:
    """`--offload` names each kind once, and only the optimizer's moments can be on a disk."""
    kinds = []
    for word in config.execution.offload:
        kind, equals, place = word.partition("=")
        if kind not in get_args(Offloaded) or (equals and kind != "optimizer"):
            return (
                f"--offload {plain(word)} is unknown: choose optimizer, activations, parameters or optimizer=nvme:DIR"
            )
        if equals and not (place.startswith("nvme:") and place != "nvme:"):
            return f"--offload {plain(word)} names no folder: write optimizer=nvme:DIR"
        kinds.append(kind)
    if len(set(kinds)) < len(kinds):
        return f"--offload names {kinds[-1]} twice: keep one"
    return None


def offloaded_parameters_are_gathered(config: Config) -> str | None:
    """ZeRO-3 gathers weights through the device, layer by layer; what updates them is where they are."""
    if "parameters" not in offloaded(config):
        return None
    if config.parallel.data_parallel_sharding != "full":
        return (
            "--offload parameters needs --data-parallel-sharding full, which gathers weights layer by layer: choose it,"
            " or leave parameters out"
        )
    if "optimizer" not in offloaded(config):
        return "--offload parameters needs the optimizer beside them: use --offload optimizer parameters"
    return None


def world_divides(config: Config, world: int) -> str | None:
    parallel, ranks = config.parallel, replica_size(config)
    if world % ranks:
        cp = parallel.context_parallel_size
        return (
            f"--tensor-model-parallel-size {parallel.tensor_model_parallel_size} × "
            + (f"--context-parallel-size {cp} × " if cp > 1 else "")
            + f"--pipeline-model-parallel-size {parallel.pipeline_model_parallel_size} needs a multiple of {ranks} "
            f"processes, but there are {world}: change them, or start torchrun with --nproc-per-node {ranks}"
        )
    return None


def compressing_groups_divide(config: Config, world: int) -> str | None:
    size = config.parallel.compress_group_size
    ranks = _data_parallel_size(config, world) * config.parallel.context_parallel_size
    if size is not None and ranks % size:
        return f"parallel.compress_group_size {size} does not divide {ranks} data-parallel ranks: use {divisors(ranks)}"
    return None


def hybrid_shards_divide(config: Config, world: int) -> str | None:
    size = config.parallel.hybrid_shard_size
    ranks = _data_parallel_size(config, world) * config.parallel.context_parallel_size
    if size is not None and ranks % size:
        return (
            f"--hybrid-shard-size {size} does not divide {ranks} data-parallel ranks into groups: use {divisors(ranks)}"
        )
    return None


def secondary_shards_divide(config: Config, world: int) -> str | None:
    size = config.parallel.secondary_shard_size
    ranks = _data_parallel_size(config, world) * config.parallel.context_parallel_size
    shards = config.parallel.hybrid_shard_size or ranks
    if size is not None and shards % size:
        return (
            f"--secondary-shard-size {size} does not divide the {shards} ranks that shard: use a divisor of {shards}, "
            "or leave it out"
        )
    return None


def global_batch_divides(config: Config, world: int) -> str | None:
    train, ranks = config.train, _data_parallel_size(config, world)
    if train.global_batch_size % (train.micro_batch_size * ranks):
        return (
            f"--global-batch-size {train.global_batch_size} is not a multiple of --micro-batch-size "
            f"{train.micro_batch_size} × {ranks} data-parallel ranks: "
            f"{nearest(train.global_batch_size, train.micro_batch_size * ranks)}"
        )
    return None


def interleaving_has_microbatches(config: Config, world: int) -> str | None:
    """Interleaved 1F1B needs a number of micro-batches that PP divides."""
    train, pp = config.train, config.parallel.pipeline_model_parallel_size
    step = train.micro_batch_size * _data_parallel_size(config, world)
    count = train.global_batch_size // step
    if config.parallel.virtual_pipeline_model_parallel_size > 1 and count % pp:
        return (
            f"--global-batch-size {train.global_batch_size} gives {count} micro-batches, and "
            f"--virtual-pipeline-model-parallel-size > 1 needs a multiple of --pipeline-model-parallel-size {pp}: "
            f"{nearest(train.global_batch_size, step * pp)}"
        )
    return None


def profiled_ranks_exist(config: Config, world: int) -> str | None:
    for rank in config.logging.profile_ranks if config.logging.profile else ():
        if rank >= world:
            return f"--profile-ranks {rank} is not a rank of {world} processes: use 0 to {world - 1}"
    return None


def _data_parallel_size(config: Config, world: int) -> int:
    """Return the data-parallel size; `world_divides` runs first, so that it is at least 1."""
    return world // replica_size(config)


LAYOUT_RULES: tuple[Callable[[Config], str | None], ...] = (
    encoders_divide_replica,
    every_rank_has_a_part_of_mlps,
    sequence_parallel_has_tp,
    sequence_divides_over_tp,
    interleaving_has_stages,
    *SCHEDULE_RULES,
    *CONTEXT_RULES,
    *EXPERT_LAYOUT_RULES,
    features_can_be_reused,
    *SHARDING_RULES,
    offload_is_known,
    offloaded_parameters_are_gathered,
)

WORLD_RULES: tuple[Callable[[Config, int], str | None], ...] = (
    world_divides,
    expert_ranks_divide,
    hybrid_shards_divide,
    compressing_groups_divide,
    secondary_shards_divide,
    global_batch_divides,
    interleaving_has_microbatches,
    profiled_ranks_exist,
)
