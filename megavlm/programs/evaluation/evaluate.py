"""Score a trained model on questions about images, videos and sounds: `megavlm evaluate RUN_DIR --task FILE.jsonl`.

Answers are appended to a folder as they are generated, and the same command resumes an interrupted evaluation. At the
end the folder has the scores (results.json) and a page of the wrong answers (failures.html). Use torchrun for one
process per GPU: `torchrun --nproc-per-node 8 -m megavlm evaluate …`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from megavlm.command_line.commands import Parser, count, progress, reported
from megavlm.errors import UserError
from megavlm.files import check_folder, replace_file
from megavlm.inference.folders import model_folder
from megavlm.json_files import read_json
from megavlm.programs.evaluation.answers import AnswerFolder, ask, refuse_unreadable, remaining
from megavlm.programs.evaluation.metrics import METRICS
from megavlm.programs.evaluation.scores import failures_page, results_json, scored, scores_of
from megavlm.programs.evaluation.task import Task, check_names, read_task, task_option
from megavlm.programs.model_options import add_model_options, assistant_of, memory_reported, sampling_of
from megavlm.rules.extensions import without_extensions
from megavlm.world import World, world_of

_SECONDS = 10.0  # between two lines of progress
_PAUSE = 1.0  # seconds between two looks at the answers of other processes


@reported("evaluate")
def main(argv: Sequence[str]) -> int:
    """Return the exit status: 0 done, 2 an argument is wrong or cannot be used (reported in one line)."""
    world = World()
    try:
        given = _parser().parse_args(without_extensions(argv))
        world = world_of(os.environ)
        with memory_reported(given.batch_size):
            _evaluate(given, world)
    except UserError as error:
        if world.rank:
            time.sleep(error.wait)  # if rank 0 fails alike, torchrun ends this rank before it prints the same error
        raise
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        description="Score a trained model on questions about images, videos and sounds.", allow_abbrev=False
    )
    parser.add_argument(
        "--task",
        nargs="+",
        required=True,
        metavar="FILE",
        help="Files of questions (JSON Lines, CSV, parquet, …, see docs/after-training.md), as FILE[,image_root=DIR]"
        f"[,columns=…][,metric=METRIC][,name=NAME]. Metrics: {', '.join(METRICS)}; default: what each record says.",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="Folder of answers and results; default: RUN_DIR/evaluations/ITERATION, or evaluations/NAME here for a "
        "Hugging Face folder.",
    )
    parser.add_argument("--batch-size", type=count, default=8, metavar="N", help="Questions answered together.")
    parser.add_argument("--limit", type=count, metavar="N", help="Only the first N questions of each task.")
    parser.add_argument(
        "--failures", type=count, default=200, metavar="N", help="Most wrong answers of a task on the page."
    )
    add_model_options(parser, max_new_tokens=128)
    return parser


def _evaluate(given: argparse.Namespace, world: World) -> None:
    if given.out is not None:
        check_folder("--out", given.out)
    tasks = _tasks(given)
    sampling = sampling_of(given)
    refuse_unreadable(tasks)
    found = model_folder(given.model)
    folder = AnswerFolder(given.out or found.results, rank=world.rank)
    settings = {
        "weights": found.digest,
        **{f"task {task.name}": task.digest for task in tasks},
        **{name: getattr(given, name) for name in ("limit", "system", "dtype")},
        "chat_template": _as_named(given.chat_template),
        **asdict(sampling),
    }
    try:
        folder.claim(settings)
        if work := remaining(tasks, folder, rank=world.rank, world=world.world_size):
            assistant = assistant_of(given, found, local_rank=world.local_rank)
            ask(
                assistant,
                work,
                folder,
                sampling=sampling,
                system=given.system,
                batch_size=given.batch_size,
                say=progress(_SECONDS) if world.rank == 0 else lambda line: None,
            )
        if world.rank == 0:
            while remaining(tasks, folder):  # other processes still answer theirs
                time.sleep(_PAUSE)
            _report(given, tasks, folder, settings)
    except OSError as error:
        raise UserError(
            f"{folder.path} cannot be written ({error.strerror or error}): name a folder with --out"
        ) from error


def _as_named(template: str | None) -> str | None:
    """Return the name of a chat template, with a hash of its content if it is a file, which may change."""
    if template is None or not Path(template).is_file():
        return template
    return f"{template} {hashlib.sha256(Path(template).read_bytes()).hexdigest()}"


def _tasks(given: argparse.Namespace) -> list[Task]:
    """Read the tasks of `--task`, up to `--limit` questions each. Raises UserError for a wrong task."""
    options = [task_option(text) for text in given.task]
    check_names(options)
    tasks = [read_task(option) for option in options]
    return [replace(task, questions=task.questions[: given.limit]) for task in tasks]


def _report(given: argparse.Namespace, tasks: Sequence[Task], folder: AnswerFolder, settings: dict[str, Any]) -> None:
    """Write results.json and failures.html, and print the scores."""
    answers = folder.read()
    found = [(task, scored(task, answers)) for task in tasks]
    about = [("model", given.model), ("answers", f"at most {given.max_new_tokens} tokens")]
    page = failures_page(f"Answers of “{Path(given.model).resolve().name}”", about, found, most=given.failures)
    results, file = results_json(found, {"model": given.model, **settings}), folder.path / "results.json"
    before = read_json(file) if file.is_file() else {}  # of other tasks, with the same settings
    results |= {name: {**before.get(name, {}), **results[name]} for name in ("settings", "tasks")}
    replace_file(file, json.dumps(results, indent=1, ensure_ascii=False) + "\n")
    replace_file(folder.path / "failures.html", page)
    for task, mine in found:
        for score in scores_of(mine):
            print(f"{task.name}: {score}")
    print(f"wrote {file} and {folder.path / 'failures.html'}")
