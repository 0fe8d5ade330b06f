"""The gates of a Hugging Face family: each a figure that tests measure, and the largest value that users are promised.

A test calls `hold` with what it measured; `make cards` (`tests/support/cards.py`) runs the tests and writes the figures
down. So a figure of a card is what a test compared with its tolerance, and nothing else measures it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Layout(NamedTuple):
    """A layout at which every family is compared with Transformers."""

    title: str
    world: int
    flags: str


LAYOUTS = {
    "tp2": Layout("TP2", 2, "--tp 2"),
    "pp2": Layout("PP2", 2, "--pp 2"),
    "pp2-vpp2": Layout("PP2·VPP2", 2, "--pp 2 --vpp 2"),
    "tp2-pp2-vpp2": Layout("TP2·PP2·VPP2", 4, "--tp 2 --pp 2 --vpp 2"),
    "tp2-dp2": Layout("TP2·DP2", 4, "--tp 2"),
    "cp2": Layout("CP2", 2, "--cp 2"),
    "colocated": Layout("TP2, encoder colocated", 2, "--tp 2 --placement colocated"),
    "zero3": Layout("DP2, ZeRO-3", 2, "--data-parallel-sharding full"),
}
# Of models with experts alone. At all layouts of above that split tensors, the experts are split with them.
EXPERT_LAYOUTS = {
    "ep2": Layout("EP2", 2, "--ep 2"),
    "tp2-ep2": Layout("TP2·EP2", 2, "--tp 2 --ep 2"),
    "tp2-ep2-etp2": Layout("TP2·EP2·ETP2", 4, "--tp 2 --ep 2 --etp 2"),
    "pp2-ep2": Layout("PP2·EP2", 4, "--pp 2 --ep 2"),
    "cp2-ep2": Layout("CP2·EP2", 2, "--cp 2 --ep 2"),
}
ALL_LAYOUTS = LAYOUTS | EXPERT_LAYOUTS


@dataclass(frozen=True)
class Gate:
    """One figure of a family, which is to be as small as possible.

    Args:
        group: what is done; gates of one group share a row of the summary.
        figure: what the number is.
        tolerance: the largest number that passes.
        parts: whether it is measured of whole models ("whole"), or also of towers and language models ("all"), or of
            these alone ("part").
        needs: what a machine must have, where no test on a CPU can measure it.
        experts: whether it is of models with experts alone.
    """

    group: str
    figure: str
    tolerance: float
    parts: str = "whole"
    needs: str | None = None
    experts: bool = False


def _gates() -> dict[str, Gate]:
    """Return all gates, in the order in which cards list them."""
    found = {
        "import_export": Gate("Import and export", "files that are not byte for byte as they were", 0),
        "logits": Gate("One process", "logits (of a tower: features)", 1e-4, parts="all"),
        "cosine": Gate("One process", "1 − cosine of a token's logits", 1e-6),
        "gradients": Gate("One process", "gradient of any parameter", 1e-3, parts="all"),
        "losses": Gate("Five training steps", "loss of a step", 1e-4),
        "record": Gate("A user's record", "logits, from files to model", 1e-4),
        "answers": Gate("Greedy answers", "answers that differ from those of Transformers", 0),
        "generation": Gate("Greedy answers", "tokens that differ between the folder and its export", 0),
        "packed_logits": Gate("Packing", "logits of packed samples against unpacked", 1e-4),
        "packed_gradients": Gate("Packing", "gradient of any parameter", 1e-3),
    }
    for name, layout in ALL_LAYOUTS.items():
        experts = name in EXPERT_LAYOUTS
        # Their ranks have parts of rows, or shards of gradients: five steps tell.
        if name not in ("cp2", "cp2-ep2", "zero3"):
            found[f"{name}_logits"] = Gate(layout.title, "logits", 1e-4, experts=experts)
        if name != "zero3":
            found[f"{name}_gradients"] = Gate(layout.title, "any rank's part of any gradient", 1e-3, experts=experts)
        found[f"{name}_losses"] = Gate(layout.title, "loss of five training steps", 1e-4, experts=experts)
    return {
        **found,
        "resume": Gate("Resume, same layout", "iterations that are not bit for bit the same", 0),
        "reshard": Gate("Resume, other layout", "loss or gradient norm of an iteration", 1e-5),
        "lora_gradients": Gate("LoRA", "gradient of any A or B against PEFT", 1e-3),
        "lora_losses": Gate("LoRA", "loss of five training steps against PEFT", 1e-4),
        "lora_merged": Gate("LoRA", "logits of merged weights against PEFT's with the exported adapters", 1e-4),
        "video_logits": Gate("Video", "logits", 1e-4),
        "video_gradients": Gate("Video", "gradient of any parameter", 1e-3),
        "video_losses": Gate("Video", "loss of five training steps", 1e-4),
        "video_record": Gate("Video", "logits, from a clip to the model", 1e-4),
        "composed": Gate("Composed, TP2·PP2", "loss or gradient norm against one process", 1e-5, parts="part"),
        "fp8": Gate("FP8", "loss against bf16", 1e-2, needs="a GPU"),
    }


GATES = _gates()


@dataclass(frozen=True)
class Measured:
    """A figure of one test."""

    family: str
    gate: str
    figure: float


# What the test that runs has measured so far. The plugin `tests/support/figures.py` takes it away when the test ends.
MEASURED: list[Measured] = []


def larger(one: float | None, other: float) -> float:
    """Return the larger figure; what is not a number is larger than any."""
    return other if one is None or other > one or other != other else one


def take_measured() -> list[Measured]:
    """Return the largest figure of each gate since the last call."""
    worst: dict[tuple[str, str], float] = {}
    for each in MEASURED:
        worst[each.family, each.gate] = larger(worst.get((each.family, each.gate)), each.figure)
    MEASURED.clear()
    return [Measured(family, gate, figure) for (family, gate), figure in worst.items()]


def hold(family: str, gate: str, figure: float, what: str = "") -> None:
    """Note a figure of a family, and fail the test if it is above the gate's tolerance; `what` says of what it is."""
    MEASURED.append(Measured(family, gate, figure))
    tolerance = GATES[gate].tolerance
    assert figure <= tolerance, f"{family}, {what or GATES[gate].figure}: {figure:.1e}, and {tolerance:.0e} is allowed"
