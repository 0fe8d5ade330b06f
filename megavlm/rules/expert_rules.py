"""Rules about experts: sizes of the router's choice, divisibility by EP and ETP, and unsupported combinations."""

from __future__ import annotations

import math
from collections.abc import Iterator

from megavlm.config.derived import expert_tensor_parallel, fp8_in, has_experts, sequence_parallel, shards_gradients
from megavlm.config.lora_config import adapts_experts, trained_whole
from megavlm.config.messages import divisors, indivisible, nearest, no_divisor
from megavlm.config.schema import Config
from megavlm.rules.defaults import resolve_model, starts_from_weights


def router(config: Config) -> Iterator[str]:
    """Check the router's options. A bias that steps update needs a language model that is trained whole: otherwise it
    is frozen, also with adapters, which do not contain it.
    """
    experts, layers = config.model.experts, config.model.language.num_layers
    count, chosen = experts.num_experts, experts.router_topk
    if not count:
        return
    if chosen > count:
        yield f"model.experts.router_topk {chosen} is more than --num-experts {count}: lower it to at most {count}"
    if chosen == 1 and experts.router_score_function == "softmax" and not experts.router_pre_softmax:
        yield (
            "model.experts.router_topk 1 gives the one chosen expert the weight 1, from which the router learns "
            "nothing: add --set model.experts.router_pre_softmax=true"
        )
    dense = f"model.experts.dense_layers {' '.join(map(str, experts.dense_layers))}"
    if not any(has_experts(config.model, layer) for layer in range(layers)):
        yield f"{dense} leaves no layer with experts: name fewer, or leave --num-experts out"
    yield from _groups(config)
    if experts.router_enable_expert_bias and experts.router_score_function != "sigmoid":
        yield (
            "model.experts.router_enable_expert_bias needs sigmoid scores: add --set "
            "model.experts.router_score_function=sigmoid, or leave the bias out"
        )
    if experts.own_norms and experts.shared_ffn_hidden_size is None:
        yield "model.experts.own_norms is of models with a shared expert: add model.experts.shared_ffn_hidden_size"
    for name, given in (("own_norms", experts.own_norms), ("add_bias", experts.add_bias)):
        if given and config.lora.train_router:
            yield f"model.experts.{name} and lora.train_router cannot be combined: leave one of them out"
    if experts.add_bias and experts.shared_ffn_hidden_size is not None:
        yield "model.experts.add_bias is of routed experts: leave model.experts.shared_ffn_hidden_size out"
    if experts.add_bias and adapts_experts(config):
        yield "model.experts.add_bias does not support adapters of routed experts: leave experts out of --lora-targets"
    rate = experts.router_bias_update_rate
    moves = not starts_from_weights(config) if rate is None else rate > 0
    if experts.router_enable_expert_bias and moves and "language" not in trained_whole(config):
        yield (
            "model.experts.router_enable_expert_bias changes the router's frozen bias each step: add "
            "--moe-router-bias-update-rate 0"
        )


