"""A source of computed samples: an image with dots, and how many there are.

`--extension counting_dots --data dots` trains on it, and `--callback dots_log` writes a line for each step.
"""

from __future__ import annotations

from dataclasses import dataclass

from megavlm.extension import AT_LEAST_1, Entry, Extension, option


@dataclass(frozen=True)
class DotsOptions:
    """Options of the source: `--dots-most`, or in YAML `data.sources.dots`."""

    most: int = option(9, "Largest number of dots in an image.", valid=AT_LEAST_1)


@dataclass(frozen=True)
class LogOptions:
    """Options of the callback: `--dots-log-every`, or in YAML `logging.callbacks.dots_log`."""

    every: int = option(1, "Steps between lines of RUN_DIR/dots.log.", valid=AT_LEAST_1)


EXTENSION = Extension(
    sources=(Entry("dots", "counting_dots.source:DotsSource", DotsOptions),),
    callbacks=(Entry("dots_log", "counting_dots.log:DotsLog", LogOptions),),
)
