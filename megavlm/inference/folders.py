"""Find the Hugging Face folder of a model; a run's newest checkpoint is exported once, to RUN_DIR/exports."""

from __future__ import annotations

import fcntl
import hashlib
import json
import shutil
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from megavlm.arch.objectives import objective_of
from megavlm.checkpoint import folders
from megavlm.checkpoint.hf.embedding_files import begun_with, check_predicts, is_in_parts
from megavlm.checkpoint.hf.pretrained import with_pretrained_model
from megavlm.checkpoint.manifest import MANIFEST
from megavlm.config.schema import Config, DataConfig, ModelConfig, ObjectiveConfig, TrainConfig
from megavlm.errors import UserError
from megavlm.files import open_to_append, replace_file
from megavlm.paths import read_bytes
from megavlm.program import program
from megavlm.rules.check import idle
from megavlm.rules.fields import options, value_at
from megavlm.rules.load import as_data, from_yaml_file
from megavlm.storage.cache import local_path

EXPORTS = "exports"  # in a run folder
# Data options on which the text and the pixels of a sample depend, and which of its tokens are trained.
_MAKE_SAMPLES = (
    *("tokenizer", "chat_template", "train_on", "enable_thinking", "image_processor"),
    *("min_pixels", "max_pixels", "max_image_pixels", "fast_image_resize"),
    *("video_fps", "video_max_frames", "video_max_tokens", "video_sound"),
)
_LARGEST = 2**28  # bytes of a manifest


@dataclass(frozen=True)
class ModelFolder:
    """A Hugging Face folder, and the data options (chat template, tokenizer, image processor) of its training."""

    folder: Path
    data: DataConfig
    digest: str  # hash that identifies the weights
    results: Path  # default folder for results of this model
    seq_length: int | None = None  # of the training
    is_checkpoint: bool = False  # the folder is a checkpoint, of a run that cannot be exported

    def as_run(self) -> tuple[Config, list[str]]:
        """Return the configuration of a run that begins with this model, and words for --set that describe it.

        Of the training's options, those without effect are left out. A checkpoint's weights have to be loaded apart.
        """
        train = TrainConfig() if self.seq_length is None else TrainConfig(seq_length=self.seq_length)
        said = Config(data=replace(self.data, kind="files"), train=train)
        if self.is_checkpoint:
            saved = _saved(self.folder)
            objective = objective_of(saved.model)
            if objective.embeds:
                raise UserError(
                    f"{self.folder} was trained with --objective {saved.model.objective.kind}: it predicts no token"
                )
            kept = saved.model.objective if objective.scores else ObjectiveConfig()
            model = replace(saved.model, freeze=None, objective=kept)
            said = replace(said, model=model, lora=saved.lora)
        else:
            check_predicts(self.folder)
            begun = begun_with_head(self.folder)
            said = replace(said, model=begun.model, checkpoint=begun.checkpoint)
        config = with_pretrained_model(said, weights=False)
        without = {option.path for option, _ in idle(config)}
        values = {each: value_at(said, each.path) for each in options() if each.path not in without}
        return config, [f"{each.key}={json.dumps(as_data(v))}" for each, v in values.items() if v != each.default]


def begun_with_head(folder: Path) -> Config:
    """Return the configuration of a run that begins with a folder (`begun_with`); of a reward model's, to train it."""
    from megavlm.checkpoint.hf.pretrained import SCORE
    from megavlm.checkpoint.hf.quantized import opened

    scores = SCORE in opened(folder / "language" if is_in_parts(folder) else folder).tensors
    return begun_with(folder, ModelConfig(objective=ObjectiveConfig(kind="reward" if scores else "next-token")))


