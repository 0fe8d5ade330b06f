"""Compare the logits of Transformers' model and of megavlm's model on the same images and text."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from megavlm.arch.objectives import HEAD
from megavlm.backend import Backend
from megavlm.checkpoint import folders
from megavlm.checkpoint.hf.adapters import table_in_memory
from megavlm.checkpoint.hf.checkpoint_reader import TrainedReader
from megavlm.checkpoint.hf.embedding_files import is_in_parts
from megavlm.checkpoint.hf.exporting import Exported
from megavlm.checkpoint.hf.hf_files import transformers_model
from megavlm.checkpoint.hf.importing import load_weights
from megavlm.checkpoint.hf.pretrained import ALL_PARTS, SCORE, Pretrained, with_pretrained_model
from megavlm.checkpoint.hf.sidecar import exportable, settings_at
from megavlm.checkpoint.summary import check_model, read_summary
from megavlm.config.schema import CheckpointConfig, Config, PrecisionConfig
from megavlm.errors import UserError
from megavlm.families.shared.table import Rename
from megavlm.inference.compare import length_of_a_sample, synthetic_batches
from megavlm.inference.parting import Model, Row, beside_transformers, first_parting
from megavlm.inference.single_process import full_model, single_process_groups
from megavlm.inputs.batch import MicroBatch
from megavlm.model.vlm import VLMChunk
from megavlm.model.weights import set_whole
from megavlm.rules.defaults import resolve

_ROUNDOFF = torch.finfo(torch.float32).eps / 2


@dataclass(frozen=True)
class Difference:
    """Over all logits: largest difference, largest absolute value, and share of positions with the same prediction.

    `parted` is the first module that differs beyond rounding; it is searched if the difference exceeds the tolerance.
    """

    largest: float
    scale: float
    same_choice: float
    length: int  # positions of a sample
    parted: Row | None = None


@torch.no_grad()
def compare(
    folder: Path,
    checkpoint: Path | None,
    backend: Backend,
    *,
    samples: int,
    seq_length: int | None,
    tolerance: float = math.inf,
) -> Difference:
    """Compare logits of Transformers' model of a folder and of ours, in fp32, on random images and text.

    Our weights are those of `checkpoint`, or without one those of the folder itself. Without `seq_length`, a sample has
    the length of one image and some text. Raises UserError if Transformers' model does not accept
    the images and text, for an export in parts, or if the checkpoint holds adapters.
    """
    if is_in_parts(folder):
        raise UserError(
            f"{folder} consists of parts, which no class of Transformers has together: verify {folder}/language"
        )
    if checkpoint is not None and read_summary(folders.resolve(checkpoint)).get("lora", {}).get("rank"):
        raise UserError(f"{checkpoint} has adapters: fold them in with merge-lora and verify the result")
    asked = Config(checkpoint=CheckpointConfig(init_from=str(folder)), precision=PrecisionConfig("fp32"))
    config, pretrained = resolve(with_pretrained_model(asked)), Pretrained.of(folder, *ALL_PARTS)
    if pretrained.scores:  # the vocabulary came with the first weights, and shows all that the score depends on
        pretrained = replace(pretrained, table={**pretrained.table, HEAD: Rename(SCORE)})
    length = seq_length or length_of_a_sample(config.model, pretrained.tiling)
    config = replace(config, train=replace(config.train, seq_length=length))
    groups = single_process_groups(backend)
    chunk = full_model(config, groups, backend)
    load_weights([chunk], [pretrained], config, vocab_size=config.model.language.vocab_size)
    if checkpoint is not None:
        _load_exported(chunk, checkpoint, config)
    chunk.to(backend.device).eval()
    held = torch.bfloat16 if pretrained.folder.remark else torch.float32  # as they are dequantized here
    theirs = transformers_model(pretrained.folder.path, dtype=held).to(backend.device, torch.float32)
    scale, apart, same = 0.0, list[float](), list[float]()
    batches = synthetic_batches(config, samples, pretrained.tiling)
    for batch in batches:
        moved = batch.to(backend.device)
        ours = chunk(moved, logits=True).float()
        assert pretrained.family.inputs is not None
        given = pretrained.family.inputs(moved, config.model)
        try:
            expected = theirs(**given, use_cache=False).logits[:, : ours.shape[1]].float()
        except (RuntimeError, ValueError, IndexError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise UserError(
                f"Transformers' {pretrained.family.name} does not take images of {_grids(batch)} patches: {reason}"
            ) from error
        if expected.shape != ours.shape:
            raise UserError(
                f"logits have shape {tuple(ours.shape)} here and {tuple(expected.shape)} in Transformers: is "
                f"vocab_size of {pretrained.folder.path / 'config.json'} that of its weights?"
            )
        apart.append((ours - expected).abs().max().item())
        scale = max(scale, expected.abs().max().item())
        same.append((ours.argmax(-1) == expected.argmax(-1)).float().mean().item())
    parted, worst = None, float(np.max(apart))  # which keeps NaN
    if not worst <= tolerance:
        inputs = pretrained.family.inputs
        assert inputs is not None
        pairs = [(batch, inputs(batch.to(backend.device), config.model)) for batch in batches]
        table = table_in_memory(pretrained.family, config.model)
        parted = first_parting(beside_transformers(Model(chunk, _ROUNDOFF), theirs, table, pairs))
    return Difference(worst, scale, float(np.mean(same)), length, parted)


def _load_exported(chunk: VLMChunk, run: Path, config: Config) -> None:
    """Load the weights of a run or checkpoint into a model, each rounded to its type in an export. What
    the run lacks, as the vocabulary of a reward model, stays the folder's.

    Raises UserError for a checkpoint of another model.
    """
    checkpoint, sidecar, saved = exportable(run)
    source = Exported.of(TrainedReader(checkpoint), checkpoint, sidecar, saved.model)
    token = source.family.config(settings_at(sidecar)).image_token  # a run may leave the image token to the tokenizer
    if token != config.model.image_token:
        raise UserError(f"{run} was trained with image token {token}, and the folder says {config.model.image_token}")
    kept = {name: getattr(saved.model, name) for name in ("image_token", "objective")}  # no folder says the objective
    same = replace(config, model=replace(config.model, **kept))
    check_model(read_summary(checkpoint), same, checkpoint)
    source.records.verify(source.table)
    set_whole([chunk], lambda key: source.whole(key) if key in source.table else None)


def _grids(batch: MicroBatch) -> str:
    return ", ".join("×".join(map(str, grid)) for grid in batch.image_sizes.grids) or "no"
