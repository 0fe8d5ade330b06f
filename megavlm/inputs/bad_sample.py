"""Unusable samples: the exception `BadSample`, its reasons and remedies, and a summary of skipped samples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from megavlm.errors import one_line
from megavlm.program import program


class Reason(StrEnum):
    """Reasons for which a sample is skipped; each value is the reason's name in metrics."""

    # the record
    NOT_A_RECORD = "not_a_record"  # invalid JSON, or unexpected fields
    EMPTY = "empty_conversation"  # no token to train on
    ROLE = "unknown_role"  # a speaker other than user, assistant and system
    UNSUPPORTED = "unsupported"  # an image on the network, a video where the model reads none
    IMAGE_COUNT = "image_count"  # number of <image> tags differs from number of images
    TOO_LONG = "too_long"  # no turn fits --seq-length
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
    """Exception for an unusable sample, with the reason and details."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(f"{reason}: {one_line(detail)}")
        self.reason = reason
        self.detail = one_line(detail)

    def __reduce__(self) -> tuple[type[BadSample], tuple[Reason, str]]:
        """Pickle the reason and the detail, since worker processes send this exception to the main process."""
        return type(self), (self.reason, self.detail)


@dataclass(frozen=True)
class Skipped:
    """A skipped sample. With `partly`, only some turns are skipped and the others are trained on."""

    label: str  # as in `train.jsonl:18`
    source: str
    reason: Reason
    detail: str
    partly: bool = False


_LOOK = "see which with {preview} and the same flags; docs/data.md has what a record needs"
_COPY = "copy the files again, or leave the records out"
_ROOT = "name the folder that its images and videos are in, as PATH,image_root=DIR"
REMEDIES: dict[Reason, str] = {
    Reason.MISSING: _ROOT,
    Reason.OUTSIDE: f"{_ROOT}, in which absolute paths must lie, too (image_root=/ allows any)",
    Reason.TOO_LONG: "raise --seq-length; with Qwen's models, --max-pixels makes images shorter",
    Reason.TOO_LARGE: "raise --max-image-pixels; with Qwen's models, --max-pixels then shrinks large images",
    Reason.NOT_AN_IMAGE: f"write images of other formats (SVG, PDF, HEIC) as PNG or JPEG, and {_COPY}",
    Reason.TRUNCATED: _COPY,
    Reason.CORRUPT: _COPY,
    Reason.NOT_A_VIDEO: _COPY,
    Reason.NO_FRAMES: _COPY,
    Reason.ENDLESS: "cut the clip into shorter ones",
}


@dataclass
class SkipSummary:
    """Counts skipped samples by reason and keeps one example per reason."""

    counts: Counter[Reason] = field(default_factory=Counter)
    examples: dict[Reason, str] = field(default_factory=dict)

    def add(self, skipped: Iterable[Skipped]) -> SkipSummary:
        """Add the samples that were skipped entirely, and return self."""
        for skip in skipped:
            if not skip.partly:
                self.counts[skip.reason] += 1
                self.examples.setdefault(skip.reason, one_line(f"{skip.label}: {skip.detail}"))
        return self

    def merged(self, others: Iterable[SkipSummary]) -> SkipSummary:
        """Return the sum of this summary and those of other ranks."""
        found = SkipSummary(Counter(self.counts), dict(self.examples))
        for other in others:
            found.counts += other.counts
            found.examples = {**other.examples, **found.examples}
        return found

    def message(self, remedies: Mapping[Reason, str] = REMEDIES) -> str:
        """Return a message with the most frequent reason, its count, an example and the remedy."""
        most = max(self.counts.values())
        reason = min(reason for reason, count in self.counts.items() if count == most)
        remedy = remedies.get(reason, _LOOK.format(preview=program("preview")))
        return f"{most} × {reason}, as {self.examples[reason]}. To fix it, {remedy}"
