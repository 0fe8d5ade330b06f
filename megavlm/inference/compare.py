"""Load two models (runs, checkpoints of any layout, or Hugging Face folders) and compare them layer by layer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from megavlm.arch.image_tokens import TileGroup, Tiling, grid_of, tokens_per_image
from megavlm.arch.objectives import objective_of
from megavlm.backend import Backend
from megavlm.checkpoint import folders
from megavlm.checkpoint.hf.adapters import table_in_memory
from megavlm.checkpoint.hf.checkpoint_reader import load_checkpoint
from megavlm.checkpoint.hf.embedding_files import is_in_parts
from megavlm.checkpoint.hf.hf_files import DTYPES, transformers_model
from megavlm.checkpoint.hf.importing import load_weights
from megavlm.checkpoint.hf.pretrained import Pretrained, pretrained_of, with_pretrained_model
from megavlm.checkpoint.summary import model_of, read_summary
from megavlm.config.derived import usual_side
from megavlm.config.schema import (
    CheckpointConfig,
    Config,
    DatasetConfig,
    ModelConfig,
    ObjectiveConfig,
    PrecisionConfig,
)
from megavlm.data.collate import CollateSpec, collate
from megavlm.data.file_source import FilesSource
from megavlm.data.synthetic import SyntheticSource
from megavlm.data.types import Segment
from megavlm.errors import UserError
from megavlm.inference.folders import begun_with_head
from megavlm.inference.parting import Model, Row, beside_transformers, compared, first_parting
from megavlm.inference.single_process import full_model, single_process_groups
from megavlm.inputs.bad_sample import BadSample
from megavlm.inputs.batch import MicroBatch
from megavlm.model.vlm import VLMChunk
from megavlm.parallel.groups import Groups
from megavlm.rules.defaults import resolve
from megavlm.rules.fields import options, value_at
from megavlm.rules.load import from_yaml_file

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

_LOOKED_AT = 20  # records tried per wanted sample, because some may be unusable


@dataclass(frozen=True)
class Side:
    """One of two models to compare: configuration, weights as one chunk, and the types of its stored weights."""

    config: Config
    chunk: VLMChunk
    kept_in: frozenset[torch.dtype]  # types of its weights in the folder
    pretrained: Pretrained | None  # None for a run, and for an export in parts


@dataclass(frozen=True)
class Comparison:
    """The result of a comparison: rows in the order of computation, and model options that differ."""

    rows: Sequence[Row]
    options: Mapping[str, tuple[Any, Any]]

    @property
    def parted(self) -> Row | None:
        """Return the first row that rounding does not explain."""
        return first_parting(self.rows)


def compare(
    paths: tuple[Path, Path],
    data: DatasetConfig | None,
    backend: Backend,
    *,
    precisions: tuple[str, str] = ("fp32", "fp32"),
    samples: int = 2,
    seq_length: int | None = None,
    gradients: bool = False,
    transformers: bool = False,
) -> Comparison:
    """Compare the models of two folders on the same samples: the first usable of `data`, or random images and text.

    With `transformers`, the second folder is run by Transformers. Raises UserError for folders that cannot be
    read so, and if none of the first records of `data` can be used.
    """
    groups = single_process_groups(backend)
    a, b = (
        side_of(path, data, groups, backend, precision=precision, seq_length=seq_length)
        for path, precision in zip(paths, precisions, strict=True)
    )
    if (scores := objective_of(b.config.model).scores) != objective_of(a.config.model).scores:
        raise UserError(f"{paths[scores]} is a reward model, and {paths[1 - scores]} is none: compare two of one kind")
    if data is None:
        random = a if a.pretrained is not None else b
        batches = synthetic_batches(
            random.config, samples, None if random.pretrained is None else random.pretrained.tiling
        )
        pairs = [(batch, batch) for batch in batches]
    else:
        pairs = list(zip(*(_first_batches(side.config, samples) for side in (a, b)), strict=False))
        if not pairs:
            raise UserError(f"none of the first records of {data.path} can be used: megavlm preview says why")
    apart = {name: pair for name, pair in _options(a.config, b.config).items() if pair[0] != pair[1]}
    roundoffs = [torch.finfo(PRECISIONS[precision]).eps / 2 for precision in precisions]
    if a.kept_in != b.kept_in:
        roundoffs += [torch.finfo(dtype).eps / 2 for dtype in a.kept_in ^ b.kept_in]
    roundoff = max(roundoffs)
    if not transformers:
        rows = compared(Model(a.chunk, roundoff), Model(b.chunk, roundoff), pairs, gradients=gradients)
        return Comparison(rows, apart)
    if b.pretrained is None or b.pretrained.family.inputs is None:
        raise UserError(f"{paths[1]} is no folder that Transformers reads: leave --transformers out")
    theirs = transformers_model(b.pretrained.folder.path, dtype=PRECISIONS[precisions[1]]).to(backend.device)
    given = [(ours, b.pretrained.family.inputs(batch.to(backend.device), b.config.model)) for ours, batch in pairs]
    table = table_in_memory(b.pretrained.family, b.config.model)
    return Comparison(beside_transformers(Model(a.chunk, roundoff), theirs, table, given), apart)


def side_of(
    path: Path,
    data: DatasetConfig | None,
    groups: Groups,
    backend: Backend,
    *,
    precision: str = "fp32",
    seq_length: int | None = None,
) -> Side:
    """Load the model of a run, checkpoint or Hugging Face folder. Raises UserError for a folder without a model."""
    is_folder = (path / "config.json").exists() or is_in_parts(path)
    loaded: Sequence[Pretrained] = ()
    config = begun_with_head(path) if is_folder else _of_run(path)
    config = replace(config, precision=PrecisionConfig(precision))  # type: ignore[arg-type]
    if data is None and objective_of(config.model).scores:
        raise UserError(f"{path} is a reward model, which scores answers: name a file of pairs after A and B")
    if data is not None:
        only = replace(config.data, kind="files", datasets=(data,), validation=(), validation_split=0.0, shuffle=False)
        config = replace(config, data=only)
    if is_folder:
        config = resolve(with_pretrained_model(config))
        loaded = pretrained_of(config)
    pretrained = loaded[0] if len(loaded) == 1 else None
    if loaded and data is None and seq_length is None:
        seq_length = length_of_a_sample(config.model, None if pretrained is None else pretrained.tiling)
    config = resolve(
        replace(config, train=replace(config.train, seq_length=seq_length or config.train.seq_length or 2048))
    )
    chunk = full_model(config, groups, backend)
    if loaded:
        load_weights([chunk], loaded, config, vocab_size=config.model.language.vocab_size)
        kept = {DTYPES[info.dtype] for each in loaded for info in each.folder.tensors.values()}
    else:
        kept = load_checkpoint([chunk], folders.resolve(path))
    return Side(
        config, chunk.to(backend.device).eval(), frozenset(each for each in kept if each.is_floating_point), pretrained
    )


def _of_run(path: Path) -> Config:
    """Return the configuration of a run or checkpoint: model, adapters, and the run's data and training options."""
    checkpoint = folders.resolve(path)
    saved = model_of(read_summary(checkpoint), checkpoint)
    model = saved.model
    objective = objective_of(model)
    if objective.compares and not objective.scores:  # such a model is like any other: single answers are enough
        model = replace(model, objective=ObjectiveConfig())
    file = checkpoint.parent.parent / "config.yaml"
    run = from_yaml_file(file) if file.is_file() else Config()
    begun = CheckpointConfig(init_from=run.checkpoint.init_from, language_from=run.checkpoint.language_from)
    return Config(model=model, lora=saved.lora, data=run.data, train=run.train, checkpoint=begun)


