"""Find the fp32 weights and moments that this rank holds of each trained parameter, whichever optimizer holds them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megatron.core.optimizer import DistributedOptimizer
from torch import Tensor

from megavlm.parallel.dtensor import local_part

MOMENTS = ("exp_avg", "exp_avg_sq")


def held_state(optimizer: Any) -> Iterator[tuple[Tensor, Mapping[str, Tensor]]]:
    """Yield each trained parameter with its fp32 weights ("param", unless they are the parameter) and its moments.

    With sharded state they are this rank's part. Moments are missing before the first update.
    """
    for part in optimizer.chained_optimizers:
        if part.is_stub_optimizer:
            continue
        if isinstance(part, DistributedOptimizer):
            for param in part.model_param_gbuf_map:
                held = part._get_main_param_and_optimizer_states(param)
                yield param, {kind: held[kind] for kind in ("param", *MOMENTS) if kind in held}
            continue
        model_params = _model_params(part)
        for main in (param for group in part.optimizer.param_groups for param in group["params"]):
            param = model_params.get(main, main)
            weights = {} if param is main else {"param": main}
            state = part.optimizer.state.get(main, {})
            yield param, weights | {kind: local_part(state[kind]) for kind in MOMENTS if kind in state}


def _model_params(part: Any) -> dict[Tensor, Tensor]:
    """Return the model's parameter of each fp32 copy of one, if an optimizer has such copies."""
    pairs = zip(getattr(part, "float16_groups", ()), getattr(part, "fp32_from_float16_groups", ()), strict=True)
    return {main: model for models, mains in pairs for model, main in zip(models, mains, strict=True)}
