"""Rules about the layout: what parallelism must divide, and what it does not support."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

from megavlm.arch.connector import Split, connector_of
from megavlm.arch.tensor_split import share_runs
from megavlm.config.derived import Offloaded, offloaded, replica_size, sequence_parallel
from megavlm.config.lora import frozen_parts
from megavlm.config.messages import divisors, nearest, plain
from megavlm.config.schema import Config
from megavlm.rules import Rule, WorldRule
from megavlm.rules.defaults import is_set, resolve_model
from megavlm.rules.expert_rules import expert_ranks_divide, experts_over_ranks, experts_support
from megavlm.rules.sharding_rules import SHARDING_RULES


def tensor_parallelism(config: Config) -> Iterator[str]:
    """Refuse widths of which a rank would hold padding alone; others that TP does not divide are padded."""
    parallel, model = config.parallel, config.model
    tp, length = parallel.tensor_model_parallel_size, config.train.seq_length
    vision_tp, option = parallel.vision_tensor_model_parallel_size, "--vision-tp"
    if config.placement.encoder == "stages":
        vision_tp, option = tp, "--tensor-model-parallel-size"
    if model.projector.kind != "linear" and is_set(model.projector, "hidden_size"):
        projector = ("model.projector.hidden_size", model.projector.hidden_size)
    else:
        projector = ("model.language.hidden_size (the width of the projector)", model.language.hidden_size)
    for name, width, of, ranks in (
        ("model.vision.ffn_hidden_size", model.vision.ffn_hidden_size, option, vision_tp),
        ("model.language.ffn_hidden_size", model.language.ffn_hidden_size, "--tensor-model-parallel-size", tp),
        (*projector, option, vision_tp),
    ):
        if not share_runs(width, ranks, ranks - 1):
            yield f"{name} {width} is too small for {of} {ranks}: {nearest(width, ranks)}"
    connector = connector_of(model.projector)
    for leaf, split in connector.splits(resolve_model(model)).items():
        if not _reaches_all(split, vision_tp):
            fits = next(ranks for ranks in range(vision_tp - 1, 0, -1) if _reaches_all(split, ranks))
            yield (
                f"{option} {vision_tp} leaves ranks without a part of {leaf} of --projector-kind {connector.name}: use "
                f"{fits}"
            )
    if parallel.sequence_parallel and tp == 1:
        yield (
            "--sequence-parallel shards over tensor-parallel ranks, but --tensor-model-parallel-size is 1: raise it, "
            "or leave --sequence-parallel out"
        )
    if sequence_parallel(config) and length % tp:
        yield (
            f"--seq-length {length} is not divisible by --tensor-model-parallel-size {tp}, over which it is sharded: "
            f"{nearest(length, tp)}, or give --no-sequence-parallel"
        )


def _reaches_all(split: Split, ranks: int) -> bool:
    """Return whether the last of so many ranks holds rows of a divided weight, and not padding alone."""
    part = split.part(ranks, ranks - 1)
    return part is None or bool(part.runs)


def colocated_encoder(config: Config) -> Iterator[str]:
    """Encoders divide a replica. Features that are computed before their step, or by another run, must not depend on
    the time of computation.
    """
    model, placement, ranks = config.model, config.placement, replica_size(config)
    shared = config.parallel.vision_tensor_model_parallel_size
    if ranks % shared:
        yield (
            f"--vision-tp {shared} does not divide the {ranks} processes of a model replica "
            f"(TP × CP × PP): set --vision-tp to {divisors(ranks)}"
        )
    if shared > 1 and placement.encode_ahead:
        yield (
            f"--encode-ahead runs the encoder concurrently with other communication, but with --vision-tp "
            f"{shared} the encoder communicates itself: leave one of them out"
        )
    for option, given in (("--encode-ahead", placement.encode_ahead), ("--vision-cache", placement.vision_cache)):
        if given and not {"vision", "projector"} <= {*frozen_parts(config)}:
            yield f"{option} needs a frozen encoder: add --freeze vision projector, or leave it out"
        if given and (model.hidden_dropout or model.attention_dropout):
            yield f"{option} needs features without dropout: set --hidden-dropout and --attention-dropout to 0"


def offload(config: Config) -> Iterator[str]:
    """Only moments can be on a disk. ZeRO-3 gathers weights layer by layer; what updates them is where they are."""
    kinds = []
    for word in config.execution.offload:
        kind, equals, place = word.partition("=")
        kinds.append(kind)
        if kind not in get_args(Offloaded) or (equals and kind != "optimizer"):
            yield f"--offload {plain(word)} is unknown: choose optimizer, activations, parameters or optimizer=nvme:DIR"
        if equals and not (place.startswith("nvme:") and place != "nvme:"):
            yield f"--offload {plain(word)} names no folder: write optimizer=nvme:DIR"
    if len(set(kinds)) < len(kinds):
        yield f"--offload names {kinds[-1]} twice: keep one"
    if "parameters" in offloaded(config) and config.parallel.data_parallel_sharding != "full":
        yield (
            "--offload parameters needs --data-parallel-sharding full, which gathers weights layer by layer: choose it,"
            " or leave parameters out"
        )
    if "parameters" in offloaded(config) and "optimizer" not in offloaded(config):
        yield "--offload parameters needs the optimizer beside them: use --offload optimizer parameters"


def world_divides(config: Config, world: int) -> Iterator[str]:
    parallel, ranks = config.parallel, replica_size(config)
    if world % ranks:
        cp = parallel.context_parallel_size
        yield (
            f"--tensor-model-parallel-size {parallel.tensor_model_parallel_size} × "
            + (f"--context-parallel-size {cp} × " if cp > 1 else "")
            + f"--pipeline-model-parallel-size {parallel.pipeline_model_parallel_size} needs a multiple of {ranks} "
            f"processes, but there are {world}: change them, or start torchrun with --nproc-per-node {ranks}"
        )


def groups_divide(config: Config, world: int) -> Iterator[str]:
    """Groups of data-parallel ranks divide them; neighbours that keep a second shard divide a group that shards."""
    parallel = config.parallel
    ranks = world // replica_size(config) * parallel.context_parallel_size
    if parallel.hybrid_shard_size is not None and ranks % parallel.hybrid_shard_size:
        yield (
            f"--hybrid-shard-size {parallel.hybrid_shard_size} does not divide {ranks} data-parallel ranks into "
            f"groups: use {divisors(ranks)}"
        )
    if parallel.compress_group_size is not None and ranks % parallel.compress_group_size:
        yield (
            f"parallel.compress_group_size {parallel.compress_group_size} does not divide {ranks} data-parallel ranks: "
            f"use {divisors(ranks)}"
        )
    shards = parallel.hybrid_shard_size or ranks
    if parallel.secondary_shard_size is not None and shards % parallel.secondary_shard_size:
        yield (
            f"--secondary-shard-size {parallel.secondary_shard_size} does not divide the {shards} ranks that shard: "
            f"use a divisor of {shards}, or leave it out"
        )


def global_batch_divides(config: Config, world: int) -> Iterator[str]:
    """Interleaved 1F1B needs a number of micro-batches that PP divides."""
    size, micro, ranks = config.train.global_batch_size, config.train.micro_batch_size, world // replica_size(config)
    pp = config.parallel.pipeline_model_parallel_size
    if size % (micro * ranks):
        yield (
            f"--global-batch-size {size} is not a multiple of --micro-batch-size {micro} × {ranks} data-parallel "
            f"ranks: {nearest(size, micro * ranks)}"
        )
    count = size // (micro * ranks)
    if config.parallel.virtual_pipeline_model_parallel_size > 1 and count % pp:
        yield (
            f"--global-batch-size {size} gives {count} micro-batches, and --virtual-pipeline-model-parallel-size > 1 "
            f"needs a multiple of --pipeline-model-parallel-size {pp}: {nearest(size, micro * ranks * pp)}"
        )


def profiled_ranks_exist(config: Config, world: int) -> Iterator[str]:
    for rank in config.logging.profile_ranks if config.logging.profile else ():
        if rank >= world:
            yield f"--profile-ranks {rank} is not a rank of {world} processes: use 0 to {world - 1}"


LAYOUT_RULES: tuple[Rule, ...] = (
    colocated_encoder,
    tensor_parallelism,
    experts_over_ranks,
    experts_support,
    *SHARDING_RULES,
    offload,
)

WORLD_RULES: tuple[WorldRule, ...] = (
    world_divides,
    expert_ranks_divide,
    groups_divide,
    global_batch_divides,
    profiled_ranks_exist,
)
