"""Images as each family of models expects them, from the family's own `preprocessor_config.json`."""

from megavlm.data.processors.build import processor_from
from megavlm.data.processors.families import Processor
from megavlm.data.processors.layout import Layout, Prompt, Tile

__all__ = ["Layout", "Processor", "Prompt", "Tile", "processor_from"]
