"""Build the data loaders of a rank, for training and validation, and choose the ranks that read.

The samples of a computed source are made on every rank, which renders the images that it encodes. The samples of files
are read by the first rank of each model replica. It broadcasts the text to all ranks of the replica and sends each
image to the ranks that encode it, so that no image is read or decoded twice.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from megavlm.arch.objectives import objective_of
from megavlm.config.schema import Config
from megavlm.data.broadcast import ReplicaBroadcast
from megavlm.data.collate import CollateSpec
from megavlm.data.collator import Collator, OwnImages, all_images
from megavlm.data.costs import ImageAssignment
from megavlm.data.loader import DataLoader, RankLoader, pinned
from megavlm.data.sampler import BatchSampler, ValidationBatchSampler
from megavlm.data.source import Source
from megavlm.data.teacher import Teacher
from megavlm.data.types import ID, CollatedBatch, HeldOut
from megavlm.errors import UserError, one_line
from megavlm.files import replace_file
from megavlm.inputs.batch import MicroBatch
from megavlm.parallel.groups import Groups


@dataclass(frozen=True)
class Loaders:
    """The data loaders of a rank; `validation` is None without validation samples."""

    training: DataLoader
    validation: DataLoader | None


class References:
    """Log-probabilities of the answers under the reference model (the run's initial weights), in a file of RUN_DIR.

    The file is written before the run's first step. Answers are keyed by the identity of their content.
    """

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / "reference.npy"
        self._known: NDArray[np.void] | None = None

    def write(self, known: Mapping[int, float]) -> None:
        """Write the file of log-probabilities, given by answer identity, atomically."""
        content = io.BytesIO()
        np.save(content, np.array(sorted(known.items()), dtype=[("answer", np.int64), ("logprob", np.float64)]))
        replace_file(self.path, content.getvalue())

    def added(self, batch: MicroBatch) -> MicroBatch:
        """Return a micro-batch with the reference log-probabilities of its answers; unchanged before the file exists.

        Raises UserError for answers that the file lacks.
        """
        assert batch.text.members is not None
        if self._known is None:
            if not self.path.exists():
                return batch
            self._known = np.load(self.path)
        answers, logprobs = (self._known[name] for name in ("answer", "logprob"))
        wanted = batch.text.members[:, ID].numpy()
        places = np.searchsorted(answers, wanted).clip(max=len(answers) - 1)
        if not np.array_equal(answers[places], wanted):
            raise UserError(f"--datasets have answers that {self.path} lacks: begin a new run (--run-dir)")
        return replace(batch, text=replace(batch.text, reference=torch.from_numpy(logprobs[places])))


def build_loaders(
    config: Config,
    source: Source,
    groups: Groups,
    *,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    vision_group: dist.ProcessGroup | None,
    assignment: ImageAssignment | None = None,
    audio_ranks: Sequence[int] = (),
    validation: Sequence[HeldOut] = (),
) -> Loaders:
    """Return the data loaders of a run on this rank.

    `vision_group` are the ranks of the replica that encode images; it is None on a rank that encodes none. Each of
    these ranks encodes all images, or with `assignment` the images assigned to it. Patches have the type `dtype`.
    `audio_ranks` are the numbers in the replica of the ranks that encode sounds.
    """
    at, dims = groups.coords, groups.dims
    broadcast: ReplicaBroadcast | None = None
    if source.is_read:
        hosts = groups.maker.on_host(groups.replica)
        broadcast = ReplicaBroadcast(groups.replica, hosts, vision_group, device, assignment, audio_ranks)
    training = measured = None
    if broadcast is None or broadcast.reads:
        if at.dp == 0:
            for warning in source.warnings():
                print(f"warning: {one_line(warning)}", flush=True)
        own_images: OwnImages | None = None
        if assignment is not None:
            own_images = partial(assignment.own, rank=groups.replica_rank)
        elif vision_group is not None:
            own_images = all_images
        references = References(Path(config.run.run_dir)) if objective_of(config.model).refers else None

        def stage(collated: CollatedBatch, teacher: Teacher | None = None) -> MicroBatch:
            batch = collated.batch if references is None else references.added(collated.batch)
            if teacher is not None:
                batch = teacher.added(batch, [source.name(sample) for sample in collated.samples])
            return pinned(batch, device)

        make = partial(source.collator, own_images=own_images, pool=source.worker_pool(device))
        loader = partial(
            RankLoader,
            micro_batch_size=config.train.micro_batch_size,
            balance=config.data.balance,
        )
        spec = replace(CollateSpec.of(config, source), dtype=dtype)
        collator = make(spec)
        sampler = source.sampler(config, collator)
        taught = partial(stage, teacher=Teacher.of(config, vocab_size=source.vocab_size))
        training = loader(sampler, collator, dp_rank=at.dp, dp_size=dims.dp, stage=taught)
        if validation:
            collator = make(replace(spec, num_sources=len(source.validation_names)))
            sampler = _validation_sampler(config, validation, collator, groups)
            measured = loader(sampler, collator, dp_rank=at.dp, dp_size=dims.dp, stage=stage)
    return Loaders(
        DataLoader(training, broadcast=broadcast),
        DataLoader(measured, broadcast=broadcast) if validation else None,
    )


def _validation_sampler(config: Config, samples: Sequence[HeldOut], collator: Collator, groups: Groups) -> BatchSampler:
    dims, train = groups.dims, config.train
    return ValidationBatchSampler(
        samples,
        collator.window,
        count=train.global_batch_size,
        # All ranks have equally many micro-batches; for interleaved stages, a multiple of the number of stages.
        multiple=train.micro_batch_size * dims.dp * (dims.pp if dims.vpp > 1 else 1),
        most=config.evaluation.eval_iters,
        size=config.data.packing_window,
        seq_length=train.seq_length,
    )
