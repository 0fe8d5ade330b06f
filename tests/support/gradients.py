"""Gradients of whole parameters, gathered from the ranks of any layout, and compared name by name.

The norm of all gradients hides an error in a small one, and AdamW's updates are the same whatever a gradient is
multiplied by.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

STEPS = 2  # In the first, LoRA's A has no gradient and a bias of experts has not moved.


def keep_gradients(run: Any) -> None:
    """Let the first steps of a run in fp32 write `whole` to RUN_DIR/gradients/ITERATION."""
    import torch.distributed as dist

    engine = run.engine
    squared_norm = engine.optimizer.squared_norm

    def keeping() -> Any:
        norm = squared_norm()  # which prepares the gradients
        iteration = engine.scheduler.num_steps
        if iteration <= STEPS and run.config.precision.dtype == "fp32":
            found = pickle.dumps(whole(engine))
            if dist.get_rank() == 0:
                (run.run_dir / "gradients").mkdir(exist_ok=True)
                (run.run_dir / "gradients" / str(iteration)).write_bytes(found)
        return norm

    engine.optimizer.squared_norm = keeping


def whole(engine: Any) -> dict[str, NDArray[Any]]:
    """Return, on rank 0, the gradient of each trained parameter, a sum over tokens, and each buffer, by global name.

    A rank's copy that differs from those of ranks before it has an entry of its own. All ranks call it.
    """
    import torch.distributed as dist

    parts = [
        (part.key, part.global_shape, part.global_offset, part.data.float().cpu().numpy()) for part in _parts(engine)
    ]
    gathered: Any = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(parts, gathered)
    found: dict[str, NDArray[Any]] = {}
    for rank, (key, shape, offset, data) in ((rank, part) for rank, each in enumerate(gathered or ()) for part in each):
        place: Any = (..., *(slice(at, at + size) for at, size in zip(offset, data.shape, strict=True)))
        box = found.setdefault(key, np.full(shape, np.nan, data.dtype))[place]
        if (~np.isnan(box) & (box != data)).any():
            found[f"{key} of rank {rank}"] = data
        box[...] = data
    return found


def _parts(engine: Any) -> Iterator[Any]:
    """Yield what this rank holds of gradients and buffers, as parts of global tensors."""
    from megavlm.model.vlm import bare_chunk
    from megavlm.optim.fully_sharded import FullyShardedChunk
    from megavlm.optim.master_weights import held_layouts
    from megavlm.parallel.shards import local_part, shard_layout

    entries: dict[int, Any] = {}
    for chunk in engine.model_chunks:
        state = chunk._given if isinstance(chunk, FullyShardedChunk) else bare_chunk(chunk).sharded_state_dict()
        entries |= {id(entry.data): entry for entry in state.values()}
    for part in engine.optimizer.chained_optimizers:
        for _, weights, layout in held_layouts(part, entries):
            yield from layout.parts(local_part(weights.grad))
    for buffer in (buffer for chunk in engine.model_chunks for buffer in bare_chunk(chunk).buffers()):
        if id(buffer) in entries:
            yield from shard_layout(entries[id(buffer)], 0, buffer.numel(), replica=0).parts(buffer)


def assert_same_gradients(actual: Path, expected: Path, *, tolerance: float) -> None:
    """Each parameter's gradient agrees within a share of its norm, and of a thousandth of that of all gradients.

    fp32 sums in another order differ by about 5e-7; after an update by up to a hundred times as much, because AdamW
    moves a weight whose gradient is rounding as far as any other.
    """
    ours, theirs = (pickle.loads(path.read_bytes()) for path in (actual, expected))
    assert ours.keys() == theirs.keys(), f"of one run alone: gradients of {sorted(ours.keys() ^ theirs.keys())}"
    norms = {name: np.linalg.norm(each) for name, each in theirs.items()}
    floor = np.linalg.norm([*norms.values()]) / 1000
    tolerance *= 1 if actual.name == "1" else 100
    told = []
    for name, norm in norms.items():
        # Without padding, which depends on TP.
        common = tuple(slice(min(sizes)) for sizes in zip(ours[name].shape, theirs[name].shape, strict=True))
        off = np.linalg.norm(ours[name][common] - theirs[name][common])
        if not off <= tolerance * (norm + floor):
            told.append(f"{name} by {off:.1e} of {norm:.1e}")
    assert not told, f"gradients of iteration {actual.name} are off: {told}"