def _groups(config: Config) -> Iterator[str]:
    """Check group-limited routing: a token chooses equally many experts from each of its chosen groups."""
    experts = config.model.experts
    count, groups, chosen = experts.num_experts, experts.router_num_groups, experts.router_group_topk
    option, topk = f"model.experts.router_group_topk {chosen}", experts.router_topk
    if groups is None or chosen is None:
        names = ("router_group_topk", "router_num_groups")
        given, missing = names if groups is None else names[::-1]
        if groups != chosen:
            yield f"model.experts.{given} needs model.experts.{missing}: add it, or leave both out"
        return
    if count % groups:
        yield no_divisor("model.experts.router_num_groups", groups, f"--num-experts {count}", count)
    if chosen > groups:
        yield f"{option} is more than model.experts.router_num_groups {groups}: lower it"
    if topk % chosen:
        yield no_divisor("model.experts.router_group_topk", chosen, f"model.experts.router_topk {topk}", topk)
    if topk > (left := chosen * (count // groups)):
        yield f"{option} leaves {left} experts to choose from, fewer than model.experts.router_topk {topk}: raise it"


def experts_over_ranks(config: Config) -> Iterator[str]:
    """Check that EP and ETP divide the experts. torch's grouped product needs rows of a multiple of 16 bytes, on CPUs
    and GPUs, also in FP8. Without sequence parallelism all TP ranks would send the same tokens to the experts.
    """
    count = config.model.experts.num_experts
    if not count:
        return
    model, etp = resolve_model(config.model), expert_tensor_parallel(config)
    ep, tp = config.parallel.expert_model_parallel_size, config.parallel.tensor_model_parallel_size
    width, shared = model.experts.ffn_hidden_size, model.experts.shared_ffn_hidden_size
    if count % ep:
        yield no_divisor("--expert-model-parallel-size", ep, f"--num-experts {count}", count)
    if width % etp:
        problem = indivisible("model.experts.ffn_hidden_size", width, "--expert-tensor-parallel-size", etp)
        yield f"{problem}, or set --etp to {divisors(width)}"
    if shared is not None and shared % tp:
        yield indivisible("model.experts.shared_ffn_hidden_size", shared, "--tensor-model-parallel-size", tp)
    if model.experts.add_bias and model.language.hidden_size % etp:
        hidden = model.language.hidden_size
        problem = indivisible("model.language.hidden_size", hidden, "--expert-tensor-parallel-size", etp)
        yield f"{problem}, or set --etp to {divisors(hidden)}"
    step = 16 if fp8_in("language", config) else 4 if config.precision.dtype == "fp32" else 8
    asks = "--fp8" if step == 16 else f"--precision {config.precision.dtype}"
    for flag, size, multiple, split in (
        ("model.language.hidden_size", model.language.hidden_size, step, ""),
        ("model.experts.ffn_hidden_size", width, step * etp, f" on --etp {etp}"),
        ("model.experts.shared_ffn_hidden_size", (shared or 0) * (step == 16), step * tp, f" on --tp {tp}"),
    ):
        if size % multiple:
            yield (
                f"{flag} {size} is not a multiple of {multiple}, which experts with {asks} need{split}: "
                f"{nearest(size, multiple)}"
            )
    if tp > 1 and not sequence_parallel(config):
        yield "--num-experts with --tp above 1 needs sequence parallelism: leave --no-sequence-parallel out"


def experts_support(config: Config) -> Iterator[str]:
    """Refuse options that do not support the experts' own data-parallel groups, or that need equal shapes."""
    parallel, precision, in_fp8 = config.parallel, config.precision, fp8_in("language", config)
    if not config.model.experts.num_experts:
        return
    option = "--num-experts does not support"
    if shards_gradients(config):
        sharding = parallel.data_parallel_sharding
        yield f"{option} --data-parallel-sharding {sharding}: use --data-parallel-sharding optimizer"
    if parallel.hybrid_shard_size is not None:
        yield f"{option} --hybrid-shard-size: leave it out"
    if in_fp8 and precision.fp8_recipe != "tensorwise":
        recipe = precision.fp8_recipe
        yield f"{option} --fp8-recipe {recipe}: use --fp8-recipe tensorwise, or --fp8-parts vision"
    if in_fp8 and precision.fp8_param_gather:
        yield f"{option} --fp8-param-gather: leave it out"


def expert_ranks_divide(config: Config, world: int) -> Iterator[str]:
    """Check that EP × ETP divides the ranks of a pipeline stage, TP × CP × DP."""
    parallel = config.parallel
    ep, etp = parallel.expert_model_parallel_size, expert_tensor_parallel(config)
    ranks = world // parallel.pipeline_model_parallel_size
    if config.model.experts.num_experts and ranks % (ep * etp):
        yield (
            f"--expert-model-parallel-size {ep} × --expert-tensor-parallel-size {etp} does not divide the {ranks} "
            f"processes of a pipeline stage (TP × CP × DP): use --ep {math.gcd(ranks, ep)} and --etp "
            f"{math.gcd(ranks // math.gcd(ranks, ep), etp)}, or other numbers whose product divides {ranks}"
        )
