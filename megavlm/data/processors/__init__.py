"""Prepare images as each model expects them. `megavlm.families.processor_from` reads a model's own options."""

from megavlm.data.processors.layout import Layout, Prompt, Tile
from megavlm.data.processors.processor import Processor

__all__ = ["Layout", "Processor", "Prompt", "Tile"]
