"""`BadSample`: the error of a sample that cannot be used, and its reasons."""

from __future__ import annotations

from enum import StrEnum

from megavlm.errors import one_line


class Reason(StrEnum):
    """Why a sample is skipped; the value is the name in metrics."""

    # the record
    NOT_A_RECORD = "not_a_record"  # invalid JSON, or unexpected fields
    EMPTY = "empty_conversation"  # no token to train on
    ROLE = "unknown_role"  # a speaker other than user, assistant and system
    UNSUPPORTED = "unsupported"  # an image on the network, a video where the model reads none
    IMAGE_COUNT = "image_count"  # number of <image> tags differs from number of images
    TOO_LONG = "too_long"  # no turn fits --seq-length
    TOO_SLOW = "too_slow"  # data workers hung at it
    # its images
    MISSING = "missing_file"
    OUTSIDE = "path_outside_root"
    NOT_AN_IMAGE = "not_an_image"
    TRUNCATED = "truncated"
    CORRUPT = "corrupt"
    TOO_LARGE = "too_many_pixels"
    TOO_NARROW = "aspect_ratio"
    # its videos; the reasons of images above hold for frames, too
    NOT_A_VIDEO = "not_a_video"
    NO_FRAMES = "no_frames"  # sound alone, or nothing
    ENDLESS = "too_many_frames"


class BadSample(ValueError):
    """Raised for a sample that cannot be used, with the reason."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(f"{reason}: {one_line(detail)}")
        self.reason = reason
        self.detail = one_line(detail)

    def __reduce__(self) -> tuple[type[BadSample], tuple[Reason, str]]:
        """Pickle the reason and the detail, since worker processes send this exception to the main process."""
        return type(self), (self.reason, self.detail)
