"""The tables of `migration.toml`, their conversion functions, and conflicts between our options."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from math import ceil, log2, prod
from pathlib import Path
from typing import Any

Given = Mapping[str, Any]  # values of the other trainer by name, with its defaults; "processes": number of processes
Values = Mapping[str, Any]  # values of our options, by key


class NoCounterpart(ValueError):
    """An option of another trainer has no counterpart here; the message says why, and what to do instead."""


@dataclass(frozen=True)
class Row:
    """Conversion of an option of another trainer; `migration.toml` explains the fields."""

    to: str = ""
    by: str = ""
    words: Values | None = None
    otherwise: str = ""
    refuse: str = ""
    differs: str = ""

    def values(self, value: Any, given: Given) -> Values:
        """Return the values that the option sets here; `given` are all values of the other trainer. Raises
        NoCounterpart.
        """
        if self.refuse and value not in (False, 0, "none", ""):
            raise NoCounterpart(self.refuse)
        value = CONVERSIONS[self.by](value, given) if self.by else value
        if self.words is not None and not isinstance(value, Mapping):
            if self.otherwise and str(value).lower() not in self.words:
                raise NoCounterpart(self.otherwise)
            value = self.words.get(str(value).lower())
        if isinstance(value, Mapping):
            return value
        return {} if value is None or self.refuse else {self.to: value}


@dataclass(frozen=True)
class Kind:
    """A kind of file: its `name`, `marks` (option names by which it is recognised), `rows` by option name, `defaults`
    of its trainer that differ from ours, `remarks` on differences that do not depend on a file, and `otherwise`: why
    names without a row have no counterpart (empty: look the name up in `rules/elsewhere.toml`).
    """

    name: str
    marks: tuple[str, ...]
    rows: Mapping[str, Row]
    defaults: tuple[Values, ...]
    remarks: tuple[str, ...]
    otherwise: str

    def with_defaults(self, given: Given) -> dict[str, Any]:
        """Return the given values, and after them the trainer's defaults for names that are not given."""
        found = dict(given)
        for group in self.defaults:
            name, _, value = group.get("if", "").partition("=")
            applies = not name or (name in found and value in ("", str(found[name])))
            if applies and not any(each in found for each in group.get("unless", "").split()):
                for name, value in group["values"].items():
                    new = CONVERSIONS[value["by"]](None, found) if isinstance(value, Mapping) else value
                    found.setdefault(name, new)
        return found


@dataclass(frozen=True)
class Conflict:
    """Values of our options that conflict; `migration.toml` explains the fields."""

    key: str
    why: str
    beside: Mapping[str, list[Any]] = field(default_factory=dict)
    becomes: Any = None

    def holds(self, values: Values) -> bool:
        """Return whether the values have this conflict."""
        said = {key: value if isinstance(value, list) else [value] for key, value in values.items()}
        beside = (any(each in some for each in said.get(key, [""])) for key, some in self.beside.items())
        return self.key in values and all(beside)


@cache
def _data() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name("migration.toml").read_text(encoding="utf-8"))


@cache
def conflicts() -> tuple[Conflict, ...]:
    """Return the conflicts between values of our options."""
    return tuple(Conflict(**each) for each in _data()["conflicts"])


@cache
def kinds() -> Mapping[str, Kind]:
    """Return the known kinds of files by their keys in `migration.toml`."""
    found = {}
    for kind, each in _data()["kinds"].items():
        # If a name is in two tables, the row of the first table counts.
        tables = [_data()["rows"][table] for table in reversed(each["rows"])]
        pairs = [(name, row) for table in tables for names, row in table.items() for name in names.split()]
        rows = {normalised(name): Row(**row) for name, row in pairs}
        defaults, remarks = tuple(_data()["defaults"].get(kind, ())), tuple(each["remarks"])
        found[kind] = Kind(
            each["name"], tuple(each["marks"].split()), rows, defaults, remarks, each.get("otherwise", "")
        )
    return found


def normalised(name: str) -> str:
    """Return an option name as spelled in the tables: in lower case, with hyphens, and without aliases."""
    name = name.lower().replace("_", "-")
    for pattern, replacement in _data()["aliases"].items():
        name = re.sub(pattern, replacement, name)
    return name


