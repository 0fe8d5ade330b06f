"""Write metrics and samples to Weights & Biases, MLflow and TensorBoard, whose libraries are imported on use."""

from __future__ import annotations

import json
import logging
import netrc
import os
import re
import sys
import textwrap
import time
import uuid
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from megavlm.backend.installed import without
from megavlm.errors import UserError
from megavlm.metrics.callback import Callback, Generation, Samples, Start, StepEnd, Stop
from megavlm.metrics.sinks import content_of, kept_lines
from megavlm.metrics.trackers import continued_id, remember_id, settings_of, tagged

_PUBLIC = "https://api.wandb.ai"


class WandbTracker(Callback):
    """Logs to Weights & Biases: to RUN_DIR/wandb, and to the server if there is an API key. W&B's environment variables
    are respected.
    """

    def __init__(self, *, project: str, name: str) -> None:
        self._project, self._name = project, name
        self._run: Any = None
        self._first = 0  # the server has the steps before

    def on_start(self, start: Start) -> None:
        import wandb

        logging.getLogger().addFilter(_is_no_remark_on_sizes)
        identity = continued_id(start, "wandb") or uuid.uuid4().hex[:16]
        remember_id(start.run_dir, "wandb", identity)
        mode: Any = None if "WANDB_MODE" in os.environ or _has_key() else "offline"
        self._run = wandb.init(
            project=self._project,
            name=self._name,
            id=identity,
            resume="allow",
            dir=str(start.run_dir),
            config={**settings_of(start.config), "world": start.world, "device": start.device},
            mode=mode,
            # Data that W&B collects by itself may hold secrets: command line, output, installed packages, source code.
            settings=wandb.Settings(
                console="off",
                disable_git=True,
                save_code=False,
                silent=True,
                x_disable_meta=True,
                x_save_requirements=False,
            ),
        )
        self._first = int(self._run.step)
        if self._run.offline and start.iteration:  # of several attempts, `wandb sync` may keep the last alone
            content = content_of(start.run_dir / "metrics.jsonl")
            for line in kept_lines(content, resume_iteration=start.iteration)[0].splitlines():
                self.on_step_end(StepEnd(json.loads(line)))
        where = f"{self._run.dir}; `wandb sync` uploads it" if self._run.offline else self._run.url
        print(f"--tracker wandb: {where}", file=sys.stderr, flush=True)

    def on_step_end(self, step: StepEnd) -> None:
        if step.iteration >= self._first:
            self._run.log(tagged(step.record), step=step.iteration)

    def on_samples(self, samples: Samples) -> None:
        import wandb

        if samples.iteration < self._first:
            return
        most = max((len(each.images) for each in samples.generations), default=0)
        numbers = [f"image {number + 1}" if number else "image" for number in range(most)]
        table = wandb.Table(columns=["sample", *numbers, "prompt", "answer", "reference"])
        pictures = []
        for each in samples.generations:
            seen = [wandb.Image(image, caption=f"{each.prompt} {each.answer}") for image in each.images]
            table.add_data(each.label, *seen, *[None] * (most - len(seen)), each.prompt, each.answer, each.reference)
            pictures += seen
        shown = {"samples/images": pictures} if pictures else {}
        self._run.log({"samples/answers": table, **shown}, step=samples.iteration)

    def on_stop(self, stop: Stop) -> None:
        self._run.finish(exit_code=1 if stop.state == "failed" else 0)


def _is_no_remark_on_sizes(record: logging.LogRecord) -> bool:
    """Filter out W&B's warning about images of different sizes, which would come with all samples."""
    return "Images sizes do not match" not in record.getMessage()


def _has_key() -> bool:
    """Return whether W&B will find an API key without a prompt: in its environment variables or in ~/.netrc."""
    if any(os.environ.get(name) for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL", _PUBLIC)).hostname or ""
    file = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
    try:
        return netrc.netrc(str(file)).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


_MOST_PARAMS, _LONGEST_PARAM = 100, 500  # of a request; characters of a value
_STATUS = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}


