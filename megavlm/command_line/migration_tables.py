"""The tables of `migration.toml`, the conversions that they name, and what cannot go together here."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from math import ceil, log2, prod
from pathlib import Path
from typing import Any

Given = Mapping[str, Any]  # the values of files by name, with the defaults there; "processes": their number
Values = Mapping[str, Any]  # values here, by key


class NoCounterpart(ValueError):
    """Says why nothing here does what an option does elsewhere, and what to do instead."""


@dataclass(frozen=True)
class Row:
    """What an option elsewhere is here, as `migration.toml` explains."""

    to: str = ""
    by: str = ""
    words: Values | None = None
    otherwise: str = ""
    refuse: str = ""
    differs: str = ""

    def values(self, value: Any, given: Given) -> Values:
        """Return what the option sets here, of all that is given elsewhere. Raises NoCounterpart."""
        if self.refuse and value not in (False, 0, "none", ""):
            raise NoCounterpart(self.refuse)
        value = CONVERSIONS[self.by](value, given) if self.by else value
        if self.words is not None:
            if self.otherwise and str(value).lower() not in self.words:
                raise NoCounterpart(self.otherwise)
            value = self.words.get(str(value).lower())
        if isinstance(value, Mapping):
            return value
        return {} if value is None or self.refuse else {self.to: value}


@dataclass(frozen=True)
class Kind:
    """A kind of file: its name, names that tell it from others, its rows by name, what holds there and not here where
    a name is left out, what differs whatever it says, and why names without a row have no counterpart (empty: look).
    """

    name: str
    marks: tuple[str, ...]
    rows: Mapping[str, Row]
    defaults: tuple[Values, ...]
    remarks: tuple[str, ...]
    otherwise: str

    def with_defaults(self, given: Given) -> dict[str, Any]:
        """Return what is given, and after it the defaults."""
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
    """Values here that do not go together, as `migration.toml` explains."""

    key: str
    why: str
    beside: Mapping[str, list[Any]] = field(default_factory=dict)
    becomes: Any = None

    def holds(self, values: Values) -> bool:
        """Return whether values have it."""
        said = {key: value if isinstance(value, list) else [value] for key, value in values.items()}
        beside = (any(each in some for each in said.get(key, [""])) for key, some in self.beside.items())
        return self.key in values and all(beside)


@cache
def _data() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name("migration.toml").read_text(encoding="utf-8"))


@cache
def conflicts() -> tuple[Conflict, ...]:
    """Return what cannot go together here."""
    return tuple(Conflict(**each) for each in _data()["conflicts"])


@cache
def kinds() -> Mapping[str, Kind]:
    """Return the kinds of files that are known."""
    found = {}
    for kind, each in _data()["kinds"].items():
        # Of a name in two tables, the row of the first holds.
        tables = [_data()["rows"][table] for table in reversed(each["rows"])]
        pairs = [(name, row) for table in tables for names, row in table.items() for name in names.split()]
        rows = {normalised(name): Row(**row) for name, row in pairs}
        defaults, remarks = tuple(_data()["defaults"].get(kind, ())), tuple(each["remarks"])
        found[kind] = Kind(
            each["name"], tuple(each["marks"].split()), rows, defaults, remarks, each.get("otherwise", "")
        )
    return found


def normalised(name: str) -> str:
    """Return a name as the tables have it."""
    name = name.lower().replace("_", "-")
    for pattern, replacement in _data()["aliases"].items():
        name = re.sub(pattern, replacement, name)
    return name


def _number(given: Given, names: str, otherwise: int = 1) -> int:
    """Return the first of several values that is a number from 1."""
    found = (given.get(name) for name in names.split())
    return next((each for each in found if type(each) is int and each > 0), otherwise)


def _replica(given: Given) -> int:
    tensor = "tensor-model-parallel-size parallelism.tp-size deepspeed-autotp-size tensor-parallel.autotp-size"
    context = "context-parallel-size parallelism.cp-size parallelism.sp-size sequence-parallel-size"
    return prod(_number(given, names) for names in (tensor, context, "pipeline-model-parallel-size"))


def processes(given: Given) -> int:
    """Return the number of processes that files say; 0 if they do not."""
    machine = _number(given, "nproc-per-node", 0) * _number(given, "nnodes num-nodes")
    return _number(given, "num-processes", machine)


def fewest_processes(given: Given) -> int:
    """Return the fewest processes that have the layout of files."""
    groups = "zero-optimization.zero-hpz-partition-size zero-optimization.mics-shard-size expert-model-parallel-size"
    return _replica(given) * _number(given, groups)


def samples_at_a_time(given: Given) -> int:
    """Return the samples of a step without accumulation: a micro-batch on each process with other samples."""
    micro = _number(given, "per-device-train-batch-size train-micro-batch-size-per-gpu micro-batch-size")
    return micro * max(1, given["processes"] // _replica(given))


def _stage_of_name(value: Any, given: Given) -> Values:
    """Return what the name of a DeepSpeed configuration says: zero2, ds_z3_offload_config.json."""
    word = Path(str(value)).stem
    stage = re.search(r"(?:^|[_-])z(?:ero)?(?:_?stage)?_?([0-3])", word)
    if stage is None:
        raise NoCounterpart("a file of its own: give it to this command as well")
    sharding = ("none", "optimizer", "optimizer_gradients", "full")[int(stage[1])]
    offload = ["optimizer", "parameters"] if stage[1] == "3" else ["optimizer"]
    return {"parallel.data_parallel_sharding": sharding} | ({"execution.offload": offload} if "offload" in word else {})


def _offload(value: Any, given: Given) -> list[str] | None:
    """Return the `--offload` that DeepSpeed's `offload_optimizer` and `offload_param` mean; None without them."""
    optimizer, param = (given.get(f"zero-optimization.offload-{what}.device") for what in ("optimizer", "param"))
    folder = given.get("zero-optimization.offload-optimizer.nvme-path")
    first = f"optimizer=nvme:{folder}" if optimizer == "nvme" and folder else "optimizer"
    rest = ["parameters"] if param in ("cpu", "nvme") else []
    return [first, *rest] if rest or optimizer in ("cpu", "nvme") else None


