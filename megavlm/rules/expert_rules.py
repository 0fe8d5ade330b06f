"""Rules about experts: what the router can choose, what EP and ETP must divide, and what experts do not support."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import wraps

from megavlm.config.derived import expert_tensor_parallel, fp8_in, has_experts, sequence_parallel, shards_gradients
from megavlm.config.lora import trained_whole
from megavlm.config.messages import divisors, nearest
from megavlm.config.schema import Config
from megavlm.rules.defaults import resolve_model, starts_from_weights


def tokens_find_experts(config: Config) -> str | None:
    experts = config.model.experts
    if experts.router_topk > experts.num_experts:
        return (
            f"model.experts.router_topk {experts.router_topk} is more than --num-experts {experts.num_experts}: lower "
            f"it to at most {experts.num_experts}"
        )
    if experts.router_topk == 1 and experts.router_score_function == "softmax" and not experts.router_pre_softmax:
        return (
            "model.experts.router_topk 1 gives the one chosen expert the weight 1, from which the router learns "
            "nothing: add --set model.experts.router_pre_softmax=true"
        )
    return None


def dense_layers_exist(config: Config) -> str | None:
    layers, count = config.model.experts.dense_layers, config.model.language.num_layers
    shown = " ".join(map(str, layers))
    if layers and max(layers) >= count:
        return f"model.experts.dense_layers {shown} must be layers that exist, 0 to {count - 1}: name those alone"
    if not any(has_experts(config.model, layer) for layer in range(count)):
        return (
            f"model.experts.dense_layers {shown} leaves no layer with experts: name fewer, or leave --num-experts out"
        )
    return None


def groups_of_experts_divide(config: Config) -> str | None:
    experts = config.model.experts
    groups, chosen = experts.router_num_groups, experts.router_group_topk
    if groups is None and chosen is None:
        return None
    if groups is None or chosen is None:
        names = ("router_group_topk", "router_num_groups")
        given, missing = names if groups is None else names[::-1]
        return f"model.experts.{given} needs model.experts.{missing}: add it, or leave both out"
    if experts.num_experts % groups:
        return (
            f"model.experts.router_num_groups {groups} does not divide --num-experts {experts.num_experts}: set it to "
            f"{divisors(experts.num_experts)}"
        )
    if chosen > groups:
        return (
            f"model.experts.router_group_topk {chosen} is more than model.experts.router_num_groups {groups}: lower it"
        )
    if experts.router_topk % chosen:
        return (
            f"model.experts.router_group_topk {chosen} does not divide model.experts.router_topk "
            f"{experts.router_topk}: set it to {divisors(experts.router_topk)}"
        )
    if experts.router_topk > chosen * (experts.num_experts // groups):
        return (
            f"model.experts.router_group_topk {chosen} leaves {chosen * (experts.num_experts // groups)} experts to "
            f"choose from, fewer than model.experts.router_topk {experts.router_topk}: raise it"
        )
    return None


def bias_has_sigmoid(config: Config) -> str | None:
    experts = config.model.experts
    if experts.router_enable_expert_bias and experts.router_score_function != "sigmoid":
        return (
            "model.experts.router_enable_expert_bias needs sigmoid scores: add --set "
            "model.experts.router_score_function=sigmoid, or leave the bias out"
        )
    return None


def experts_divide_over_ranks(config: Config) -> str | None:
    parallel, experts = config.parallel, resolve_model(config.model).experts
    ep, etp = parallel.expert_model_parallel_size, expert_tensor_parallel(config)
    tp = parallel.tensor_model_parallel_size
    if experts.num_experts % ep:
        return (
            f"--expert-model-parallel-size {ep} does not divide --num-experts {experts.num_experts}: set it to "
            f"{divisors(experts.num_experts)}"
        )
    if experts.ffn_hidden_size % etp:
        return (
            f"model.experts.ffn_hidden_size {experts.ffn_hidden_size} is not divisible by "
            f"--expert-tensor-parallel-size {etp}: {nearest(experts.ffn_hidden_size, etp)}, or set --etp to "
            f"{divisors(experts.ffn_hidden_size)}"
        )
    shared = experts.shared_ffn_hidden_size
    if shared is not None and shared % tp:
        return (
            f"model.experts.shared_ffn_hidden_size {shared} is not divisible by --tensor-model-parallel-size {tp}: "
            f"{nearest(shared, tp)}"
        )
    return None


def rows_of_experts_are_aligned(config: Config) -> str | None:
    """torch's grouped product reads rows of 16 bytes, on a CPU as on a GPU, also in FP8."""
    step = 16 if fp8_in("language", config) else 4 if config.precision.dtype == "fp32" else 8
    model, etp = resolve_model(config.model), expert_tensor_parallel(config)
    width, hidden = model.experts.ffn_hidden_size, model.language.hidden_size
    asks = "--fp8" if step == 16 else f"--precision {config.precision.dtype}"
    shared = model.experts.shared_ffn_hidden_size if step == 16 else None
    tp = config.parallel.tensor_model_parallel_size
    for flag, size, multiple, split in (
        ("model.language.hidden_size", hidden, step, ""),
        ("model.experts.ffn_hidden_size", width, step * etp, f" on --etp {etp}"),
        ("model.experts.shared_ffn_hidden_size", shared or 0, step * tp, f" on --tp {tp}"),
    ):
        if size % multiple:
            return (
                f"{flag} {size} is not a multiple of {multiple}, which experts with {asks} need{split}: "
                f"{nearest(size, multiple)}"
            )
    return None


