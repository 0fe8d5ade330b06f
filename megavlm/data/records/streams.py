"""Open an entry of `--datasets` that is WebDataset tars as a stream of conversations."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from megavlm.config.schema import DatasetConfig
from megavlm.data.records import tars
from megavlm.data.records.opening import name_of
from megavlm.errors import UserError
from megavlm.storage import is_url

if TYPE_CHECKING:
    from megavlm.data.records.energon import EnergonStream


def prepare_stream(source: DatasetConfig, *, run_dir: Path, log: Callable[[str], None] = lambda _: None) -> None:
    """Index the tars of a data set that have no index: in their folder, or in `run_dir` if that cannot be written to.

    One rank calls it, and the others wait for it before they call `open_stream`. It reads every header of every tar,
    once. Raises UserError if there are no tars with samples.
    """
    path = Path(source.path)
    if source.columns:
        raise UserError(
            f"--datasets {source.path} is tars, which columns= does not reach: rename the fields in their json"
        )
    if is_url(source.path) or path.suffix in (".yaml", ".yml"):
        return
    if not path.exists():
        raise UserError(f"--datasets {source.path} is not a file or folder: check the path")
    try:
        tars.prepare(path, cache=cache_of(run_dir), log=log)
    except (OSError, ValueError) as error:
        raise UserError(f"--datasets {source.path} {error}: name a folder of .tar files with samples") from error


def open_stream(
    source: DatasetConfig, *, run_dir: Path, rank: int, world: int, seed: int, shuffle: bool = True, held_out: float = 0
) -> EnergonStream:
    """Return the stream of the samples of a prepared data set that data-parallel rank `rank` of `world` reads.

    The fraction `held_out` of the samples comes as None.

    Raises UserError if it cannot be opened or megatron-energon is not installed.
    """
    try:
        from megavlm.data.records.energon import EnergonStream
    except ImportError as error:
        raise UserError(
            f"--datasets {source.path} is WebDataset, for which megatron-energon is missing ({error}): "
            "pip install 'megatron-energon>=7.4,<8'"
        ) from error
    path = Path(source.path)
    local = not is_url(source.path) and path.suffix not in (".yaml", ".yml")
    place = str(tars.home_of(path, cache=cache_of(run_dir))) if local else for_energon(source.path)
    return EnergonStream(
        place,
        source=source.path,
        name=name_of(source),
        rank=rank,
        world=world,
        seed=seed,
        shuffle=shuffle,
        held_out=held_out,
    )


def for_energon(place: str) -> str:
    """Return a URL as energon takes it: of S3 and GCS, as the profile that multi-storage-client makes of a bucket."""
    protocol, _, rest = place.partition("://")
    if protocol not in ("s3", "gs"):
        return place
    bucket, _, path = rest.partition("/")
    return f"msc://_{protocol}-{bucket}/{path}"


def cache_of(run_dir: Path) -> Path:
    """Return the folder for what cannot be written beside tars."""
    return run_dir / "webdataset"
