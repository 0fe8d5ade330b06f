"""List the sides that `gpu_vlm.py` compares: program, precision, flags, and source of the data."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Side:
    """One way to train the model."""

    program: str  # "megavlm" or "transformers"
    precision: str
    flags: str = ""  # of pretrain_vlm.py
    files: bool = False  # JPEG files through the loader, not tensors that are there already
    compiled: bool = False  # by torch.compile

    @property
    def name(self) -> str:
        what = (self.flags, "of JPEG files" * self.files, "compiled" * self.compiled)
        return " ".join(filter(None, (self.program, self.precision, *what)))

    @property
    def task(self) -> dict[str, Any]:
        """Return the task for the side's process."""
        return asdict(self)


OURS, OURS_FP8 = Side("megavlm", "bf16"), Side("megavlm", "fp8")
OURS_FILES = Side("megavlm", "bf16", files=True)
AUTOCAST, PURE = Side("transformers", "autocast"), Side("transformers", "bf16")
PURE_FILES = Side("transformers", "bf16", files=True)  # by name alone: not for Qwen2.5-VL
COMPILED = Side("transformers", "autocast", compiled=True)
# What takes most memory goes first: where it does not fit, that is known at once.
SIDES = (AUTOCAST, OURS, PURE, OURS_FP8, OURS_FILES)
SINGLE = (Side("transformers", "fp32"), Side("megavlm", "fp32"))

# What `--ablate` measures, beside a run without flags: one line for each set of flags.
ABLATION = (
    "--transformer-impl torch",
    "--transformer-impl torch --compile-small-ops",
    "--no-gradient-accumulation-fusion",
    "--fp8 hybrid",
    "--fp8 hybrid --fp8-recipe delayed",
    "--fp8 hybrid --fp8-recipe blockwise",
    "--fp8 hybrid --fp8-param-gather",
    "--recompute-granularity selective",
    "--recompute-granularity full",
    "--offload activations",
    "--offload optimizer",
)


def ablation() -> tuple[Side, ...]:
    """Return megavlm's sides with flags; the first is the baseline of the others."""
    return (OURS, *(Side("megavlm", "bf16", flags) for flags in ABLATION))


def chosen(*, precision: str, ablate: bool, their_compile: bool, names: str | None = None) -> tuple[Side, ...]:
    """Return the sides that the options select. Raises ValueError if `names`, separated by commas, has no such side."""
    if ablate:
        sides = ablation()
    elif precision == "fp32":
        sides = SINGLE
    else:
        sides = SIDES + (COMPILED,) * their_compile
    if names is None:
        return sides
    by_name = {side.name: side for side in (*sides, PURE_FILES)}
    if unknown := set(names.split(",")) - by_name.keys():
        raise ValueError(f"there is no {', '.join(sorted(unknown))}: choose from {', '.join(by_name)}")
    return tuple(by_name[name] for name in names.split(","))
