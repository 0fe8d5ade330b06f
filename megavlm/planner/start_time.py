"""Predict the seconds of each part of a run's start, for `--dry-run`.

Each part grows with the model and the number of ranks by a formula; comments give the sources of its constants. The
constants of CPUs are from two processes of the demo on two cores, which took 3.3 to 4.2 s (2026-11-26;
`benchmarks/start.py` measures the parts); those of GPUs are unconfirmed estimates. First-time indexing of data sets and
downloads are left out.
"""

from __future__ import annotations

from collections.abc import Mapping

from megavlm.arch.dims import Dims
from megavlm.arch.kinds import model_parameters
from megavlm.arch.layers import layer_names
from megavlm.config.messages import several
from megavlm.config.schema import Config
from megavlm.planner.hardware import Hardware
from megavlm.resilience.phases import PARTS
from megavlm.rules.defaults import starts_from_weights

# Seconds, on CPUs and on GPUs. All are estimates; those of CPUs add up to the starts that were measured.
_IMPORTS = {False: 1.9, True: 10.0}  # on GPUs CUDA's context and Transformer Engine come on top
_MEETING = {False: 0.1, True: 0.5}
_PER_RANK = 1e-3  # of the meeting: one store answers all ranks, one after the other. Estimate
_PER_GROUP = {False: 0.01, True: 0.3}  # NCCL makes a communicator
_DATA = 0.1  # tokenizer and loaders of the demo; estimate
_OUTPUTS = 0.5  # TensorBoard and the first samples; estimate
_WARM_UP = {False: 0.3, True: 10.0}  # of the first step: kernels are loaded and chosen
_DRAWN = 1e8  # parameters per second that a process draws from the seed: estimate; torch.randn made 1.4e8 in a thread
_LEAST = 0.05  # smaller shares are not printed


def start_estimate(
    config: Config, dims: Dims, hardware: Hardware, step: float, *, resumes: bool
) -> Mapping[str, float]:
    """Return the seconds of each part of a start, by its name in `PARTS`; `step`: seconds of a later training step."""
    on_gpu = hardware.on_gpu
    parameters = sum(model_parameters(name, config.model) for name in layer_names(config.model)) / dims.pp
    given = resumes or starts_from_weights(config)
    axes = sum(size > 1 for size in (dims.tp, dims.cp, dims.dp, dims.pp))  # each is in two groups of a rank, or three
    return {
        "imports": _IMPORTS[on_gpu],
        "rendezvous": _MEETING[on_gpu] + _PER_RANK * dims.world,
        "groups": _PER_GROUP[on_gpu] * (1 + 2 * axes),
        "data": _DATA,
        # A tensor is drawn whole by each rank that holds a part of it, so that tensor parallelism saves nothing.
        "model": 0.0 if given else parameters / _DRAWN,
        "weights": _bytes_read(config, dims, parameters, resumes=resumes) / hardware.own_host.disk if given else 0.0,
        "outputs": _OUTPUTS,
        "first_step": _WARM_UP[on_gpu] + step,
    }


def _bytes_read(config: Config, dims: Dims, parameters: float, *, resumes: bool) -> float:
    """Return the bytes of weights that a rank reads; of a checkpoint also master weights and moments, maybe sharded."""
    held = parameters / dims.tp
    if not resumes:
        return 2 * held
    sharded = config.parallel.data_parallel_sharding != "none"
    return held * (2 + 12 / (dims.dp_cp if sharded else 1))


def starting_line(config: Config, dims: Dims, hardware: Hardware, step: float, *, name: str, resumes: bool) -> str:
    """Return a line with the predicted seconds until the end of the first step, and the longest parts of them."""
    parts = start_estimate(config, dims, hardware, step, resumes=resumes)
    whole = sum(parts.values())
    long = sorted((part for part in parts if parts[part] > _LEAST * whole), key=lambda part: -parts[part])
    shown = ", ".join(f"{parts[part]:.2g} s {PARTS[part]}" for part in long)
    return f"starts in about {whole:.2g} s at {several(dims.world, 'rank')}, of which {shown} ({name}; an estimate)"
