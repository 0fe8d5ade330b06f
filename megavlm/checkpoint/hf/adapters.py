"""Write LoRA adapters in PEFT's format, or fold them into the weights. The names come from the family's table.

megavlm trains one adapter each for query, key and value. If the Hugging Face model has one fused linear layer for the
three, PEFT's A is the concatenation of the three A and its B is block-diagonal: rank 3r with alpha 3α computes the
same. Adapters of routed experts become PEFT's adapters of parameters (`target_parameters`), and trained routers and a
reward head become modules that PEFT saves whole (`modules_to_save`).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from megavlm.arch.objectives import HEAD
from megavlm.checkpoint.folders import rename_flushed
from megavlm.checkpoint.hf.checkpoint_reader import TrainedReader, TrainedRecords
from megavlm.checkpoint.hf.pretrained import SCORE
from megavlm.checkpoint.hf.sidecar import exportable, family_at
from megavlm.config.lora_config import LINEAR_ATTENTION, frozen_parts, is_adapter, trained_whole
from megavlm.config.schema import Config, LoraConfig, ModelConfig
from megavlm.errors import UserError
from megavlm.families.shared.family import Family
from megavlm.families.shared.table import QKV, FusedQKV, Grouped, Rename, Rule, Table
from megavlm.files import replace_file
from megavlm.model.weights import real_shape

PREFIX = "base_model.model."
QKV_LINEARS = ("q_proj", "k_proj", "v_proj")
MLP_LINEARS = ("gate_proj", "up_proj")


@dataclass(frozen=True)
class Adapters:
    """The adapters of one linear layer of megavlm, in fp32: projection (such as "q_proj") → (A [r, K], B [M, r]).

    For all experts of a layer, the shapes are A [E, r, K] and B [E, M, r].
    """

    pairs: Mapping[str, tuple[Tensor, Tensor]]

    @property
    def of_experts(self) -> tuple[Tensor, Tensor] | None:
        """Return (A, B) if the linear layer is that of all routed experts of a layer, else None."""
        first, *_ = self.pairs.values()
        return first if first[0].ndim == 3 else None

    def by_hf_name(self, rule: Rule) -> dict[str, tuple[Tensor, Tensor]]:
        """Return (A, B) for each adapted Hugging Face weight of this layer, by name; `rule` maps layer to weights."""
        if isinstance(rule, Grouped):
            linears = dict(zip(LINEAR_ATTENTION, rule.hf_names, strict=False))
            return {linears[part]: (a, _in_file(b, rule, linears[part])) for part, (a, b) in self.pairs.items()}
        fused = QKV_LINEARS if isinstance(rule, FusedQKV) else MLP_LINEARS if len(rule.hf_names) == 1 else ()
        if present := [name for name in fused if name in self.pairs]:  # one weight for several linears
            shares = dict(zip(fused, rule.counts if isinstance(rule, FusedQKV) else (1, 1), strict=True))
            width = self.pairs[present[0]][1].shape[0] // shares[present[0]]
            rows = {name: width * share for name, share in shares.items()}
            blocks = [
                self.pairs[name][1] if name in present else self.pairs[present[0]][1].new_zeros(rows[name], 0)
                for name in fused
            ]
            (hf_name,) = rule.hf_names
            return {hf_name: (torch.cat([self.pairs[name][0] for name in present]), torch.block_diag(*blocks))}
        count, pairs = len(rule.hf_names), dict(self.pairs)
        order = MLP_LINEARS if count == 2 else tuple(pairs)
        if isinstance(rule, QKV):
            order = (*QKV_LINEARS[: count - rule.gated], *("gate",) * rule.gated)
            if rule.gated and "q_proj" in pairs:  # queries and what gates their heads' outputs share A
                a, b = pairs["q_proj"]
                rows = b.unflatten(0, (-1, 2, rule.head_width)).unbind(1)
                pairs["q_proj"], pairs["gate"] = ((a.clone(), each.flatten(0, 1)) for each in rows)
        found = {name: pairs[part] for part, name in zip(order, rule.hf_names, strict=True) if part in pairs}
        if not isinstance(rule, QKV) or not rule.order:
            return found
        return {name: (a, _in_file(b, rule, name)) for name, (a, b) in found.items()}


def _in_file(b: Tensor, rule: Grouped | QKV, hf_name: str) -> Tensor:
    """Return the B [M, r] of an adapter with its rows in the order of the Hugging Face weight `hf_name`."""
    # The shape counts for a QKV alone, of as many keys and values as queries where it has an order.
    rows = [rows for rows in rule.hf_rows((3 * len(b),)) if rows.name == hf_name]
    order = torch.cat([torch.arange(each.start, each.start + each.count) for each in rows])
    return b[order.argsort()]


def read_adapters(records: TrainedRecords, model: ModelConfig) -> dict[str, Adapters]:
    """Return all adapters of a checkpoint, in fp32, by the global name of the megavlm weight that they adapt.

    Raises UserError if they are damaged.
    """
    keys = list(filter(is_model_adapter, records.stored))
    records.verify(keys)
    return grouped({key: records.read(key, 0, records.stored[key].shape[0]) for key in keys}, model)


def read_whole(records: TrainedRecords, *, routers: bool) -> dict[str, Tensor]:
    """Return the tensors that are trained whole beside adapters, by global name: a reward head, and the routers if
    asked for. Raises UserError if they are damaged.
    """
    names = (HEAD, *(key for key in records.stored if routers and ".mlp.router." in key))
    keys = [key for key in names if key in records.stored and not key.startswith("optimizer.")]
    records.verify(keys)
    return {key: records.read(key, 0, records.stored[key].shape[0]) for key in keys}


def grouped(values: Mapping[str, Tensor], model: ModelConfig) -> dict[str, Adapters]:
    """Return adapters by the global name of the weight that they adapt; `values` has each A and B by global name."""
    found: dict[str, dict[str, tuple[Tensor, Tensor]]] = {}
    for key in values:
        if not key.endswith(".A"):
            continue
        base, _, linear = key.removesuffix(".A").partition(".lora.")
        pair = (_real(key, values, model), _real(f"{key[:-1]}B", values, model))
        found.setdefault(f"{base}.weight", {})[linear] = pair
    return {key: Adapters(_in_order(pairs)) for key, pairs in found.items()}


def is_model_adapter(key: str) -> bool:
    """Return whether a checkpoint's key names an adapter's weight, not its optimizer state."""
    return is_adapter(key) and not key.startswith("optimizer.")


def _in_order(pairs: dict[str, tuple[Tensor, Tensor]]) -> dict[str, tuple[Tensor, Tensor]]:
    order = (*QKV_LINEARS, *MLP_LINEARS)
    return dict(sorted(pairs.items(), key=lambda item: order.index(item[0]) if item[0] in order else len(order)))


def _real(key: str, values: Mapping[str, Tensor], model: ModelConfig) -> Tensor:
    shape = real_shape(key, tuple(values[key].shape), model, vocab_size=model.language.vocab_size)
    return values[key][tuple(slice(size) for size in shape)].float()


def folded(weights: Tensor, pair: tuple[Tensor, Tensor], rows: slice, lora: LoraConfig) -> Tensor:
    """Return rows of W + (α/r)·B·A in fp32; `weights` are the same rows of W, a Hugging Face weight.

    For the weights [E, M, K] of experts, `rows` are experts.
    """
    a, b = pair
    a = a if a.ndim == 2 else a[rows]
    return weights.to(b.device, torch.float32) + (lora.alpha / lora.rank) * (b[rows] @ a)


def table_in_memory(family: Family, model: ModelConfig) -> Table:
    """Return the table with the parameter names of a model loaded by Transformers, which PEFT uses.

    Transformers 5 has one parameter for the experts of a layer, even if files have a tensor for each expert.
    """
    for prefixes in family.name_prefixes:
        parts = (prefixes.vision, prefixes.language)
        if prefixes.head == "lm_head.weight" and all(part.startswith("model.") for part in parts if part):
            return family.table(model, replace(prefixes, experts="stacked"))
    raise AssertionError(f"{family.name} lacks the spelling of a loaded model")


def export_adapters_of(source: Path, out: Path, *, base: str | None) -> None:
    """Write the adapters of a run or checkpoint as a new PEFT folder `out`; `base` names the model they belong to.

    Raises UserError if there are no adapters, or if other weights were trained that a PEFT folder cannot contain.
    """
    checkpoint, sidecar, saved = exportable(source)
    tensors, config = adapters_of(TrainedReader(checkpoint), family_at(sidecar), saved, source)
    write_adapters(tensors, {**config, "base_model_name_or_path": base}, out)


def adapters_of(
    records: TrainedRecords, family: Family, saved: Config, source: Path
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return PEFT's tensors, by name, and configuration (`peft_adapters`) of the adapters that `records` reads.

    Raises UserError, which names `source`, if there are no adapters, if other weights were trained that a PEFT folder
    cannot contain, or if PEFT would take adapters for those of experts.
    """
    adapters = read_adapters(records, saved.model)
    if not adapters:
        raise UserError(f"{source} has no adapters: train with --lora-rank, or use export")
    if left := trained_whole(saved):
        raise UserError(
            f"{source} has also trained {' and '.join(left)} whole, which adapters do not contain: use merge-lora, or "
            f"train with --freeze {' '.join((*frozen_parts(saved), *left))}"
        )
    named = {name for held in adapters.values() if held.of_experts is None for name in held.pairs}
    if lost := sorted(named & {*family.not_in_peft}):
        raise UserError(
            f"{source} has adapters of {', '.join(lost)}, which PEFT would take for those of experts: use merge-lora, "
            "or train with --lora-targets q_proj k_proj v_proj o_proj"
        )
    table = {**table_in_memory(family, saved.model), HEAD: Rename(SCORE)}
    return peft_adapters(adapters, table, saved.lora, whole=read_whole(records, routers=saved.lora.train_router))


