"""What verl's engines derive from and call, where verl is not installed: its names, signatures and formats."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from types import ModuleType
from typing import Any, ClassVar

import torch
from torch import Tensor


class BaseEngine:
    """The methods of an engine of verl 0.9.1, as `verl/workers/engine/base.py` declares them."""

    def initialize(self) -> Any: ...

    @property
    def is_param_offload_enabled(self) -> Any: ...

    @property
    def is_optimizer_offload_enabled(self) -> Any: ...

    def train_mode(self, **kwargs: Any) -> Any: ...

    def eval_mode(self, **kwargs: Any) -> Any: ...

    def optimizer_zero_grad(self) -> Any: ...

    def optimizer_step(self) -> Any: ...

    def lr_scheduler_step(self) -> Any: ...

    def forward_backward_batch(self, data: Any, loss_function: Any, forward_only: Any = False) -> Any: ...

    def get_per_tensor_param(self) -> Any: ...

    def get_data_parallel_size(self) -> Any: ...

    def get_data_parallel_rank(self) -> Any: ...

    def get_data_parallel_group(self) -> Any: ...

    def to(self, device: Any, model: Any = True, optimizer: Any = True, grad: Any = True) -> Any: ...

    def save_checkpoint(
        self, local_path: Any, hdfs_path: Any = None, global_step: Any = 0, max_ckpt_to_keep: Any = None, **kwargs: Any
    ) -> Any: ...

    def load_checkpoint(
        self, local_path: Any, hdfs_path: Any = None, del_local_after_load: Any = True, **kwargs: Any
    ) -> Any: ...

    def is_mp_src_rank_with_outputs(self) -> Any: ...

    def disable_adapter(self) -> Any: ...

    # These two are verl's own, which engines do not replace.
    def train_batch(self, data: Any, loss_function: Any) -> Any:
        self.optimizer_zero_grad()
        outputs = self.forward_backward_batch(data, loss_function, forward_only=False)
        norm = self.optimizer_step()
        if self.is_mp_src_rank_with_outputs():
            outputs["metrics"]["grad_norm"] = norm
        return outputs

    def infer_batch(self, data: Any, loss_function: Any = None) -> Any:
        with torch.no_grad():
            return self.forward_backward_batch(data, loss_function, forward_only=True)


@dataclass
class EngineConfig:
    """What a configuration of verl's engines has and this one reads."""

    strategy: str | None = None
    param_offload: bool = False
    optimizer_offload: bool = False


class EngineRegistry:
    """Registry of engine classes by model type, backend and device."""

    engines: ClassVar[dict[tuple[str, str, str], type]] = {}

    @classmethod
    def register(cls, model_type: str, backend: str, device: Sequence[str]) -> Callable[[type], type]:
        def add(engine: type) -> type:
            cls.engines |= {(model_type, backend, each): engine for each in device}
            return engine

        return add

    @classmethod
    def get_engine_cls(cls, model_type: str, backend: str) -> type:
        return cls.engines[model_type, backend, "cpu"]


class Batch(dict[str, Any]):
    """Tensors and lists by name with as many entries each, and other values."""

    def split(self, size: int) -> list[Batch]:
        count = len(self["input_ids"])
        return [self._part(slice(start, start + size), count) for start in range(0, count, size)]

    def _part(self, places: slice, count: int) -> Batch:
        def cut(value: Any) -> Any:
            if isinstance(value, Tensor) and value.is_nested:
                return torch.nested.as_nested_tensor(list(value.unbind()[places]), layout=torch.jagged)
            has_entries = isinstance(value, (Tensor, list)) and len(value) == count
            return value[places] if has_entries else value

        return Batch({name: cut(value) for name, value in self.items()})

    def to(self, device: Any) -> Batch:
        return self


def get_tensordict(tensor_dict: dict[str, Any], non_tensor_dict: dict[str, Any]) -> Batch:
    return Batch({**tensor_dict, **non_tensor_dict})


def assign_non_tensor(data: Batch, **values: Any) -> None:
    data.update(values)


def get(data: Batch, key: str, default: Any = None) -> Any:
    return data.get(key, default)


def prepare_micro_batches(
    data: Batch, dp_group: Any = None, num_batches_divided_by: int | None = None, same_micro_num_in_dp: bool = True
) -> tuple[list[Batch], None]:
    assert not data["use_dynamic_bsz"]
    return data.split(data["micro_batch_size_per_gpu"]), None


def postprocess_batch_func(output_lst: Sequence[dict[str, Any]], indices: None, data: Batch) -> dict[str, Any]:
    def joined(name: str) -> Tensor:
        sequences = [each for output in output_lst for each in output["model_output"][name].unbind()]
        return torch.nested.as_nested_tensor(sequences, layout=torch.jagged)

    return {
        "model_output": {name: joined(name) for name in output_lst[0]["model_output"]},
        "loss": [output["loss"] for output in output_lst],
        "metrics": {name: [output["metrics"][name] for output in output_lst] for name in output_lst[0]["metrics"]},
    }


def install() -> None:
    """Make `verl` importable, unless it is."""
    if "verl" in sys.modules or find_spec("verl") is not None:
        return
    for name in "utils utils.tensordict_utils workers workers.config workers.engine workers.engine.utils".split():
        module = sys.modules[f"verl.{name}"] = ModuleType(f"verl.{name}")
        vars(module).update({key: value for key, value in globals().items() if not key.startswith("__")})
    sys.modules["verl"] = ModuleType("verl")
    vars(sys.modules["verl.utils"])["tensordict_utils"] = sys.modules["verl.utils.tensordict_utils"]
