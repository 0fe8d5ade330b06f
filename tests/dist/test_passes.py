"""Bytes that a step reads and writes of gradients, master weights and moments, counted; what they are divided by."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.support.pool import Pools
from tests.support.training import SMALL, started

_WRITES_ONLY = ("zero_", "fill_", "copy_", "_foreach_zero_", "_foreach_copy_")  # of what they change


class Traffic(TorchDispatchMode):
    """Counts what operations on some tensors' memory read and write, by operation; backward passes are left out."""

    def __init__(self, tensors: list[Tensor]) -> None:
        super().__init__()
        self._watched = {tensor.untyped_storage()._cdata for tensor in tensors}
        self.bytes: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        schema = func._schema
        if schema.name.startswith("c10d"):
            return result
        views = any(each.alias_info is not None and not each.alias_info.is_write for each in schema.returns)
        if views or torch._C._current_graph_task_id() != -1 or not self._touches((args, kwargs)):
            return result
        name = schema.name.removeprefix("aten::")
        given = {argument.name: value for argument, value in zip(schema.arguments, args, strict=False)} | kwargs
        moved = 0
        for argument in schema.arguments:
            size = sum(x.numel() * x.element_size() for x in tree_leaves(given.get(argument.name)) if _is(x))
            written = argument.alias_info is not None and argument.alias_info.is_write
            if name.startswith("_fused_adam") and argument.name == "grads":
                written = given.get("grad_scale") is not None  # the kernels write divided gradients back, else nothing
            moved += size * (written + (not written or name not in _WRITES_ONLY))
        known = {id(x) for x in tree_leaves((args, kwargs))}
        moved += sum(x.numel() * x.element_size() for x in tree_leaves(result) if _is(x) and id(x) not in known)
        self.bytes[name] = self.bytes.get(name, 0) + moved
        return result

    def _touches(self, given: Any) -> bool:
        return any(_is(x) and x.untyped_storage()._cdata in self._watched for x in tree_leaves(given))


def _is(x: Any) -> bool:
    return isinstance(x, Tensor)


def bytes_per_parameter(argv: list[str], run_dir: str) -> dict[str, float]:
    """Of a step after the first, over the trained parameters of this rank; "total" is all of it."""

    from megavlm.train.loop import close
    from tests.support.live_bytes import standing_tensors

    run = started(argv, run_dir)
    batches = run.data_loader.next_step().batches
    run.engine.train_step(batches)
    weights = {param.untyped_storage()._cdata for chunk in run.engine.model_chunks for param in chunk.parameters()}
    state = [tensor for tensor in standing_tensors(run.engine) if tensor.untyped_storage()._cdata not in weights]
    traffic = Traffic(state)
    with traffic:
        run.engine.train_step(batches)
    trained = sum(p.numel() for chunk in run.engine.model_chunks for p in chunk.parameters() if p.requires_grad)
    close(run)
    found = {name: count / trained for name, count in traffic.bytes.items()}
    return {name: value for name, value in found.items() if value > 0.05} | {"total": sum(found.values())}


@pytest.mark.parametrize(
    ("world", "flags"),
    [(1, ""), (2, "--placement colocated --freeze vision")],
)
def test_gradients_are_cleared_measured_and_used_and_not_scaled(
    pools: Pools, tmp_path: Any, world: int, flags: str
) -> None:
    argv = [*SMALL, *"--precision bf16 --no-save".split(), *flags.split()]
    for found in pools(world).run(bytes_per_parameter, argv, str(tmp_path)):
        assert not {"mul_", "_foreach_mul_", "div_", "_foreach_div_", "mul", "div"} & found.keys()
        assert found["zero_"] == pytest.approx(4, rel=0.03)
        assert found["_foreach_norm"] == pytest.approx(4 / world, rel=0.03)
        assert found["_fused_adamw_"] == pytest.approx(32 / world, rel=0.03), "28, and divided gradients written back"
        if world == 1:
            assert found["total"] == pytest.approx(46, rel=0.01), "the rest is weights copied to bf16"
