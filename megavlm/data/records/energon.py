"""Read WebDataset tars in order, as an iterable data set, through megatron-energon.

energon chooses the order of samples, splits them over data-parallel ranks and keeps the position. This module turns a
sample into a conversation, or into a BadSample if it cannot be read. It needs energon: import it through `open_stream`.
"""

from __future__ import annotations

import base64
import hashlib
import tarfile
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import fields, is_dataclass
from functools import partial
from threading import Lock
from typing import Any

import torch
from megatron.energon import (
    Cooker,
    CrudeSample,
    CrudeWebdataset,
    DefaultTaskEncoder,
    Sample,
    WorkerConfig,
    basic_sample_keys,
    edataclass,
    get_savable_loader,
    stateless,
)
from megatron.energon.epathlib import EPath
from megatron.energon.flavors.webdataset.sample_loader import SliceState
from megatron.energon.metadataset.loader_interface import DatasetBlendMode, LoadedDataset
from megatron.energon.savable_loader import SavableDataLoaderState
from megatron.energon.state import FlexState

from megavlm.data.records.containers import is_held_out, key_of_parts
from megavlm.data.records.tar_sample import Part, conversation_of_parts
from megavlm.data.records.tars import TarMember
from megavlm.data.types import Conversation
from megavlm.errors import UserError
from megavlm.inputs.bad_sample import BadSample, Reason

_BAD = "__bad__"
_RUN_OF_SAMPLES = 64  # consecutive samples of a tar that are read together: fewer mix better, more read faster
_STATES = {made.__name__: made for made in (FlexState, SavableDataLoaderState, SliceState)}
_LONGEST = 400  # characters of energon's words in a message
_ONE_AT_A_TIME = Lock()  # energon keeps track of the active worker in a class variable


@edataclass
class Cooked(Sample):
    """Holds a sample as energon returns it: its conversation, or the reason why it has none."""

    item: Conversation | BadSample
    key: bytes | None = None  # the hash of its files, if samples are held out by it


@stateless
def cook(sample: CrudeSample) -> Cooked:
    """Return the sample with its conversation, or with the BadSample that says why it has none."""
    item: Conversation | BadSample | None = sample.get(_BAD)
    if item is None:
        try:
            item = conversation_of_parts(_parts(sample))
        except BadSample as error:
            item = error
    return Cooked(**basic_sample_keys(sample), item=item)


@stateless
def cook_with_key(sample: CrudeSample) -> Cooked:
    """Return the sample as `cook` does, with the hash of its files."""
    cooked: Cooked = cook(sample)
    cooked.key = None if _BAD in sample else key_of_parts(_parts(sample))
    return cooked


def _parts(sample: CrudeSample) -> dict[str, Part]:
    return {name: part for name, part in sample.items() if not name.startswith("__")}


class Forgiving:
    """Wraps a reader of tars: returns a BadSample for an unreadable sample, since an error ends energon's iteration."""

    def __init__(self, reader: Any) -> None:
        self._reader = reader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reader, name)

    def __getitem__(self, index: int) -> Any:
        try:
            self._leave_clips(index)
            return self._reader[index]
        except MemoryError:
            raise
        except Exception as error:
            bad = BadSample(_reason(error), f"{type(error).__name__}: {error}")
        finally:
            for tar in self._reader.itar_files_cache.values():
                tar.members = []  # an open tarfile keeps an entry for every file that it has read
        shard = self._shard(index)
        return {
            "__key__": f"{shard}/sample {index}",
            "__shard__": shard,
            "__restore_key__": ("Webdataset", index),
            "__sources__": (),
            _BAD: bad,
        }

    def _leave_clips(self, index: int) -> None:
        """Make the tar's reader leave clips where they are."""
        place = self._reader._get_itar_sample_pointer(index)
        with self._reader._open_itarfile(place.tar_file_id) as tar:
            path = self._reader.tar_filepaths[place.tar_file_id]
            if path.is_local():
                tar.fileobject = partial(TarMember, path=path.local_path())

    def _shard(self, index: int) -> str:
        try:
            return str(self._reader.tar_filenames[self._reader._get_itar_sample_pointer(index).tar_file_id])
        except Exception:  # its index is damaged too
            return str(self._reader.base_path)