def peft_adapters(
    adapters: Mapping[str, Adapters],
    table: Table,
    lora: LoraConfig,
    *,
    whole: Mapping[str, Tensor] | None = None,
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return adapters in PEFT's format: the tensors of `adapter_model.safetensors` by name, and the content of
    `adapter_config.json`, without the base model's name. `whole` are the tensors of `read_whole`.
    """
    tensors: dict[str, Tensor] = {}
    ranks: dict[str, int] = {}
    parameters, whole = factors_of_experts(adapters, table), whole or {}
    tensors |= {name: value for factors in parameters.values() for name, value in factors.items()}
    tensors |= {f"{PREFIX}{table[key].hf_names[0]}": value for key, value in whole.items()}
    for key, held in adapters.items():
        if held.of_experts is not None:
            continue
        for weight, (a, b) in held.by_hf_name(table[key]).items():
            module = weight.removesuffix(".weight")
            tensors[f"{PREFIX}{module}.lora_A.weight"] = a.contiguous()
            tensors[f"{PREFIX}{module}.lora_B.weight"] = b.contiguous()
            ranks[module] = a.shape[0]
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": None,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": sorted(ranks),
        "target_parameters": sorted(parameters),
        "modules_to_save": sorted({table[key].hf_names[0].rpartition(".")[0] for key in whole}),
        "rank_pattern": {module: rank for module, rank in ranks.items() if rank != lora.rank},
        "alpha_pattern": {module: lora.alpha * rank / lora.rank for module, rank in ranks.items() if rank != lora.rank},
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    return tensors, config


def write_adapters(tensors: dict[str, Tensor], config: Mapping[str, Any], out: Path) -> None:
    """Write `adapter_config.json` and `adapter_model.safetensors` into a new folder `out`.

    Raises UserError if `out` exists.
    """
    if out.exists():
        raise UserError(f"{out} exists: choose another folder, or remove it")
    temporary = out.with_name(f"tmp-{out.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    save_file(tensors, temporary / "adapter_model.safetensors", metadata={"format": "pt"})
    replace_file(temporary / "adapter_config.json", json.dumps(config, indent=2) + "\n")
    # The safetensors library writes files that only their owner can read.
    shutil.copymode(temporary / "adapter_config.json", temporary / "adapter_model.safetensors")
    rename_flushed(temporary, out)


def factors_of_experts(adapters: Mapping[str, Adapters], table: Table) -> dict[str, dict[str, Tensor]]:
    """Return, for each adapted parameter of experts by its Hugging Face name, PEFT's tensors A and B by name.

    A is [E·r, K], experts outermost, and B [M, r·E], experts innermost. PEFT wraps a module once for each of its
    parameters, in their order in the module, so that all but the last are below further wraps.
    """
    found: dict[str, dict[str, Tensor]] = {}
    modules: dict[str, list[str]] = {}
    for key, held in adapters.items():
        if held.of_experts is not None:
            (parameter,) = table[key].hf_names
            modules.setdefault(parameter.rpartition(".")[0], []).append(key)
    for module, keys in modules.items():
        # linear_fc1, which is Transformers' first, is innermost.
        for wraps, key in enumerate(sorted(keys, reverse=True)):
            a, b = adapters[key].of_experts  # type: ignore[misc]
            where = f"{PREFIX}{module}{'.base_layer' * wraps}"
            found[table[key].hf_names[0]] = {
                f"{where}.lora_A.weight": a.flatten(0, 1).contiguous(),
                f"{where}.lora_B.weight": b.permute(1, 2, 0).flatten(1).contiguous(),
            }
    return found
