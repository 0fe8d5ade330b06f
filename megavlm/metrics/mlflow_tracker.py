"""MLflow: metrics under their tags, the configuration as parameters, samples with pictures, and its system metrics."""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

from megavlm.metrics.callback import Callback, Samples, Start, StepEnd, Stop
from megavlm.metrics.tags import tagged
from megavlm.metrics.trackers import known_id, remember_id, settings_of

_NAME = "mlflow"
_MOST_PARAMS, _LONGEST_PARAM = 100, 500  # of a request; characters of a value
_STATUS = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}


class MlflowTracker(Callback):
    """Writes to the server of `MLFLOW_TRACKING_URI`; without one, to files in RUN_DIR/mlruns."""

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
        known = known_id(start.run_dir, _NAME)
        if known is not None:
            client.update_run(known, status="RUNNING")
            self._run = known
        else:
            experiment = client.get_experiment_by_name(self._project)
            number = client.create_experiment(self._project) if experiment is None else experiment.experiment_id
            self._run = client.create_run(number, run_name=self._name).info.run_id
            remember_id(start.run_dir, _NAME, self._run)
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
        told = [
            {"label": s.label, "prompt": s.prompt, "answer": s.answer, "reference": s.reference}
            for s in samples.generations
        ]
        text = json.dumps(told, indent=2, ensure_ascii=False)
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
    """Return a tag in the characters that MLflow takes."""
    return re.sub(r"[^\w\-. /]", "_", tag)
