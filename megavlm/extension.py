"""Export the names that extensions import from megavlm ([docs](../docs/extensions.md))."""

# ruff: noqa: F401 (extensions import these names from here)
from __future__ import annotations

from megavlm.arch.connector import Connector, Split
from megavlm.arch.image_tokens import Grid
from megavlm.arch.kind import Communication, LayerCost, Stream, stream_bytes
from megavlm.arch.scenario import Scenario
from megavlm.arch.workload import Workload
from megavlm.config.option import AT_LEAST_0, AT_LEAST_1, FRACTION, POSITIVE, Valid, option
from megavlm.config.registry import Entry, Extension, ObjectiveEntry
from megavlm.config.schema import Config, ModelConfig, ProjectorConfig
from megavlm.errors import UserError
from megavlm.inputs.vision_inputs import Channels, VisionInput
