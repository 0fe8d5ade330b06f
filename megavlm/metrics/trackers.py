"""Run trackers (`--tracker`) in background threads, so that slow networks and errors do not affect training.

The numbers of metrics.jsonl have names (tags) of their own in TensorBoard and the trackers, which a table here lists.
"""

from __future__ import annotations

import queue
import re
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from megavlm.config.schema import Config
from megavlm.errors import UserError
from megavlm.files import replace_file
from megavlm.metrics.callback import Callback, Record, Samples, Saved, Start, StepEnd, Stop, Validation
from megavlm.metrics.secrets import without_secrets
from megavlm.paths import read_bytes
from megavlm.rules.fields import options, value_at

_CAPACITY = 1000  # calls that may wait: at ten steps a second, more than a minute and a half
# Seconds to wait at the end of a run; one that was asked to stop may be killed soon.
_PATIENCE = {"finished": 60.0, "failed": 20.0, "stopped": 5.0}

Call = Callable[[Callback], None]


class Background(Callback):
    """Calls a tracker in a background thread, which also creates it. Calls beyond the queue's capacity are dropped.

    A tracker that raises gets no more calls. Both cases are reported once, on stderr, without secrets.
    """

    def __init__(self, name: str, make: Callable[[], Callback], *, capacity: int = _CAPACITY) -> None:
        """Start the thread. `name` is the tracker's name in messages on stderr."""
        self._name, self._make = name, make
        self._calls: queue.Queue[Call | None] = queue.Queue(capacity)
        self._left_out = 0
        self._broken = False
        self._thread = threading.Thread(target=self._work, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def on_start(self, start: Start) -> None:
        self._pass_on(lambda tracker: tracker.on_start(start))

    def on_step_end(self, step: StepEnd) -> None:
        self._pass_on(lambda tracker: tracker.on_step_end(step))

    def on_validation(self, validation: Validation) -> None:
        self._pass_on(lambda tracker: tracker.on_validation(validation))

    def on_samples(self, samples: Samples) -> None:
        self._pass_on(lambda tracker: tracker.on_samples(samples))

    def on_save(self, saved: Saved) -> None:
        self._pass_on(lambda tracker: tracker.on_save(saved))

    def on_stop(self, stop: Stop, *, patience: float | None = None) -> None:
        """Wait for at most `patience` seconds until the tracker has processed all calls."""
        patience = _PATIENCE[stop.state] if patience is None else patience
        ending = threading.Thread(target=self._end, args=(stop,), daemon=True)  # the queue may be full
        ending.start()
        self._thread.join(patience)
        if self._thread.is_alive():
            self._say(f"has not taken everything within {patience:g} s: the run ends without it")

    def _end(self, stop: Stop) -> None:
        self._calls.put(lambda tracker: tracker.on_stop(stop))
        self._calls.put(None)

    def _pass_on(self, call: Call) -> None:
        if self._broken:
            return
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            self._left_out += 1
            if self._left_out == 1:
                self._say("is too slow: what finds no place in its queue is left out; metrics.jsonl has everything")

    def _work(self) -> None:
        tracker: Callback | None = None
        for call in iter(self._calls.get, None):
            if self._broken:
                continue  # empties the queue
            try:
                tracker = self._make() if tracker is None else tracker
                call(tracker)
            # Whatever a library or a server does, training goes on.
            except BaseException as error:
                self._broken = True
                self._say(f"fails ({type(error).__name__}: {error}): the run goes on without it")

    def _say(self, text: str) -> None:
        line = " ".join(f"warning: --tracker {self._name} {text}".split())
        print(without_secrets(line), file=sys.stderr, flush=True)


ID_FILE = "{}-run-id.txt"
_PACKAGES = {"wandb": "wandb", "mlflow": "mlflow-skinny"}


def check_installed(names: Sequence[str]) -> None:
    """Raise UserError if the package of a tracker is missing."""
    for name in names:
        if find_spec(name) is None:
            raise UserError(f"--tracker {name} needs a package that is missing: pip install {_PACKAGES[name]}")


def trackers_of(config: Config, run_dir: Path) -> list[Callback]:
    """Return the trackers of a run; each imports its library in its own thread."""
    logging = config.logging
    name = logging.tracker_run_name or run_dir.resolve().name
    return [
        Background(each, partial(_make, each, logging.tracker_project, name)) for each in dict.fromkeys(logging.tracker)
    ]


def _make(tracker: str, project: str, name: str) -> Callback:
    from megavlm.metrics.tracker_clients import MlflowTracker, WandbTracker

    made: type[WandbTracker | MlflowTracker] = WandbTracker if tracker == "wandb" else MlflowTracker
    return made(project=project, name=name)


def settings_of(config: Config) -> dict[str, Any]:
    """Return the values of all options by key (`train.train_iters`), without secrets, for trackers to display."""
    values = {option.key: value_at(config, option.path) for option in options()}
    plain = {
        key: [vars(each) if hasattr(each, "__dict__") else each for each in value]
        if isinstance(value, tuple)
        else value
        for key, value in values.items()
    }
    return without_secrets(plain)


def known_id(run_dir: Path, tracker: str) -> str | None:
    """Return the tracker's run id that `remember_id` saved in RUN_DIR; None if there is no valid one."""
    try:
        text = read_bytes(run_dir / ID_FILE.format(tracker), at_most=1024).decode(errors="replace").strip()
    except OSError:
        return None
    return text if re.fullmatch(r"[\w-]{1,128}", text) else None


def continued_id(start: Start, tracker: str) -> str | None:
    """Return the id of the tracker's run that a resumed run continues; None for a run that begins anew, because the
    tracker's run then has steps of another attempt, which metrics.jsonl drops.
    """
    return known_id(start.run_dir, tracker) if start.iteration else None


def remember_id(run_dir: Path, tracker: str, identity: str) -> None:
    """Save the tracker's run id in RUN_DIR, so that a resumed run continues the same tracker run."""
    replace_file(run_dir / ID_FILE.format(tracker), identity + "\n")


_GROUPS = {
    "train": "loss mtp_loss loss_by_source aux_loss balance_loss router_z_loss grad_norm max_attention_logit "
    "qk_clipped_heads learning_rate loss_scale updated skipped_steps epoch",
    "rewards": "reward_chosen reward_rejected reward_margin reward_accuracy chosen_share answer_tokens",
    "data": "tokens trained_tokens image_tokens images samples skipped_samples split_samples packing_efficiency",
    "perf": "data_time_s step_time_s tokens_per_second images_per_second samples_per_second model_tflops_per_device "
    "mfu peak_memory_gib stage_memory_gib energy_j phase_seconds slowest_rank slowest_rank_s slowest_rank_excess "
    "save_stall_s save_time_s eval_time_s eval_time_fraction sample_time_s",
}
TAGS = {name: f"{group}/{name}" for group, names in _GROUPS.items() for name in names.split()}
TAGS |= {"expert_load_max": "experts/load_max", "expert_load_entropy": "experts/load_entropy"}
# Prefixes of names and their replacements; names with a slash are tags already.
PREFIXES = {"eval_": "validation/", "imbalance_": "data/imbalance_"}
_NO_METRIC = ("iteration",)


def tag_of(name: str) -> str:
    """Return the tag of a name in metrics.jsonl; `other/NAME` for a name that is not in the table."""
    if name in TAGS or "/" in name:
        return TAGS.get(name, name)
    for prefix, instead in PREFIXES.items():
        if name.startswith(prefix):
            return instead + name.removeprefix(prefix)
    return f"other/{name}"


def tagged(record: Record) -> dict[str, float]:
    """Return the numbers of a record by tag, without None and texts; numbers in a mapping get `TAG/KEY`."""
    found: dict[str, float] = {}
    for name, value in record.items():
        parts = {f"/{part}": each for part, each in value.items()} if isinstance(value, Mapping) else {"": value}
        for part, number in parts.items():
            if name not in _NO_METRIC and isinstance(number, float | int):
                found[tag_of(name) + part] = number
    return found