def model_folder(place: str | Path, *, unexported: bool = False) -> ModelFolder:
    """Return the Hugging Face folder at `place`, or for a run the export of its newest checkpoint; if `unexported`, the
    checkpoint itself for a run that did not begin with a Hugging Face folder.

    A Hugging Face folder may be an export in parts, a URL, or a name on the hub. The export of a run is
    `RUN_DIR/exports/iter_…` with adapters merged; it is written if it is missing or has other weights, which a line on
    stderr tells. Raises UserError if `place` is neither such a folder nor a run with a checkpoint, or if the run cannot
    be exported.
    """
    path = local_path(str(place), "MODEL")
    if (path / "config.json").is_file() or is_in_parts(path):
        return ModelFolder(path, DataConfig(), _digest_of_files(path), Path("evaluations", Path(place).resolve().name))
    if not path.is_dir():
        raise UserError(f"{path} is not a folder: name a run folder, or a Hugging Face folder with a config.json")
    try:
        checkpoint = folders.resolve(path)
    except UserError as error:
        raise UserError(
            f"{path} has neither a config.json nor a complete checkpoint: name a run folder that has saved, or a "
            "Hugging Face folder"
        ) from error
    if not unexported and _saved(checkpoint).model.objective.kind == "reward":
        raise UserError(f"{path} is a reward model, which predicts no token: megavlm logprobs writes scores of answers")
    run_dir = checkpoint.parent.parent if checkpoint.parent.name == "checkpoints" else checkpoint.parent
    digest, (data, length) = _digest_of(checkpoint), _of_training(run_dir)
    is_kept = unexported and not _begun_with_files(checkpoint)
    folder = checkpoint if is_kept else _exported(checkpoint, run_dir / EXPORTS, digest)
    return ModelFolder(folder, data, digest, run_dir / "evaluations" / checkpoint.name, length, is_kept)


def _digest_of(checkpoint: Path) -> str:
    """Return a hash of a checkpoint's manifest, which has a checksum of every file."""
    return hashlib.sha256(read_bytes(checkpoint / MANIFEST, at_most=_LARGEST)).hexdigest()


def _digest_of_files(folder: Path) -> str:
    """Return a hash of the names, sizes and times of the files on which answers depend, without reading them."""
    kinds = ("*.safetensors", "*config.json", "*token*", "chat_template*")
    files = sorted({file for kind in kinds for file in folder.glob(f"**/{kind}")})
    listed = [(str(file.relative_to(folder)), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return hashlib.sha256(repr(listed).encode()).hexdigest()


def _exported(checkpoint: Path, exports: Path, digest: str) -> Path:
    """Return the export of a checkpoint in `exports`; write it if it is missing or has another digest."""
    out, mark = exports / checkpoint.name, exports / f"{checkpoint.name}.sha256"
    try:
        exports.mkdir(exist_ok=True)
        with open_to_append(exports / "lock") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # two programs do not export the same run at once
            if not (out.is_dir() and mark.is_file() and mark.read_text() == digest):
                mark.unlink(missing_ok=True)
                shutil.rmtree(out, ignore_errors=True)
                print(f"exporting {checkpoint} to {out} (once)", file=sys.stderr, flush=True)
                _export(checkpoint, out)
                replace_file(mark, digest)
    except OSError as error:
        raise UserError(
            f"{exports} cannot be written ({error.strerror or error}): export the run elsewhere with "
            f"{program('convert')} export and name that folder"
        ) from error
    return out


def _begun_with_files(checkpoint: Path) -> bool:
    """Return whether the run of a checkpoint began with a Hugging Face folder."""
    from megavlm import backend

    backend.activate()

    from megavlm.checkpoint.hf.sidecar import sidecars

    return bool(sidecars(checkpoint))


def _export(checkpoint: Path, out: Path) -> None:
    merge = bool(_saved(checkpoint).lora.rank)  # activates the backend

    from megavlm.checkpoint.hf.exporting import export_run

    export_run(checkpoint, out, merge=merge, averaged=False)


def _saved(checkpoint: Path) -> Config:
    """Return the configuration of a checkpoint's model and adapters."""
    from megavlm import backend

    backend.activate()

    from megavlm.checkpoint.summary import model_of, read_summary

    return model_of(read_summary(checkpoint), checkpoint)


def _of_training(run_dir: Path) -> tuple[DataConfig, int | None]:
    """Return the data options with which the run encoded its records, and its --seq-length; defaults if it has no
    config.yaml.
    """
    file = run_dir / "config.yaml"
    if not file.is_file():
        return DataConfig(), None
    config = from_yaml_file(file)
    data = replace(DataConfig(), **{name: getattr(config.data, name) for name in _MAKE_SAMPLES})
    if (length := config.train.seq_length) is not None and data.video_max_tokens is None:
        data = replace(data, video_max_tokens=length // 2)  # fix the run's default
    return data, length
