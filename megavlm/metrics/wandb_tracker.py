"""Weights & Biases: metrics under their tags, the configuration, samples with pictures, and its own system metrics."""

from __future__ import annotations

import logging
import netrc
import os
import sys
import uuid
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from megavlm.metrics.callback import Callback, Samples, Start, StepEnd, Stop
from megavlm.metrics.tags import tagged
from megavlm.metrics.trackers import known_id, remember_id, settings_of

_NAME = "wandb"
_PUBLIC = "https://api.wandb.ai"


class WandbTracker(Callback):
    """Writes to RUN_DIR/wandb, and to the server if a key is known. W&B's own variables are respected."""

    def __init__(self, *, project: str, name: str) -> None:
        self._project, self._name = project, name
        self._run: Any = None
        self._first = 0  # the server has the steps before

    def on_start(self, start: Start) -> None:
        import wandb

        logging.getLogger().addFilter(_is_no_remark_on_sizes)
        identity = known_id(start.run_dir, _NAME) or uuid.uuid4().hex[:16]
        remember_id(start.run_dir, _NAME, identity)
        mode: Any = None if "WANDB_MODE" in os.environ or _has_key() else "offline"
        self._run = wandb.init(
            project=self._project,
            name=self._name,
            id=identity,
            resume="allow",
            dir=str(start.run_dir),
            config={**settings_of(start.config), "world": start.world, "device": start.device},
            mode=mode,
            # What W&B collects by itself may hold secrets: the command line, output, installed packages, the source.
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
    """Return False for what W&B says at every sampling of pictures that differ in size."""
    return "Images sizes do not match" not in record.getMessage()


def _has_key() -> bool:
    """Return whether W&B will find a key without a question: in its variables or in ~/.netrc."""
    if any(os.environ.get(name) for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL", _PUBLIC)).hostname or ""
    file = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
    try:
        return netrc.netrc(str(file)).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
