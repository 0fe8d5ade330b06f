"""Note in the files of a model's export that its images have other channels than those of the folder it came from."""

from __future__ import annotations

import json
from pathlib import Path

from megavlm.config.schema import Config
from megavlm.data.preprocessors import processor_for
from megavlm.families import family_of
from megavlm.families.shared.settings import Settings
from megavlm.files import replace_file
from megavlm.inputs.vision_inputs import NAME, RGB, Channels, channels_json
from megavlm.json_files import read_json

_KEYS = ("num_channels", "in_channels", "in_chans")  # of a config.json's vision_config


def note_channels(files: Path, config: Config) -> None:
    """Correct the number of channels in `files`/config.json, and write channels.json, where images are not RGB.

    Transformers then loads the export, and `--init-from` reads images as this run did.
    """
    wanted = config.model.vision.in_channels
    values = read_json(files / "config.json")
    family = family_of(Settings(values, "config.json"))
    if family.config(Settings(values, "config.json")).vision.in_channels != wanted:
        tower = values.get("vision_config", values)
        # A family reads one of the keys; those that a file leaves out come last.
        for key in sorted(_KEYS, key=lambda key: key not in tower):
            wider = {**tower, key: wanted}
            changed = {**values, "vision_config": wider} if "vision_config" in values else wider
            if family.config(Settings(changed, "config.json")).vision.in_channels == wanted:
                replace_file(files / "config.json", json.dumps(changed, indent=2) + "\n")
                break
    if config.data.kind != "files":
        return
    processor = processor_for(config)
    if processor.vision_input.name != RGB.name:
        channels = Channels(processor.mean, processor.std)
        replace_file(files / NAME, channels_json(processor.vision_input.name, channels))