class MlflowTracker(Callback):
    """Logs to MLflow: to the server of `MLFLOW_TRACKING_URI`, or without that variable to files in RUN_DIR/mlruns."""

    def __init__(self, *, project: str, name: str) -> None:
        self._project, self._name = project, name
        self._client: Any = None
        self._run = ""
        self._monitor: Any = None
        self._pictures_sent = False

    def on_start(self, start: Start) -> None:
        uri = os.environ.get("MLFLOW_TRACKING_URI") or _local_store(start.run_dir)
        import mlflow
        from mlflow.entities import Param
        from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

        logging.getLogger("mlflow.system_metrics").setLevel(logging.WARNING)  # that it starts, stops, and finds no GPU
        mlflow.set_tracking_uri(uri)  # the monitor of system metrics knows no other
        self._client = client = mlflow.MlflowClient(uri)
        known = continued_id(start, "mlflow")
        if known is not None:
            client.update_run(known, status="RUNNING")
            self._run = known
        else:
            experiment = client.get_experiment_by_name(self._project)
            number = client.create_experiment(self._project) if experiment is None else experiment.experiment_id
            self._run = client.create_run(number, run_name=self._name).info.run_id
            remember_id(start.run_dir, "mlflow", self._run)
            settings = {**settings_of(start.config), "world": start.world, "device": start.device}
            params = [Param(key, str(value)[:_LONGEST_PARAM]) for key, value in settings.items()]
            for first in range(0, len(params), _MOST_PARAMS):
                client.log_batch(self._run, params=params[first : first + _MOST_PARAMS])
        self._monitor = SystemMetricsMonitor(self._run, resume_logging=known is not None)
        self._monitor.start()
        print(f"--tracker mlflow: run {self._run}", file=sys.stderr, flush=True)

    def on_step_end(self, step: StepEnd) -> None:
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        metrics = [Metric(_named(tag), value, now, step.iteration) for tag, value in tagged(step.record).items()]
        self._client.log_batch(self._run, metrics=metrics)

    def on_samples(self, samples: Samples) -> None:
        answers = [
            {"label": s.label, "prompt": s.prompt, "answer": s.answer, "reference": s.reference}
            for s in samples.generations
        ]
        text = json.dumps(answers, indent=2, ensure_ascii=False)
        self._client.log_text(self._run, text, f"samples/iter_{samples.iteration:07d}.json")
        for number, each in enumerate(() if self._pictures_sent else samples.generations):
            for place, image in enumerate(each.images):
                self._client.log_image(self._run, image, key=f"sample-{number}-{place}", step=samples.iteration)
        self._pictures_sent = True  # they are always the same

    def on_stop(self, stop: Stop) -> None:
        self._monitor.finish()
        self._client.set_terminated(self._run, status=_STATUS[stop.state])


def _local_store(run_dir: Path) -> str:
    os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # newer versions ask whether files are meant
    return (run_dir.resolve() / "mlruns").as_uri()


def _named(tag: str) -> str:
    """Return a tag with characters that MLflow does not accept replaced by `_`."""
    return re.sub(r"[^\w\-. /]", "_", tag)


class TensorBoardSink(Callback):
    """Writes TensorBoard event files: a chart for each number of the records, and samples with their images."""

    def __init__(self, directory: Path, *, resume_iteration: int = 0) -> None:
        """Write to `directory`; TensorBoard ignores points of earlier event files after `resume_iteration`.

        Raises UserError if the directory cannot be written.
        """
        with without("boto3"):  # TensorBoard would import it for logs on S3
            from torch.utils.tensorboard import SummaryWriter

        self._pictures_written = False
        try:
            self._writer: Any = SummaryWriter(str(directory), purge_step=resume_iteration + 1, flush_secs=30)
        except OSError as error:
            what = f"{directory} cannot be written ({error.strerror})"
            raise UserError(f"{what}: move it away, or go on with --no-tensorboard") from error

    def on_step_end(self, step: StepEnd) -> None:
        for tag, number in tagged(step.record).items():
            self._writer.add_scalar(tag, number, step.iteration)

    def on_samples(self, samples: Samples) -> None:
        for number, each in enumerate(samples.generations):
            self._writer.add_text(f"samples/{number}", _as_markdown(each), samples.iteration)
            for place, image in enumerate(() if self._pictures_written else each.images):
                self._writer.add_image(f"samples/{number}/{place}", image, samples.iteration, dataformats="HWC")
        self._pictures_written = True  # they are always the same

    def on_stop(self, stop: Stop) -> None:
        self._writer.close()


def _as_markdown(said: Generation) -> str:
    """Return a sample as Markdown whose texts are indented code blocks, so that Markdown in them has no effect."""
    parts = {said.label or "prompt": said.prompt, "answer": said.answer, "reference": said.reference}
    blocks = {name: textwrap.indent(text or " ", "    ", lambda line: True) for name, text in parts.items()}
    return "\n\n".join(f"{name}:\n\n{block}" for name, block in blocks.items())
