"""What is wrong with a sample: it is skipped and counted under a `Reason`, and the run goes on."""

from __future__ import annotations

from enum import StrEnum


class Reason(StrEnum):
    """Why a sample is left out; the value is what is counted."""

    # the record
    NOT_A_RECORD = "not_a_record"  # garbage where JSON should be, a record of another shape
    EMPTY = "empty_conversation"  # nothing in it to train on
    ROLE = "unknown_role"  # a speaker other than user, assistant and system
    UNSUPPORTED = "unsupported"  # what nobody here reads: an image on the web, a video
    IMAGE_COUNT = "image_count"  # as many tags as images it has not
    TOO_LONG = "too_long"  # no turn of it fits the sequence
    # its images
    MISSING = "missing_file"
    OUTSIDE = "path_outside_root"
    NOT_AN_IMAGE = "not_an_image"
    TRUNCATED = "truncated"
    CORRUPT = "corrupt"
    TOO_LARGE = "too_many_pixels"
    TOO_NARROW = "aspect_ratio"


class BadSample(ValueError):
    """A sample that cannot be used, and why."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail

    def __reduce__(self) -> tuple[type[BadSample], tuple[Reason, str]]:
        """Pickled by its parts: worker processes report it."""
        return type(self), (self.reason, self.detail)
