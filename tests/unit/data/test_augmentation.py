"""Images that are trained on are changed at random: alike for a record and an epoch, otherwise in another epoch."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from megavlm.command_line.parsing import parse
from megavlm.data.file_source import FilesSource
from megavlm.data.types import HeldOut, SampleId, Segment
from tests.support.data_files import record, sources_of, write_all
from tests.support.training import SMALL

BOTH = "data.augment_crop=0.5 data.augment_color=0.4".split()


def test_images_change_with_the_epoch_and_with_nothing_else(tmp_path: Path) -> None:
    folder = write_all(tmp_path, samples=2)
    names = sorted(path.name for path in (folder / "images").iterdir())
    lines = [
        record("<image>\nwhat is this ?", image=names[0]),
        record("<image>\nis [1, 2, 30, 40] red ?", image=names[0]),
    ]
    (folder / "train.jsonl").write_text("\n".join(lines))

    def source(*options: str) -> FilesSource:
        data = [*sources_of(folder)[:2], *sources_of(folder)[-2:], "--no-shuffle", "--num-workers", "0"]
        data += ["--validation", data[1]]
        return FilesSource(parse([*SMALL, *data, *(["--set", *options] if options else [])]))

    def patches(made: FilesSource, sample: SampleId) -> Tensor:
        [encoded] = made.encode(sample).samples
        return made.load(Segment(sample, encoded)).images[0].patches()

    plain, cropped, both = source(), source("data.augment_crop=0.5"), source(*BOTH)
    assert torch.equal(patches(both, 0), patches(source(*BOTH), 0))
    assert patches(both, 0).shape == patches(plain, 0).shape
    for changed in (cropped, both):
        assert not torch.equal(patches(changed, 0), patches(plain, 0))
        assert not torch.equal(patches(changed, 0), patches(changed, 2)), "the same record in the next epoch"
    assert torch.equal(patches(plain, 0), patches(plain, 2))
    assert torch.equal(patches(cropped, 1), patches(plain, 1)), "its text has a box"
    assert not torch.equal(patches(both, 1), patches(plain, 1)), "which colours do not move"
    held_out = [made.load(Segment(HeldOut(0, 0), made.encode(0).samples[0])).images[0] for made in (both, plain)]
    assert torch.equal(*(image.patches() for image in held_out)), "validation sees whole images"