def _frozen(value: Any, given: Given) -> list[str]:
    """Return the parts that are frozen, as all options say together."""
    names = {
        "vision": "freeze-vit freeze-vision-tower",
        "projector": "freeze-aligner freeze-multi-modal-projector",
        "language": "freeze-llm freeze-language-model freeze-lm",
    }
    return [part for part, options in names.items() if any(given.get(name) is True for name in options.split())]


def _names(value: Any) -> list[str]:
    return [str(name).strip() for name in (value if isinstance(value, list) else str(value).split(","))]


def _targets(value: Any, given: Given) -> list[str] | None:
    """Return the layers with adapters, which are in parts that are not frozen."""
    parts = [part for part in ("language", "vision") if part not in _frozen(None, given)]
    if given.get("tuner-type") != "lora" or {"all", "all-linear"} & {*_names(value)}:
        return parts if given.get("tuner-type") == "lora" else None
    return [f"{part}.*.{name}" for name in _names(value) for part in parts]


def _files(value: Any, given: Given) -> list[dict[str, str]]:
    """Return the data sets that are files; names of a registry have no counterpart."""
    if not all(re.search(r"\.(jsonl?|parquet|csv|tsv|arrow)$", name) for name in _names(value)):
        raise NoCounterpart("a name of a registry: here data sets are files, --datasets PATH,image_root=DIR")
    return [{"path": name} for name in _names(value)]


def _betas(value: Any, given: Given) -> Values:
    rule = "lion" if str(given.get("optimizer.type")).lower() == "lion" else "adam"
    return {f"optimizer.{rule}_beta{number}": each for number, each in enumerate(value, 1)}


def _split(value: Any, given: Given) -> float:
    shares = [float(each) for each in value.split(",")]
    return round(shares[1] / sum(shares), 6)


def _ffn(value: Any, given: Given) -> int:
    """Return Megatron-LM's width of an MLP: four times the hidden size, with gates two thirds of that."""
    hidden = _number(given, "hidden-size")
    return hidden * 8 // 3 // 64 * 64 if given.get("swiglu") is True else 4 * hidden


def _in_steps(value: Any, given: Given) -> int:
    if not (batch := _number(given, "global-batch-size", 0)):
        raise NoCounterpart("counted in steps here, for which the global batch has to be a number")
    return max(1, int(value) // batch)


def _offload_to_deepspeed(value: Any, given: Given) -> Values:
    """Return the options of DeepSpeed for what is offloaded here."""
    found: dict[str, Any] = {}
    for what, _, place in (word.partition("=nvme:") for word in value):
        if what == "activations":
            raise NoCounterpart("activation_checkpointing.cpu_checkpointing is near to it")
        name = f"zero_optimization.offload_{'param' if what == 'parameters' else what}"
        found |= {f"{name}.device": "nvme", f"{name}.nvme_path": place} if place else {f"{name}.device": "cpu"}
    return found


def _betas_of(rule: str, first: str) -> Callable[[Any, Given], Any]:
    """Return a conversion of the second of our two options of a rule to its list there."""
    return lambda value, given: [given[first], value] if given["optimizer.kind"] == rule else None


def _if(key: str, has: str) -> Callable[[Any, Given], Any]:
    return lambda value, given: value if given.get(key) == has else None


CONVERSIONS: Mapping[str, Callable[[Any, Given], Any]] = {
    "above_1": lambda value, given: value if value > 1 else None,
    "accumulation_to_16": lambda value, given: ceil(16 / samples_at_a_time(given)),
    "batch": lambda value, given: _number(given, "train-batch-size", int(value) * samples_at_a_time(given)),
    "betas": _betas,
    "betas_of_adamw": _betas_of("adamw", "optimizer.adam_beta1"),
    "betas_of_lion": _betas_of("lion", "optimizer.lion_beta1"),
    "ffn_of_megatron": _ffn,
    "files": _files,
    "first_word": lambda value, given: (value if isinstance(value, list) else str(value).split())[0],
    "frozen": _frozen,
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
    "sequence": lambda value, given: None if "decoder-seq-length" in given else value,
    "share_of_rate": lambda value, given: value * given.get("learning-rate", given.get("optimizer.params.lr")),
    "shards_of_replicas": lambda value, given: value if _number(given, "parallelism.dp-replicate-size") > 1 else None,
    "split": _split,
    "stage_of_name": _stage_of_name,
    "targets": _targets,
    "twice_the_rank": lambda value, given: 2 * _number(given, "lora-rank"),
    "warmup": lambda value, given: {f"optimizer.lr_warmup_{'fraction' if 0 < value < 1 else 'iters'}": value},
}
