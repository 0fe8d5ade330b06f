"""How many image tokens an image becomes."""

from __future__ import annotations

from megavlm.config.schema import ProjectorConfig


def patches_per_feature(projector: ProjectorConfig) -> int:
    """Return how many neighbouring patches become one feature (= image token): pixel shuffle merges N×N."""
    return projector.pixel_shuffle**2