def _number(given: Given, names: str, otherwise: int = 1) -> int:
    """Return the first of the named values that is a whole number from 1, or `otherwise`."""
    found = (given.get(name) for name in names.split())
    return next((each for each in found if type(each) is int and each > 0), otherwise)


def _replica(given: Given) -> int:
    tensor = "tensor-model-parallel-size parallelism.tp-size deepspeed-autotp-size tensor-parallel.autotp-size"
    context = "context-parallel-size parallelism.cp-size parallelism.sp-size sequence-parallel-size"
    stages = "pipeline-model-parallel-size pipeline.stages pipeline.num-stages"
    return prod(_number(given, names) for names in (tensor, context, stages))


def processes(given: Given) -> int:
    """Return the number of processes in the files; 0 if the files do not set it."""
    machine = _number(given, "nproc-per-node num-gpus", 0) * _number(given, "nnodes num-nodes")
    return _number(given, "num-processes", machine)


def fewest_processes(given: Given) -> int:
    """Return the fewest processes on which the layout of the files can run."""
    groups = "zero-optimization.zero-hpz-partition-size zero-optimization.mics-shard-size expert-model-parallel-size"
    return _replica(given) * _number(given, groups)


def samples_at_a_time(given: Given) -> int:
    """Return the samples of a step without gradient accumulation: one micro-batch per model replica."""
    micro = _number(given, "per-device-train-batch-size train-micro-batch-size-per-gpu micro-batch-size")
    return micro * max(1, given["processes"] // _replica(given))


def _stage_of_name(value: Any, given: Given) -> Values:
    """Return sharding and offloading by the name of a DeepSpeed configuration: zero2, ds_z3_offload_config.json."""
    word = Path(str(value)).stem
    stage = re.search(r"(?:^|[_-])z(?:ero)?(?:_?stage)?_?([0-3])", word)
    if stage is None:
        raise NoCounterpart("a file of its own: give it to this command as well")
    sharding = ("none", "optimizer", "optimizer_gradients", "full")[int(stage[1])]
    offload = ["optimizer", "parameters"] if stage[1] == "3" else ["optimizer"]
    return {"parallel.data_parallel_sharding": sharding} | ({"execution.offload": offload} if "offload" in word else {})


def _offload(value: Any, given: Given) -> list[str] | None:
    """Return the values of `--offload` for DeepSpeed's `offload_optimizer` and `offload_param`; None without them."""
    optimizer, param = (given.get(f"zero-optimization.offload-{what}.device") for what in ("optimizer", "param"))
    folder = given.get("zero-optimization.offload-optimizer.nvme-path")
    first = f"optimizer=nvme:{folder}" if optimizer == "nvme" and folder else "optimizer"
    rest = ["parameters"] if param in ("cpu", "nvme") else []
    return [first, *rest] if rest or optimizer in ("cpu", "nvme") else None


def _frozen(value: Any, given: Given) -> list[str]:
    """Return the parts that the options of another trainer freeze."""
    names = {
        "vision": "freeze-vit freeze-vision-tower",
        "projector": "freeze-aligner freeze-multi-modal-projector",
        "language": "freeze-llm freeze-language-model freeze-lm",
    }
    found = [part for part, options in names.items() if any(given.get(name) is True for name in options.split())]
    return [*found, *(_hearing(given) if "vision" in found else ())]


def _hearing(given: Given) -> tuple[str, ...]:
    """Return ("audio",) if the name of the model says that it hears: its encoder of sounds is part of "vit" there."""
    return ("audio",) * ("omni" in f"{given.get('model')} {given.get('model-name-or-path')}".lower())


def _names(value: Any) -> list[str]:
    return [str(name).strip() for name in (value if isinstance(value, list) else str(value).split(","))]


def _targets(value: Any, given: Given) -> list[str] | None:
    """Return the values of `--lora-targets`: linear layers of the parts that are not frozen; None without LoRA."""
    parts = [part for part in ("language", "vision") if part not in _frozen(None, given)]
    if given.get("tuner-type") != "lora" or {"all", "all-linear"} & {*_names(value)}:
        parts += _hearing(given) if "vision" in parts else ()
        return parts if given.get("tuner-type") == "lora" else None
    return [f"{part}.*.{name}" for name in _names(value) for part in parts]


def _files(value: Any, given: Given) -> list[dict[str, str]]:
    """Return the data sets of a list of files. Raises NoCounterpart for names of a registry."""
    if not all(re.search(r"\.(jsonl?|parquet|csv|tsv|arrow)$", name) for name in _names(value)):
        raise NoCounterpart("a name of a registry: here data sets are files, --datasets PATH,image_root=DIR")
    return [{"path": name} for name in _names(value)]


def _betas(value: Any, given: Given) -> Values:
    rule = "lion" if str(given.get("optimizer.type")).lower() == "lion" else "adam"
    return {f"optimizer.{rule}_beta{number}": each for number, each in enumerate(value, 1)}


def _split(value: Any, given: Given) -> float:
    shares = [float(each) for each in value.split(",")]
    return round(shares[1] / sum(shares), 6)


def _warmup(value: Any, given: Given) -> Values:
    """Return the warm-up of Transformers' schedules: steps before a share; `constant` has none."""
    named = given.get("warmup-steps") or given.get("warmup-ratio")
    length = 0.0 if given.get("lr-scheduler-type") == "constant" else float(named or 0)
    return {f"optimizer.lr_warmup_{'fraction' if 0 < length < 1 else 'iters'}": length}


def _area(value: Any, given: Given) -> int | None:
    """Return the pixels to which LLaMA-Factory shrinks images; None for models that see images at a fixed size."""
    sizes = r"qwen.*(vl|omni)|qwen3_[5-8]|glm.*(v|ocr)|paddleocr|videollama"
    return 768 * 768 if re.search(sizes, str(given.get("template")).lower()) else None


def _ffn(value: Any, given: Given) -> int:
    """Return Megatron-LM's default width of an MLP: four times the hidden size; with SwiGLU two thirds of that."""
    hidden = _number(given, "hidden-size")
    return hidden * 8 // 3 // 64 * 64 if given.get("swiglu") is True else 4 * hidden


def _groups(value: Any, given: Given) -> Any:
    if not given.get("group-query-attention"):
        raise NoCounterpart("there it has no effect without group_query_attention")
    return value


def _in_steps(value: Any, given: Given) -> int:
    if not (batch := _number(given, "global-batch-size", 0)):
        raise NoCounterpart("counted in steps here, for which the global batch has to be a number")
    return max(1, int(value) // batch)


def _offload_to_deepspeed(value: Any, given: Given) -> Values:
    """Return DeepSpeed's options for the values of our `--offload`."""
    found: dict[str, Any] = {}
    for what, _, place in (word.partition("=nvme:") for word in value):
        if what == "activations":
            raise NoCounterpart("activation_checkpointing.cpu_checkpointing is near to it")
        name = f"zero_optimization.offload_{'param' if what == 'parameters' else what}"
        found |= {f"{name}.device": "nvme", f"{name}.nvme_path": place} if place else {f"{name}.device": "cpu"}
    return found


def _schedule_to_deepspeed(value: Any, given: Given) -> Values:
    """Return DeepSpeed's scheduler for our schedule; none for a constant rate without warm-up."""
    end, peak = given["optimizer.lr_decay_iters"] or given["train.train_iters"], given["optimizer.lr"]
    share = given["optimizer.lr_warmup_fraction"]
    if peak is None or (end is None and (value != "constant" or share)):
        raise NoCounterpart("write the rate and the number of steps into the file: --lr, --train-iters")
    warmup = int(share * end) if share else given["optimizer.lr_warmup_iters"] or 0
    found = {"warmup_num_steps": max(1, warmup), "warmup_type": "linear"}
    match value:
        case "constant" if not warmup:
            return {}
        case "constant":
            kind, found = "WarmupLR", {**found, "warmup_max_lr": peak}
        case "linear" if not given["optimizer.min_lr"]:
            kind, found = "WarmupDecayLR", {**found, "warmup_max_lr": peak, "total_num_steps": end}
        case "cosine":
            ratio = given["optimizer.min_lr"] / peak
            kind, found = "WarmupCosineLR", {**found, "total_num_steps": end, "cos_min_ratio": ratio}
        case _:
            raise NoCounterpart("it has constant, linear (to 0) and cosine ones: the training script makes this one")
    return {"scheduler.type": kind} | {f"scheduler.params.{name}": each for name, each in found.items()}


def _groups_to_fsdp(value: Any, given: Given) -> Values:
    """Return Accelerate's sizes of shard groups and of their replicas, for the processes of our --world-size."""
    split = "tensor_model context pipeline_model".split()
    ranks = value * prod(given[f"parallel.{each}_parallel_size"] for each in split)
    if not given["run.world_size"] or given["run.world_size"] % ranks:
        raise NoCounterpart("the number of groups follows from the number of processes: --world-size")
    sizes = {"dp_replicate_size": given["run.world_size"] // ranks, "dp_shard_size": value}
    return {f"parallelism_config.parallelism_config_{name}": each for name, each in sizes.items()}


def _strategy(value: Any, given: Given) -> Any:
    """Return our values for FSDP's HYBRID_SHARD (shards within a machine), and any other strategy unchanged."""
    if str(value).lower() not in ("hybrid_shard", "4"):
        return value
    size = given["processes"] // _number(given, "num-machines nnodes num-nodes")
    groups = {"parallel.hybrid_shard_size": size} if size < given["processes"] else {}
    return {"parallel.data_parallel_sharding": "full", **groups}


def _betas_of(rule: str, first: str) -> Callable[[Any, Given], Any]:
    """Return a conversion of our second beta of an update rule to the other trainer's list of both betas."""
    return lambda value, given: [given[first], value] if given["optimizer.kind"] == rule else None


def _if(key: str, has: str) -> Callable[[Any, Given], Any]:
    return lambda value, given: value if given.get(key) == has else None


CONVERSIONS: Mapping[str, Callable[[Any, Given], Any]] = {
    "above_1": lambda value, given: value if value > 1 else None,
    "accumulation_to_16": lambda value, given: ceil(16 / samples_at_a_time(given)),
    "area_of_llama_factory": _area,
    "batch": lambda value, given: _number(given, "train-batch-size", int(value) * samples_at_a_time(given)),
    "betas": _betas,
    "betas_of_adamw": _betas_of("adamw", "optimizer.adam_beta1"),
    "betas_of_lion": _betas_of("lion", "optimizer.lion_beta1"),
    "ffn_of_megatron": _ffn,
    "files": _files,
    "first_word": lambda value, given: (value if isinstance(value, list) else str(value).split())[0],
    "frozen": _frozen,
    "groups": _groups,
    "groups_to_fsdp": _groups_to_fsdp,
    "in_steps": _in_steps,
    "log_2_of_fp16": lambda value, given: round(log2(value)) if given["precision.dtype"] == "fp16" else None,
    "minutes": lambda value, given: value / 60,
    "objective": lambda value, given: given.get("pref-loss", "sigmoid") if value == "dpo" else value,
    "of_adamw": _if("optimizer.kind", "adamw"),
    "of_dpo": _if("stage", "dpo"),
    "of_fp16": _if("precision.dtype", "fp16"),
    "of_lora": _if("tuner-type", "lora"),
    "offload": _offload,
    "offload_to_deepspeed": _offload_to_deepspeed,
    "offload_to_fsdp": lambda value, given: "parameters" in value,
    "power_of_2": lambda value, given: 2.0**value,
    "samples_at_a_time": lambda value, given: samples_at_a_time(given),
    "schedule_to_deepspeed": _schedule_to_deepspeed,
    "sequence": lambda value, given: None if "decoder-seq-length" in given else value,
    "share_of_rate": lambda value, given: value * given.get("learning-rate", given.get("optimizer.params.lr")),
    "shards_of_replicas": lambda value, given: value if _number(given, "parallelism.dp-replicate-size") > 1 else None,
    "split": _split,
    "stage_of_name": _stage_of_name,
    "strategy": _strategy,
    "targets": _targets,
    "twice_the_rank": lambda value, given: 2 * _number(given, "lora-rank"),
    "warmup": _warmup,
}
