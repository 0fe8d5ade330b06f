"""Write the log-probability of each trained token: `megavlm logprobs RUN_DIR data.jsonl --out scores --tp 2`. Of a
reward model, write the scores of answers, and print how many pairs it ranks right.

The arguments after the data are options of training: layout, precision, sequence length, format of records. The model
is exported as for `megavlm chat`, adapters merged; that of a run from random weights is read from its checkpoint.
Samples are made from the records as in training, each once, and written as rows of parquet files. The same command
resumes after an interruption, also with another layout.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megavlm.command_line.commands import Parser, count, progress, reported
from megavlm.command_line.configuration import to_train
from megavlm.config.schema import Config
from megavlm.errors import UserError
from megavlm.files import check_folder, open_new, replace_file
from megavlm.json_files import read_json
from megavlm.programs.train import enter_world
from megavlm.rules.extensions import without_extensions

if TYPE_CHECKING:
    from megavlm.inference.folders import ModelFolder

_ROWS = 1000  # samples per parquet file
_GROUP = 16  # samples that a reader of one has to read (distillation reads them in any order)
_STATE = "position.json"


@reported("logprobs")
def main(argv: Sequence[str]) -> int:
    """Return the exit status: 0 done, 2 an argument or the data are wrong (reported in one line)."""
    words = list(takewhile(lambda word: not word.startswith("-"), argv))
    parser = _parser()
    given, training = parser.parse_known_args(argv[len(words) :])
    if len(words) < 2:
        parser.error("give a run or Hugging Face folder and data sets, before any option")
    without_extensions(training)  # which the model may need
    _write(given, words[0], words[1:], training)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        description="Write the log-probability of each trained token of data sets, or a reward model's scores.",
        usage="megavlm logprobs RUN_DIR|HF_DIR DATA [DATA …] --out DIR [options] [options of megavlm train]",
        allow_abbrev=False,
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="Folder of the parquet files.")
    parser.add_argument("--entropy", action="store_true", help="Also the entropy of each prediction, in nats.")
    parser.add_argument("--top-k", type=count, metavar="K", help="Also the K likeliest tokens of each prediction.")
    return parser


def _write(given: argparse.Namespace, model: str, data: Sequence[str], training: Sequence[str]) -> None:
    check_folder("--out", given.out)
    _check_pyarrow()
    launched = enter_world()
    from megavlm.inference.folders import model_folder

    found = model_folder(model, unexported=True)
    config, world = to_train(_run_words(found, data, given.out, training), launched=launched)
    if world < launched:
        raise UserError(f"{launched} processes were started, and the layout takes {world}: start so many")
    reward = config.model.objective.kind == "reward"
    if reward and (given.entropy or given.top_k is not None):
        raise UserError(f"{model} is a reward model, which predicts no tokens: leave --entropy and --top-k out")
    if given.top_k is not None and given.top_k > (size := config.model.language.vocab_size or given.top_k):
        raise UserError(f"--top-k {given.top_k} is more than the {size:,} tokens of the vocabulary")
    settings = {
        "weights": found.digest,
        "data": list(data),
        "top_k": given.top_k,
        "entropy": given.entropy,
        "seq_length": config.train.seq_length,
    }
    checkpoint = found.folder if found.is_checkpoint else None
    _score(config, given.out, settings | ({"reward": True} if reward else {}), checkpoint)


def _run_words(found: ModelFolder, records: Sequence[str], out: Path, training: Sequence[str]) -> list[str]:
    """Return the arguments of a training run with this model and the records as its validation data.

    Only the projector is trained, so that no other part has gradients and optimizer states; of a language model alone,
    adapters that change nothing; of a checkpoint with adapters, these, and of one without a tower, all.
    """
    config, settings = found.as_run()
    model = config.model
    trained = ("--freeze", "vision", *["audio"] * (model.audio.num_layers > 0), "language")
    if config.lora.rank:
        trained = ()
    elif not (model.vision.num_layers or model.vision.encoder_free):
        trained = () if found.is_checkpoint else ("--lora-rank", "1")  # it has no adapters to load
    return [
        *("--run-dir", str(out / "run"), "--datasets", *records, "--validation", *records),
        *(*trained, *"--train-iters 1 --no-save --no-tensorboard --set".split(), *settings),
        *training,
    ]


def _check_pyarrow() -> None:
    try:
        import pyarrow  # noqa: F401
    except ImportError as error:
        raise UserError("parquet files need pyarrow: pip install pyarrow") from error


def _score(config: Config, out: Path, settings: dict[str, Any], checkpoint: Path | None) -> None:
    from megavlm import backend as backends

    backend = backends.activate()
    import torch.distributed as dist

    from megavlm.train.token_scores import scored

    done = _position(out, settings)
    if done.get("last"):
        print(f"{out} has all {done['samples']:,} samples{_ranking(done)}")
        return
    say = progress(10.0)
    rows: list[dict[str, Any]] = []
    files, samples, skipped = done.get("files", 0), done.get("samples", 0), done.get("skipped", 0)
    pairs, right, margins = done.get("pairs", 0), done.get("right", 0), done.get("margins", 0.0)
    top, state = settings["top_k"] or 0, done.get("state")
    for batch in scored(config, backend, top=top, state=state, checkpoint=checkpoint):
        rows += [_row(*each, settings) for each in batch.samples]
        for row in rows[len(rows) - len(batch.samples) :] if settings.get("reward") else ():
            if (margin := row["score"] - row["rejected_score"]) == margin:
                pairs, right, margins = pairs + 1, right + (margin > 0), margins + margin
        samples, skipped = samples + len(batch.samples), skipped + batch.skipped
        if dist.get_rank() == 0 and (len(rows) >= _ROWS or batch.last):
            _write_rows(out / f"part-{files:05}.parquet", rows)
            files, rows = files + 1, []
            done = {"files": files, "samples": samples, "skipped": skipped, "last": batch.last}
            done |= {"pairs": pairs, "right": right, "margins": margins}
            replace_file(out / _STATE, json.dumps({**done, "state": batch.after, "settings": settings}) + "\n")
            say(f"{samples:,} samples")
    if dist.get_rank() == 0:
        print(f"{samples:,} samples, {skipped:,} skipped{_ranking(done)}: {out}")


def _position(out: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Read the position of an interrupted command, empty if none. Raises UserError if its settings were different."""
    if not (out / _STATE).is_file():
        return {}
    done: dict[str, Any] = read_json(out / _STATE, at_most=2**20)
    if changed := [name for name, value in settings.items() if done["settings"].get(name) != value]:
        raise UserError(f"--out {out} has scores of other {', '.join(changed)}: name another folder")
    return done


def _ranking(done: dict[str, Any]) -> str:
    """Return how a reward model ranks pairs, as part of a line; "" without pairs."""
    if not (pairs := done.get("pairs")):
        return ""
    return f"; {done['right'] / pairs:.1%} of {pairs:,} pairs right, mean margin {done['margins'] / pairs:.3f}"


def _row(data_set: str, record: str, scores: Any, settings: dict[str, Any]) -> dict[str, Any]:
    if settings.get("reward"):
        score, rejected = [*scores.tolist(), math.nan][:2]  # not null, so that all files have the same types
        return {"data_set": data_set, "record": record, "score": score, "rejected_score": rejected}
    names = ["positions", "tokens", "logprobs"]
    names += ["entropies"] * settings["entropy"] + ["top_tokens", "top_logprobs"] * (settings["top_k"] is not None)
    return {"data_set": data_set, "record": record, **{name: getattr(scores, name).tolist() for name in names}}


def _write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write rows to a parquet file atomically."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    temporary = path.with_suffix(".tmp")
    with open_new(temporary) as file:
        pq.write_table(pa.Table.from_pylist(list(rows)), file, row_group_size=_GROUP)
    os.replace(temporary, path)
