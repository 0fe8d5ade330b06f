"""Build the optimizer of a run from megatron-core's optimizers and the update rules of `optim.rules`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.optimizer_config import ParamKey, ParamWithNamePredicate
from torch import Tensor

from megavlm.arch.kinds import hidden_weight_of
from megavlm.arch.layers import part_of
from megavlm.config.derived import moments_folder, offloaded, shards_gradients
from megavlm.config.schema import Config
from megavlm.model.specs import DTYPES
from megavlm.optim.chained import MeanGradientOptimizer
from megavlm.optim.elementwise import AVERAGE, ElementwiseOptimizer
from megavlm.optim.fully_sharded import ShardedOptimizer
from megavlm.optim.master_weights import entries_of, held_layouts, round_in_one_launch
from megavlm.optim.matrices import MatrixShard, MatrixUpdates
from megavlm.optim.qk_clip import QKClip, clipped_layers
from megavlm.optim.rules import ELEMENTWISE, OF_MATRICES
from megavlm.optim.stores import DiskStore, HostStore, StateStore
from megavlm.parallel.groups import Groups
from megavlm.parallel.shards import ShardLayout


def build_optimizer(config: Config, chunks: Sequence[Any], groups: Groups) -> MeanGradientOptimizer:
    """Return the optimizer of this rank's parameters or shards, grouped by module and by weight decay."""
    options = config.optimizer
    dtype = DTYPES[config.precision.dtype]
    megatron_config = MegatronOptimizerConfig(
        optimizer="adam",  # until `_choose_update`
        lr=options.lr,
        min_lr=options.min_lr,
        weight_decay=options.weight_decay,
        clip_grad=0.0,  # part of the update: `MeanGradientOptimizer`
        bf16=dtype is torch.bfloat16,
        fp16=dtype is torch.float16,
        initial_loss_scale=options.initial_loss_scale,
        min_loss_scale=options.min_loss_scale,
        loss_scale_window=options.loss_scale_window,
        hysteresis=options.hysteresis,
        params_dtype=dtype,
        use_distributed_optimizer=config.parallel.data_parallel_sharding != "none",
        overlap_param_gather=bool(config.parallel.overlap_param_gather),
        fp8_recipe=config.precision.fp8_recipe if config.precision.fp8_param_gather else None,
    )
    if shards_gradients(config):
        parts = [ShardedOptimizer(chunks, megatron_config, _overrides(config), groups)]
    else:
        parts = get_megatron_optimizer(
            megatron_config,
            list(chunks),
            config_overrides=_overrides(config),
            use_gloo_process_groups=False,
            pg_collection=groups.collection,
        ).chained_optimizers
    for part in parts:
        # The share of one rank in gradients that as many ranks hold alike; megatron-core sums over no ranks by itself.
        part.share = part.get_grad_stats_parallel_group().size() / dist.get_world_size()
        part.grad_stats_parallel_group = groups.alone
        if not part.is_stub_optimizer:
            _choose_update(part, config)
            round_in_one_launch(part)
    matrices, qk_clip = [], []
    if (rule_of := OF_MATRICES.get(options.kind)) is not None:
        held = [MatrixShard(*each) for each in _held(parts, chunks) if hidden_weight_of(each[2].key, config.model)]
        device = chunks[0].device if shards_gradients(config) else next(chunks[0].parameters()).device
        matrices = [MatrixUpdates(held, config.model, rule_of(options), groups.collection.tp_dp_cp, device)]
    if layers := clipped_layers(config):
        qk_clip = [QKClip(_held(parts, chunks), layers, options)]
    return MeanGradientOptimizer(
        parts, clip=options.clip_grad, matrices=matrices, qk_clip=qk_clip, ema_decay=options.ema_decay
    )


def _choose_update(part: Any, config: Config) -> None:
    """Replace the inner optimizer of a megatron-core optimizer, before it has state, by the run's elementwise rule.

    megavlm's optimizer divides gradients as it reads them, which Transformer Engine's does not, and resumes sharded
    runs, which torch's does not.
    """
    options = config.optimizer
    rule = ELEMENTWISE[options.rule.elementwise.name]
    store = _store(part.optimizer, rule.state, config)
    part.optimizer = ElementwiseOptimizer.in_place_of(part.optimizer, rule, store, options)
    part.optimizer.beside = (AVERAGE,) * (options.ema_decay > 0)
    part.init_state_fn = lambda inner, config=None: inner.begin()


def _store(optimizer: torch.optim.Optimizer, names: Sequence[str], config: Config) -> StateStore:
    """Return the store for an optimizer's state: on the device, on the host or in a file."""
    off = offloaded(config)
    if (folder := moments_folder(config)) is not None:
        return DiskStore(folder, [p for group in optimizer.param_groups for p in group["params"]], names)
    if "parameters" in off and shards_gradients(config):  # state is on the host like its rows: no copies
        return StateStore()
    return HostStore() if "optimizer" in off else StateStore()


def _held(parts: Sequence[Any], chunks: Sequence[Any]) -> Iterator[tuple[ElementwiseOptimizer, Tensor, ShardLayout]]:
    """Yield (optimizer, fp32 weights, layout) for each trained parameter that this rank updates."""
    entries = entries_of(chunks)
    for part in parts:
        for _, weights, layout in held_layouts(part, entries):
            yield part.optimizer, weights, layout


def loss_scale(optimizer: Any) -> float | None:
    """Return fp16's loss scale for the next step; None in bf16 and fp32, which need no scale."""
    scaler = getattr(optimizer.chained_optimizers[0], "grad_scaler", None)
    return None if scaler is None else float(scaler.scale)


def chain_optimizers(first: MeanGradientOptimizer, *others: MeanGradientOptimizer) -> MeanGradientOptimizer:
    """Return one optimizer that steps all the given optimizers together."""
    parts = [part for optimizer in (first, *others) for part in optimizer.chained_optimizers]
    matrices = [each for optimizer in (first, *others) for each in optimizer.matrices]
    qk_clip = [each for optimizer in (first, *others) for each in optimizer.qk_clip]
    return MeanGradientOptimizer(parts, clip=first.clip, matrices=matrices, qk_clip=qk_clip, ema_decay=first.ema_decay)


def _overrides(config: Config) -> dict[ParamKey, Any]:
    """Return parameter group overrides: no decay of norms and biases, modules' own peak learning rates and floors."""
    options = config.optimizer
    overrides: dict[ParamKey, Any] = {
        ParamKey(with_name_predicate=ParamWithNamePredicate(name="no_decay", fn=_no_decay)): {"wd_mult": 0.0}
    }
    own = {"vision": options.vision_lr, "projector": options.projector_lr, "language": options.language_lr}
    for module, peak in own.items():
        if peak is None or peak == options.lr:
            continue
        ratio = peak / options.lr
        key = ParamKey(with_name_predicate=ParamWithNamePredicate(name=module, fn=partial(_in_module, module)))
        # lr_mult identifies the group in a checkpoint; the schedule reads max_lr and min_lr.
        overrides[key] = {"max_lr": peak, "min_lr": options.min_lr * ratio, "lr_mult": ratio}
    return overrides


def _no_decay(param: torch.nn.Parameter, name: str) -> bool:
    return param.dim() == 1 or name.endswith(".bias")


def _in_module(module: str, param: torch.nn.Parameter, name: str) -> bool:
    return part_of(name.removeprefix("module.")) == module
