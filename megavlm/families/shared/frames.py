"""Videos as frames of one size, each a picture of its own to the vision tower."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megavlm.errors import UserError
from megavlm.inputs.reader import Json, sides
from megavlm.inputs.resize import Pixels, resize_as_torchvision
from megavlm.inputs.sampling import Budget, Clip, taken
from megavlm.inputs.sizes import Size
from megavlm.inputs.video import VideoProcessor


@dataclass(frozen=True, kw_only=True)
class Frames(VideoProcessor):
    """Resizes each frame to `size`, whatever its shape; a budget of tokens takes fewer. A family adds the text."""

    size: Size

    def __post_init__(self) -> None:
        if min(self.size) < self.patch_size * self.projector.pixel_shuffle:
            raise UserError(
                f"frames of {self.size[0]}×{self.size[1]} pixels have no feature: correct size in "
                "video_preprocessor_config.json"
            )

    def places(self, count: int, frames: int) -> list[int]:
        """Return `frames` of the numbers below `count`: the first of each of `frames` equal parts."""
        return [number * count // frames for number in range(frames)]

    def numbers(self, clip: Clip, budget: Budget) -> tuple[int, ...]:
        return taken(clip, budget, self.places)

    def frame_size(self, size: Size, frames: int, budget: Budget) -> Size:
        return self.size

    def most_groups(self, tokens: int) -> int:
        return tokens // self._tokens(self._tile(*self.size))

    def resized(self, pixels: Pixels, grid: tuple[int, int]) -> Pixels:
        return resize_as_torchvision(pixels, *self.size, self.resample)


def frame_fields(options: Json) -> dict[str, Any]:
    """Return the fields that the options of these families give. Raises UserError for what is not supported."""
    if options.get("do_center_crop"):
        raise UserError("do_center_crop in video_preprocessor_config.json is not supported: remove it")
    return {"size": sides(options["size"], "size")}
