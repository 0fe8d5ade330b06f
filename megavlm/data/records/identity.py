"""Record the options and files that determine the order of samples, to refuse a resume on different data."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

from megavlm.config.messages import shown
from megavlm.config.option import data_kind
from megavlm.config.registry import registered
from megavlm.config.schema import Config, DatasetConfig
from megavlm.data.records.opening import files_of, is_tars, name_of
from megavlm.data.records.tars import open_tars
from megavlm.data.sample_order import weights_of
from megavlm.paths import open_regular
from megavlm.rules.fields import options
from megavlm.rules.load import as_data

_ENDS = 2**16  # bytes at each end of a file that are hashed: the first and the last records
_COMPUTED = (
    "images_per_sample",
    "image_sizes",
    "imageless_share",
    "imageless_samples",
    "answer_share",
    "sound_frames",
)  # of synthetic samples


def data_identity(config: Config) -> dict[str, Any]:
    """Return the values on which the order and the content of samples depend, keyed by option.

    Raises UserError for missing data sets.
    """
    data, kind = config.data, data_kind(config)
    identity: dict[str, Any] = {"--data": kind, "--seed": config.train.seed}
    if kind == "files":
        identity |= {"--shuffle": data.shuffle, "--packing": data.packing, "--chat-template": data.chat_template}
        identity |= {"--train-on": data.train_on, "data.enable_thinking": data.enable_thinking}
        identity["--image-processor"] = data.image_processor and Path(data.image_processor).name  # which may be moved
        identity |= {"--min-pixels": data.min_pixels, "--max-pixels": data.max_pixels}
        identity |= {"--video-fps": data.video_fps, "data.video_max_frames": data.video_max_frames}
        identity |= {"--video-max-tokens": data.video_max_tokens, "data.video_sound": data.video_sound}
        identity["--validation-split"] = data.validation_split
        unweighted = None if len(data.datasets) > 1 else 1.0  # which one data set always had
        weights = weights_of([each.weight for each in data.datasets]) or [unweighted] * len(data.datasets)
        identity["--datasets"] = [
            _of_dataset(each, weight=weight) for each, weight in zip(data.datasets, weights, strict=True)
        ]
    elif kind == "synthetic":
        values = {name: getattr(data, name) for name in _COMPUTED}
        identity |= {
            f"--{name.replace('_', '-')}": list(value) if isinstance(value, tuple) else value
            for name, value in values.items()
        }
    elif (entry := registered("sources").get(kind)) is not None and entry.options is not None:
        options = as_data(getattr(data.sources, kind))
        identity |= {f"--{kind}-{name}".replace("_", "-"): value for name, value in options.items()}
    return identity


def difference(saved: dict[str, Any], now: dict[str, Any]) -> str | None:
    """Return a message about the first option in which a checkpoint's data and a run's data differ; None if equal."""
    for option, value in now.items():
        if option not in saved or saved[option] == value:
            continue
        if option != "--datasets":
            named = {each.spelled: each.name for each in options() if each.path[0] == "data"}
            return f"{named.get(option, option)} {shown(saved[option])}, but this run has {value}"
        return f"other --datasets: {_difference_of_datasets(saved[option], value)}"
    return None


def _difference_of_datasets(saved: Any, now: list[dict[str, Any]]) -> str:
    if not isinstance(saved, list) or len(saved) != len(now):
        return f"{len(saved) if isinstance(saved, list) else 'unknown'}, not {len(now)}"
    before, after = next(pair for pair in zip(saved, now, strict=True) if pair[0] != pair[1])
    if not isinstance(before, dict) or not isinstance(before.get("files"), list):
        return "unknown"
    for name in ("name", "weight", "columns"):
        if before.get(name) != after.get(name):
            return f"{name} {shown(before.get(name))}, not {shown(after.get(name))}"
    changed = [each["name"] for each in after["files"] if each not in before["files"]]
    return f"{after['name']} has other files or other records ({', '.join(changed) or 'fewer files'})"


def _of_dataset(source: DatasetConfig, *, weight: float | None) -> dict[str, Any]:
    identity: dict[str, Any] = {"name": name_of(source), "weight": weight, "files": []}
    if source.columns:
        identity["columns"] = dict(source.columns)
    if is_tars(source):
        for tar in open_tars(source, name_of(source)).tars:
            ends = hashlib.blake2b(tar.offsets.tobytes(), digest_size=16)
            identity["files"].append({"name": tar.name, "bytes": int(tar.offsets[-1]), "ends": ends.hexdigest()})
        return identity
    for path in files_of(source):
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            ends = hashlib.blake2b(file.read(_ENDS), digest_size=16)
            file.seek(max(0, size - _ENDS))
            ends.update(file.read(_ENDS))
        identity["files"].append({"name": path.name, "bytes": size, "ends": ends.hexdigest()})
    return identity
