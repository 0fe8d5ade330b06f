"""Find the fp32 weights and moments that this rank holds of each trained parameter, whichever optimizer holds them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megatron.core.optimizer import DistributedOptimizer
from torch import Tensor

from megavlm.parallel.dtensor import local_part


def held_state(optimizer: Any) -> Iterator[tuple[Tensor, Mapping[str, Tensor]]]:
    """Yield each trained parameter with its fp32 weights ("param", unless they are the parameter) and moments by name.

    With sharded state they are this rank's part. Moments are missing before the first update.
    """
    for part in optimizer.chained_optimizers:
        if part.is_stub_optimizer:
            continue
        if isinstance(part, DistributedOptimizer):
            for param in part.model_param_gbuf_map:
                yield param, part._get_main_param_and_optimizer_states(param)
            continue
        model = model_params(part)
        for main in (param for group in part.optimizer.param_groups for param in group["params"]):
            param = model.get(main, main)
            weights = {} if param is main else {"param": main}
            state = part.optimizer.state.get(main, {})
            yield param, weights | {kind: local_part(held) for kind, held in state.items()}


def model_params(part: Any) -> dict[Tensor, Tensor]:
    """Return the model's parameter of each fp32 copy of one, if one of megatron-core's optimizers has such copies."""
    pairs = zip(getattr(part, "float16_groups", ()), getattr(part, "fp32_from_float16_groups", ()), strict=True)
    return {main: model for models, mains in pairs for model, main in zip(models, mains, strict=True)}
