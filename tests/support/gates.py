"""The gates of a Hugging Face family: each a figure that tests measure, and the largest value that users are promised.

A test calls `hold` with what it measured; `make cards` runs the tests and writes the figures down
(`tests/support/cards.py`). So a figure of a card is what a test compared with its tolerance, and nothing else measures
it.
"""

from __future__ import annotations

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
# The largest figure that passes: a difference relative to the largest value, or how many differ of what must be equal.
TOLERANCES = {
    **dict.fromkeys(("import_export", "answers", "resume"), 0.0),
    **dict.fromkeys(("logits", "record", "packed_logits", "video_logits", "video_record", "lora_merged"), 1e-4),
    **dict.fromkeys(("losses", "video_losses", "lora_losses"), 1e-4),
    **dict.fromkeys(("gradients", "packed_gradients", "video_gradients", "lora_gradients"), 1e-3),
    **{"cosine": 1e-6, "reshard": 1e-5, "composed": 1e-5},
    **{f"{name}_{what}": most for name in ALL_LAYOUTS for what, most in (("logits", 1e-4), ("losses", 1e-4))},
    **{f"{name}_gradients": 1e-3 for name in ALL_LAYOUTS},
}
# The largest figure of each family and gate in the test that runs, which the plugin `tests/support/record.py` takes.
MEASURED: dict[tuple[str, str], float] = {}


def larger(one: float, other: float) -> float:
    """Return the larger figure; what is not a number is larger than any."""
    return other if other > one or other != other else one


def hold(family: str, gate: str, figure: float, what: str = "") -> None:
    """Note a figure of a family, and fail the test if it is above the gate's tolerance; `what` says of what it is."""
    MEASURED[family, gate] = larger(MEASURED.get((family, gate), 0.0), figure)
    tolerance = TOLERANCES[gate]
    assert figure <= tolerance, f"{family}, {what or gate}: {figure:.1e}, and {tolerance:.0e} is allowed"