def experts_have_sequence_parallelism(config: Config) -> str | None:
    """Without sequence parallelism all TP ranks would send the same tokens to the experts."""
    if config.parallel.tensor_model_parallel_size > 1 and not sequence_parallel(config):
        return "--num-experts with --tp above 1 needs sequence parallelism: leave --no-sequence-parallel out"
    return None


def experts_support(config: Config) -> str | None:
    """Refuse what does not know that experts have data-parallel groups of their own, or needs equal shapes."""
    parallel, precision = config.parallel, config.precision
    conflicts = {
        f"--data-parallel-sharding {parallel.data_parallel_sharding}: use --data-parallel-sharding optimizer": (
            shards_gradients(config)
        ),
        "--hybrid-shard-size: leave it out": parallel.hybrid_shard_size is not None,
        f"--fp8-recipe {precision.fp8_recipe}: use --fp8-recipe tensorwise, or --fp8-parts vision": (
            fp8_in("language", config) and precision.fp8_recipe != "tensorwise"
        ),
        "--fp8-param-gather: leave it out": precision.fp8_param_gather and fp8_in("language", config),
    }
    return next((f"--num-experts does not support {what}" for what, given in conflicts.items() if given), None)


def frozen_routers_have_no_bias(config: Config) -> str | None:
    """A bias that steps change is no frozen weight. Beside adapters, which do not hold it, it is frozen as well."""
    experts = config.model.experts
    rate = 0.0 if starts_from_weights(config) else 1e-3
    if experts.router_bias_update_rate is not None:
        rate = experts.router_bias_update_rate
    if experts.router_enable_expert_bias and rate and "language" not in trained_whole(config):
        return (
            "model.experts.router_enable_expert_bias changes the router's frozen bias each step: add "
            "--moe-router-bias-update-rate 0"
        )
    return None


def expert_ranks_divide(config: Config, world: int) -> str | None:
    """EP × ETP must divide the ranks of a pipeline stage, TP × CP × DP."""
    parallel = config.parallel
    ep, etp = parallel.expert_model_parallel_size, expert_tensor_parallel(config)
    ranks = world // parallel.pipeline_model_parallel_size
    if config.model.experts.num_experts and ranks % (ep * etp):
        return (
            f"--expert-model-parallel-size {ep} × --expert-tensor-parallel-size {etp} does not divide the {ranks} "
            f"processes of a pipeline stage (TP × CP × DP): use --ep {math.gcd(ranks, ep)} and --etp "
            f"{math.gcd(ranks // math.gcd(ranks, ep), etp)}, or other numbers whose product divides {ranks}"
        )
    return None


def _with_experts(*rules: Callable[[Config], str | None]) -> tuple[Callable[[Config], str | None], ...]:
    """Return the rules, which then hold for models without experts."""

    def limited(rule: Callable[[Config], str | None]) -> Callable[[Config], str | None]:
        @wraps(rule)
        def check(config: Config) -> str | None:
            return rule(config) if config.model.experts.num_experts else None

        return check

    return tuple(limited(rule) for rule in rules)


EXPERT_MODEL_RULES = _with_experts(
    tokens_find_experts, dense_layers_exist, groups_of_experts_divide, bias_has_sigmoid, frozen_routers_have_no_bias
)
EXPERT_LAYOUT_RULES = _with_experts(
    experts_divide_over_ranks, rows_of_experts_are_aligned, experts_have_sequence_parallelism, experts_support
)