class EnergonEncoder(DefaultTaskEncoder):
    """Makes energon pass each sample's raw bytes to `cook`, without decoding them and without making batches."""

    decoder = None

    def __init__(self, *, with_keys: bool) -> None:
        super().__init__(raw_batch_type=None)
        self.cookers = (Cooker(cook_with_key if with_keys else cook),)

    def build_cook_crude_sample(self, dataset: Any, **options: Any) -> Any:
        loader = dataset.dataset
        loader.join_readers = [Forgiving(reader) for reader in loader.join_readers]
        return super().build_cook_crude_sample(dataset, **options)


class EnergonStream:
    """Iterates, without end, over the samples of `path` that belong to data-parallel rank `rank` of `world`.

    `path` is a prepared folder of tars, or the URL of one; messages call it `source`.

    The process that iterates also reads the tars: energon's own worker processes may lose a sample when their position
    is asked for before they have started, and would tie the position to their number. The state is plain data, which
    JSON can hold. It says which sample follows the last one returned, and restores exactly if rank, world, seed and
    data are the same. An iteration begins at the state given to `load_state_dict`, or else at the first sample.
    """

    def __init__(
        self,
        path: str,
        *,
        source: str,
        name: str,
        rank: int,
        world: int,
        seed: int,
        shuffle: bool = True,
        held_out: float = 0.0,
    ) -> None:
        self._held_out = held_out
        self.name = name
        self.label = ""
        """Names, in messages, the sample that was returned last, as in `train/0003.tar/000123`."""
        self._path = path
        self._source = source
        self._shuffle = shuffle
        self._worker_config = WorkerConfig(rank=rank, world_size=world, num_workers=0, seed_offset=seed)
        self._loaded = self._load()
        self.length = total = len(self._loaded.dataset)
        """Is the number of samples of all ranks."""
        if total < world:
            raise self._wrong(f"has {total} samples for {world} data-parallel ranks: use fewer ranks, or more data")
        self._identity = {
            "rank": rank,
            "world": world,
            "seed": seed,
            "shuffle": shuffle,
            "data": self._fingerprint(),
        }
        self._restored: Any = None  # the state to begin at, as plain data
        self._loader: Any = None

    def __iter__(self) -> Iterator[Conversation | BadSample | None]:
        """Yield samples; None in place of one that is held out."""
        with self._going_on():
            self._loader = self._build()
            samples = iter(self._loader)
        begun: AbstractContextManager[None] = self._going_on()  # random states are only looked at by the first sample
        while True:
            with _ONE_AT_A_TIME, begun:
                sample = next(samples)
            begun = nullcontext()
            places = [source.shard_name for source in sample.__sources__ or ()]
            self.label = "/".join([self.name, *places, sample.__key__])
            yield None if sample.key is not None and is_held_out(sample.key, self._held_out) else sample.item

    def state_dict(self) -> dict[str, Any]:
        with _ONE_AT_A_TIME:
            state = self._restored if self._loader is None else to_plain(self._loader.save_state_rank())
        return {**self._identity, "state": state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Begin the next iteration at `state`. Raises UserError if its rank, world, seed or data differ from these."""
        differing = [key for key, value in self._identity.items() if state.get(key) != value]
        if differing:
            raise self._wrong(_DIFFERENCES[differing[0]].format(then=state.get(differing[0]), **self._identity))
        try:
            from_plain(state["state"], _STATES)
        except (KeyError, TypeError, ValueError) as error:
            raise self._wrong(f"has an unreadable position in the checkpoint ({error}): resume from another") from error
        self._restored, self._loader = state["state"], None

    @contextmanager
    def _going_on(self) -> Iterator[None]:
        """Raise UserError for what a position of a checkpoint brings about that is not one of this data set."""
        try:
            yield
        except _NO_POSITION as error:
            if self._restored is None:
                raise
            what = f"{type(error).__name__}: {_shortened(str(error))}"
            raise self._wrong(
                f"cannot go on at its position in the checkpoint ({what}): resume from another"
            ) from error

    def _load(self) -> LoadedDataset:
        """Return the opened data set. Raises UserError if energon cannot open it."""
        try:
            crude = CrudeWebdataset(
                EPath(self._path),
                split_part="train",
                training=True,
                worker_config=self._worker_config,
                max_samples_per_sequence=_RUN_OF_SAMPLES,
                shuffle_over_epochs=1 if self._shuffle else None,
                parallel_shard_iters=None if self._shuffle else 1,
                decoder=None,
            )
        except Exception as error:
            what = _shortened(str(error)) or type(error).__name__
            raise self._wrong(f"is nothing that megatron-energon can open ({what}): see docs/data.md") from error
        return LoadedDataset(dataset=crude)

    def _build(self) -> Any:
        dataset = EnergonEncoder(with_keys=self._held_out > 0).build_train_datasets(
            datasets=[self._load()],
            worker_config=self._worker_config,
            batch_size=None,
            blend_mode=DatasetBlendMode.NONE,
        )
        loader = get_savable_loader(dataset, gc_collect_every_n_steps=0, watchdog_timeout_seconds=None)
        loader.pin_memory = False  # samples hold no tensors
        # Without a generator of its own, the loader would draw from torch's global one and so change dropout.
        loader.generator = torch.Generator().manual_seed(0)
        if self._restored is not None:
            loader.restore_state_rank(from_plain(self._restored, _STATES))
        return loader

    def _fingerprint(self) -> str:
        loaded = self._loaded
        shards = [
            (str(loaded.weight), str(loaded.repetitions), shard.name, shard.count) for shard in loaded.dataset.shards
        ]
        return hashlib.sha256(repr(shards).encode()).hexdigest()[:16]

    def _wrong(self, what: str) -> UserError:
        return UserError(f"--datasets {self._source} {what}")


_DIFFERENCES = {
    "rank": "has the position of data-parallel rank {then} in the checkpoint of rank {rank}: resume from another",
    "world": "was read by {then} data-parallel ranks and cannot go on with {world}: its position is only exact for as "
    "many; use as many, or another --run-dir with --init-from",
    "seed": "was read with --seed {then} and cannot go on with {seed}: set it as it was",
    "shuffle": "was read with shuffle={then} and cannot go on with {shuffle}: set --shuffle as it was",
    "data": "has other tars than when the checkpoint was written: put them back, or use another --run-dir",
}


# What energon raises, mostly by assertions, for a state that does not fit.
_NO_POSITION = (AssertionError, AttributeError, LookupError, OverflowError, RuntimeError, TypeError, ValueError)


def _shortened(text: str) -> str:
    """Return a text as one line of bounded length: energon repeats whole values of a file."""
    line = " ".join(text.split())
    return line if len(line) <= _LONGEST else f"{line[: _LONGEST // 2]} … {line[-_LONGEST // 2 :]}"


def _reason(error: Exception) -> Reason:
    if isinstance(error, FileNotFoundError):
        return Reason.MISSING
    if isinstance(error, tarfile.TarError | ValueError | EOFError):
        return Reason.TRUNCATED
    return Reason.CORRUPT


# energon's position is nested dicts, lists and tuples of numbers and strings, with bytes and a few dataclasses in
# between. In JSON, a value that JSON does not have is `{"<kind>": …}`; only the dataclasses that the caller names are
# created again.


def to_plain(value: Any) -> Any:
    """Return `value` in JSON types. Raises TypeError for a type that energon's state is not known to hold."""
    match value:
        case None | bool() | int() | float() | str():
            return value
        case bytes():
            return {"bytes": base64.b64encode(value).decode()}
        case list():
            return [to_plain(item) for item in value]
        case tuple():
            return {"tuple": [to_plain(item) for item in value]}
        case dict():
            kind = "dict" if type(value) is dict else type(value).__name__
            return {kind: [[to_plain(key), to_plain(item)] for key, item in value.items()]}
    if is_dataclass(value) and not isinstance(value, type):
        return {type(value).__name__: {field.name: to_plain(getattr(value, field.name)) for field in fields(value)}}
    raise TypeError(f"no plain form of {type(value).__name__}")


def from_plain(value: Any, classes: Mapping[str, type]) -> Any:
    """Return the value that `to_plain` converted; `classes` are the dataclasses that may be created, by name.

    Raises ValueError for data that `to_plain` does not write, or for another class.
    """
    if isinstance(value, list):
        return [from_plain(item, classes) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) != 1:
        raise ValueError(f"not a stored value: fields {sorted(map(str, value))}")
    [(kind, content)] = value.items()
    match kind, content:
        case "bytes", str():
            return base64.b64decode(content)
        case "tuple", list():
            return tuple(from_plain(item, classes) for item in content)
        case "dict", list():
            return {from_plain(key, classes): from_plain(item, classes) for key, item in content}
    made = classes.get(kind)
    if made is not None and isinstance(content, dict):
        return made(**{name: from_plain(item, classes) for name, item in content.items()})
    if made is not None and isinstance(content, list):  # a subclass of dict
        return made({from_plain(key, classes): from_plain(item, classes) for key, item in content})
    raise ValueError(f"a stored value of the unknown kind {kind!r}")
