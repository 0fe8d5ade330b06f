"""The items of `gpu_half_hour.py`: commands to run on one GPU, their time limits, and the question each decides."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PYTEST = "-v -rfEs --tb=short --show-capture=no -p no:cacheprovider"
PARITY = "tests/dist/test_parity.py"
MODEL = "benchmarks/gpu_vlm.py --only LLaVA --rounds 1 --steps 5"
TWO_SCHEDULES = "zb-h1-2-frozen or zb-h1-4-qwen3"
TRIED = f"'pp2-vpp2-rich or pp2-vpp2-dp2 or tp2-pp2-vpp2-qwen3 or {TWO_SCHEDULES}'"


@dataclass(frozen=True)
class Item:
    """A command with a time limit in minutes. In a rehearsal on a CPU, `small` replaces parts of the command."""

    name: str
    minutes: float
    decides: str
    command: str
    small: Mapping[str, str] = field(default_factory=dict)
    ranks: bool = False  # runs several ranks, which share the GPU if there is only one
    hides_engine: bool = False  # hides Transformer Engine, which would use TF32 in comparisons in fp32
    env: Mapping[str, str] = field(default_factory=dict)
    instead_of: str = ""  # runs only if this item failed

    def words(self, python: str, *, scratch: Path, kept: Path, rehearsed: bool) -> list[str]:
        """Return the arguments of the command, with the replacements of `small` in a rehearsal."""
        command = self.command
        if rehearsed:
            for part, other in self.small.items():
                assert part in command, f"{self.name}: {part}"
                command = command.replace(part, other)
        first, *rest = shlex.split(command.format(scratch=scratch, kept=kept))
        if first == "pytest":
            return [python, "-m", "pytest", *PYTEST.split(), f"--junitxml={scratch}/tests.xml", *rest]
        return [python, first, *rest]


def _tests(name: str, minutes: float, decides: str, words: str, small: str, **more: Any) -> Item:
    """Return an item of tests on several ranks; `small` is the `-k` expression that selects tests for a rehearsal."""
    chosen = {words[words.index("-k ") :]: f"-k '{small}'"}
    return Item(name, minutes, decides, f"pytest -m 'not slow' {words}", chosen, ranks=True, **more)


def _model(name: str, minutes: float, decides: str, words: str) -> Item:
    """Return an item that benchmarks LLaVA-1.5-7B."""
    command = f"{MODEL} --minutes {minutes - 0.5} --out {{scratch}}/figures.json {words}"
    small = {"--steps 5": "--steps 1 --warm-up 1 --device cpu --small", f"--minutes {minutes - 0.5}": "--minutes 9"}
    return Item(name, minutes, decides, command, small)


# Keeps Transformer Engine's matrix products in fp32: cuBLAS then uses no TF32, even where it is requested.
_FP32 = {"NVIDIA_TF32_OVERRIDE": "0"}
# Sorted by value per minute, best first.
ITEMS = (
    Item(
        "engine",
        1,
        "ZB-H1 on Transformer Engine's layers, experts in FP8: the tests of one rank that never ran",
        "pytest tests/gpu/test_numerics.py -k 'leaves or experts'",
    ),
    _tests(
        "engine-layouts",
        2.5,
        "Transformer Engine with TP, SP, PP and VPP against one process, fp32",
        f"-x {PARITY} -k '(tp2 or pp2) and not slow'",
        "tp2-adaptive",
        env=_FP32,
    ),
    _tests(
        "engine-layouts-bf16",
        1,
        "the same in bf16 within 1e-2, where fp32 is refused",
        f"--maxfail 2 {PARITY} -k 'tp2-padded-heads-no-sp or pp2-recompute or tp2-pp2-qwen2 or pp2-vpp2-rich'",
        "pp2-recompute",
        env={"MEGAVLM_TEST_PRECISION": "bf16"},
        instead_of="engine-layouts",
    ),
    _tests(
        "engine-context",
        0.75,
        "Transformer Engine with CP × TP",
        "tests/dist/test_context_parallel.py -k 'cp2-tp2'",
        "cp2-pp2",
        env=_FP32,
    ),
    _tests(
        "engine-experts",
        0.75,
        "Transformer Engine with EP",
        "tests/dist/test_experts.py -k ep2",
        "cp2-ep2",
        env=_FP32,
    ),
    _tests(
        "schedules",
        1,
        "interleaved stages and ZB-H1 over NCCL",
        f"{PARITY} tests/dist/test_schedules.py -k {TRIED}",
        "zb-h1-2-frozen",
        hides_engine=True,
    ),
    Item(
        "fp8-layouts",
        2,
        "FP8 of Transformer Engine on two tensor-parallel ranks, tensorwise and delayed",
        "pytest tests/gpu/test_layouts.py tests/dist/test_fp8.py -m 'not slow' -k 'learns'",
        {"-k 'learns'": "-k 'learns and tensorwise'"},
        ranks=True,
    ),
    Item(
        "linear-attention",
        2,
        "kernels of linear attention against the rule in fp64, forward and backward; a hybrid model's step",
        "pytest tests/gpu/test_linear_attention.py",
        {"attention.py": "attention.py -k convolution"},
    ),
    _model(
        "files",
        4,
        "why a step from JPEG files takes 0.38 s where one from tensors takes 0.26: which thread, which wait",
        "--sides 'megavlm bf16,megavlm bf16 of JPEG files,megavlm fp8' --trace {kept}",
    ),
    _model(
        "micro-batches",
        3,
        "MFU of a step of four micro-batches, bf16 and FP8",
        "--micro-batches 4 --sides 'megavlm bf16,megavlm fp8'",
    ),
    _model(
        "options",
        5,
        "recipes of FP8, torch's layers with and without compiled small operations: none was ever timed",
        "--ablate --sides '"
        + ",".join(
            f"megavlm bf16{flags}"
            for flags in (
                "",
                " --transformer-impl torch --compile-small-ops",
                " --fp8 hybrid --fp8-recipe delayed",
                " --fp8 hybrid --fp8-param-gather",
                " --fp8 hybrid --fp8-recipe blockwise",
                " --transformer-impl torch",
                " --fp8 hybrid",
            )
        )
        + "'",
    ),
    Item(
        "rates",
        1,
        "the planner's profile of this GPU, the tile of grouped products",
        "-m megavlm calibrate --precision bf16 --rounds 1 --repeats 3 --out {scratch}/profile.json",
        {"bf16 --rounds 1 --repeats 3": "fp32 --rounds 1 --repeats 1"},
    ),
    Item(
        "attention",
        1,
        "the planner's attention rates: 8k and 32k tokens, forward and backward apart",
        "benchmarks/attention_windows.py --causal 8192 32768 --out {scratch}/figures.json",
        {"8192 32768": "32 64 --device cpu"},
    ),
    _tests(
        "host-streams",
        2,
        "offloaded parameters, second shards, codes and QK-Clip over NCCL",
        "tests/dist/test_sharding.py tests/dist/test_slow_links.py tests/dist/test_qk_clip.py "
        "-k 'parameters or inside_the_node or what_is_lost or units_send or qk_clip'",
        "what_is_lost and int8",
        hides_engine=True,
    ),
    Item(
        "memory",
        2,
        "memory of a context and a communicator against the planner's reserve of 8 %; a save; a resumed run",
        "benchmarks/gpu_memory.py --out {scratch}/figures.json",
        {"--out": "--device cpu --small --out"},
        ranks=True,
    ),
)