def _first_batches(config: Config, samples: int) -> Iterator[MicroBatch]:
    """Yield the first `samples` usable samples of the data, each as a micro-batch."""
    source = FilesSource(config)

    def usable() -> Iterator[MicroBatch]:
        for number in range(_LOOKED_AT * samples):
            for encoded in source.encode(number).samples:
                with suppress(BadSample):
                    sample = source.load(Segment(number, encoded))
                    yield collate([[sample]], CollateSpec.of(config, source, seq_length=len(sample)))

    return islice(usable(), samples)


def synthetic_batches(config: Config, samples: int, tiling: Tiling | None) -> list[MicroBatch]:
    """Return micro-batches of one sample each, of random images and text."""
    source = SyntheticSource(config, tiling=tiling)
    return [collate([[source.sample(index)]], CollateSpec.of(config, source)) for index in range(samples)]


def length_of_a_sample(model: ModelConfig, tiling: Tiling | None) -> int:
    """Return the tokens of one image and some text, rounded up to a multiple of 64 so that any TP divides it."""
    groups, size = [], (usual_side(model),) * 2
    if model.projector.anyres_max_tiles is not None:
        groups = [TileGroup((1, 1) if tiling is None else tiling(size), size)]
    tiles = sum(group.tiles for group in groups) or 1
    features = sum(tokens_per_image([grid_of(*size, model.vision.patch_size)] * tiles, groups, model.projector))
    return 64 * -(-(features + 32) // 64)


def _options(a: Config, b: Config) -> dict[str, tuple[Any, Any]]:
    """Return each option of the model configuration with its values in `a` and `b`."""
    paths = {option.key: option.path for option in options() if option.path[0] == "model"}
    return {key: (value_at(a, path), value_at(b, path)) for key, path in paths.items()}
