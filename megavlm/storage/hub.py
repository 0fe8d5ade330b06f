"""Find repositories of the Hugging Face hub by name in its local cache, or fetch them into the cache.

`huggingface_hub` is imported only to fetch. No code of a repository is executed, and no pickled weights are fetched. A
model that is complete in the cache is used without access to the network. For a data set, the hub is asked first; the
cache is used if the hub cannot be reached.
"""

from __future__ import annotations

import errno
import glob
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from megavlm.errors import UserError
from megavlm.json_files import read_json
from megavlm.paths import read_bytes

_NAME = re.compile(
    r"(?:https://(?:huggingface\.co|hf\.co)/(?:datasets/)?)?(?P<name>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:/tree/main)?(?:/(?P<part>[\w.-]+))?(?:@(?P<revision>[\w./-]+))?"
)
_SMALL = (".json", ".txt", ".model", ".jinja", ".tiktoken")  # files of a model other than its weights
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")  # one of them
_PROCESSORS = ("preprocessor_config.json", "processor_config.json")
_WEIGHTS, _INDEX, _WHOLE = ".safetensors", "model.safetensors.index.json", "model.safetensors"
# Formats of data files; of a data set, files of the first format that it has are used.
_DATA = (".parquet", ".arrow", ".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".txt")
_NO_DATA = ("config.json", "dataset_infos.json", "dataset_dict.json", "state.json", "dataset_info.json")
_TRAIN = re.compile(r"(?:^|[/._ 0-9-])train(?:ing)?(?=$|[/._ 0-9-])")
_OTHERS = re.compile(r"(?:^|[/._ 0-9-])(?:test|testing|eval|evaluation|dev|val|valid|validation)(?=$|[/._ 0-9-])")
_LARGEST = 2**24  # bytes of a repository's README


@dataclass(frozen=True)
class Repository:
    """A model or data set repository, named by an option as OWNER/NAME[@REVISION].

    A data set may also be OWNER/NAME/CONFIGURATION[@REVISION]. The default revision is `main`.
    """

    place: str  # the name as given to the option
    option: str
    name: str
    part: str | None  # a configuration of a data set
    revision: str
    is_data: bool

    @property
    def cached(self) -> Path | None:
        """Return the cache's snapshot folder of the revision, which may be incomplete; None if there is none."""
        home = self._home
        try:
            commit = (home / "refs" / self.revision).read_text(encoding="utf-8").strip()
        except OSError:
            commit = self.revision
        folder = home / "snapshots" / commit
        return folder if folder.is_dir() and re.fullmatch(r"[0-9a-f]{40}", commit) else None

    @property
    def _home(self) -> Path:
        return cache() / f"{'dataset' if self.is_data else 'model'}s--{self.name.replace('/', '--')}"

    def problem(self, what: str) -> UserError:
        return UserError(f"{self.option} {self.place} {what}")

    def unreachable(self, why: str) -> UserError:
        """Return the error for a hub that cannot be reached, with the command to fetch the repository elsewhere."""
        kind = " --repo-type dataset" if self.is_data else f" --local-dir {self.place}"
        kind = kind if "://" not in self.place else kind.partition(" --local-dir")[0]  # into the cache
        revision = "" if self.revision == "main" else f" --revision {self.revision}"
        return self.problem(
            f"is neither a path on this machine nor in the Hugging Face cache {cache()}, and the hub cannot be reached "
            f"({why}): where there is a network, run `hf download {self.name}{revision}{kind}`"
        )


def repository(place: str, option: str, *, is_data: bool = False) -> Repository | None:
    """Return the repository that `place` may name; None if it exists as a path or cannot be a repository's name."""
    found = _NAME.fullmatch(place)
    if found is None or (found["part"] and not is_data) or os.path.lexists(place):
        return None
    if is_data and Path(found["part"] or found["name"]).suffix.lower() in (*_DATA, ".tar", ".yaml"):
        return None
    return Repository(place, option, found["name"], found["part"], found["revision"] or "main", is_data)


def commit_of(place: str, *, is_data: bool = False) -> str | None:
    """Return the cached commit of the repository that `place` names; None for a folder, a URL or an uncached one."""
    found = repository(place, "", is_data=is_data)
    return found.cached.name if found is not None and found.cached is not None else None


def cache() -> Path:
    """Return the folder of Hugging Face's cache: HF_HUB_CACHE, or the folder `hub` in HF_HOME."""
    given = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    return Path(os.path.expandvars(given or Path(home, "hub"))).expanduser()


def is_cached(model: Repository) -> bool:
    """Return whether the cache has a model with its weights."""
    return model.cached is not None and _has_model(model.cached, True)


def model_folder(model: Repository, *, weights: bool) -> Path:
    """Return the folder of a model, fetched if needed: config.json, tokenizer files and, if `weights`, its weights.

    Raises UserError.
    """
    has_model = partial(_has_model, weights=weights)
    is_whole = lambda folder: has_model(folder) and _has_readers(folder)  # noqa: E731
    return _folder(model, is_whole, lambda fetch: _fetch_model(fetch, weights), usable=has_model)


def data_files(data: Repository) -> list[Path]:
    """Return the files of a data set's training split, fetched if needed, in the order of names. Raises UserError."""
    folder = _folder(data, lambda folder: False, _fetch_data, usable=lambda folder: True)
    return [folder / name for name in _chosen(data, _names_in(folder), folder)]


def _folder(
    wanted: Repository,
    is_whole: Callable[[Path], bool],
    fetch: Callable[[_Fetch], Path],
    *,
    usable: Callable[[Path], bool],
) -> Path:
    """Return the cache folder of a repository, fetched unless it is complete.

    If the hub cannot be reached, a cached folder that is `usable` is returned as it is, maybe incomplete. The library
    makes concurrent processes wait for one another.
    """
    if (found := wanted.cached) is not None and is_whole(found):
        return found
    try:
        return fetch(_Fetch(wanted))
    except _Unreachable as error:
        # The cached folder may lack a file that is not needed here; a reader of a missing file reports it.
        if found is not None and usable(found):
            return found
        raise wanted.unreachable(str(error)) from error


class _Unreachable(Exception):
    """Raised if the hub does not answer; the message says why."""


class _Fetch:
    """Fetches files of a repository into the cache; `sizes` are its files' sizes in bytes, by name."""

    def __init__(self, wanted: Repository) -> None:
        """Fetch the list of the repository's files. Raises UserError or _Unreachable."""
        self.wanted = wanted
        try:
            import huggingface_hub.errors
            import huggingface_hub.utils
        except ImportError:
            raise _Unreachable("pip install huggingface_hub") from None
        self._library = huggingface_hub
        huggingface_hub.utils.disable_progress_bars()
        with self._errors():
            info = huggingface_hub.HfApi().repo_info(
                wanted.name, repo_type=self._kind, revision=wanted.revision, files_metadata=True
            )
        listed: Sequence[Any] = getattr(info, "siblings", None) or ()
        self.sizes: Mapping[str, int] = {each.rfilename: each.size or 0 for each in listed}

    @property
    def _kind(self) -> str:
        return "dataset" if self.wanted.is_data else "model"

    def files(self, names: Sequence[str]) -> Path:
        """Fetch the named files and return their folder in the cache. Raises UserError or _Unreachable."""
        if (size := sum(self.sizes[name] for name in names)) > 1e6:
            print(f"fetching {self.wanted.name} ({size / 1e9:.3f} GB) to {cache()}", flush=True)
        with self._errors():
            # By the revision's name, so that the cache stores its commit.
            folder = self._library.snapshot_download(
                self.wanted.name,
                repo_type=self._kind,
                revision=self.wanted.revision,
                cache_dir=cache(),
                allow_patterns=[glob.escape(name) for name in names],
            )
        return Path(folder)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Raise UserError if the hub refuses a request within this context, and _Unreachable if it does not answer."""
        errors, wanted = self._library.errors, self.wanted
        try:
            yield
        except errors.GatedRepoError as error:
            where = f"{self._library.HfApi().endpoint}/{'datasets/' * wanted.is_data}{wanted.name}"
            raise wanted.problem(f"is gated: accept its terms at {where}, and log in with `hf auth login`") from error
        except errors.RepositoryNotFoundError as error:
            raise wanted.problem(
                "is neither a path on this machine nor a repository of the hub that you may read: check the name, or "
                "log in with `hf auth login`"
            ) from error
        except errors.RevisionNotFoundError as error:
            raise wanted.problem(
                f"has no revision {wanted.revision} on the hub: leave it out, or name another"
            ) from error
        except OSError as error:  # most errors of the hub and of its HTTP library are not OSErrors
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise wanted.problem(f"has no room in {cache()}: make room, or set HF_HOME to another disk") from error
            raise _Unreachable(_reason(error)) from error
        except Exception as error:
            raise _Unreachable(_reason(error)) from error


def _reason(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return " ".join(str(error).split())[:200].rstrip(".") or type(error).__name__


def _fetch_model(fetch: _Fetch, weights: bool) -> Path:
    folder = fetch.files([name for name in fetch.sizes if "/" not in name and name.endswith(_SMALL)])
    if not weights:
        return folder
    if names := [name for name in _weights_of(folder, fetch.sizes) if name in fetch.sizes]:
        return fetch.files(names)
    raise fetch.wanted.problem(
        "has no *.safetensors: what pickled weights it has are not fetched, as unpickling can run code. Save it as "
        "safetensors (Transformers: model.save_pretrained(folder)), and name that folder"
    )


def _weights_of(folder: Path, names: Sequence[str] | Mapping[str, int]) -> list[str]:
    """Return the names of a model's safetensors files, without a second copy that some repositories have."""
    if _WHOLE in names:  # as in Transformers, whatever an older index says
        return [_WHOLE]
    if (folder / _INDEX).exists():
        weight_map = read_json(folder / _INDEX).get("weight_map")
        return list(dict.fromkeys(map(str, weight_map.values()))) if isinstance(weight_map, dict) else []
    return sorted(name for name in names if "/" not in name and name.endswith(_WEIGHTS))


def _has_readers(folder: Path) -> bool:
    """Return whether a folder with config.json says how text and, for a model that sees, images are read.

    Transformers fetches a configuration, a tokenizer, an image processor and a model one by one, into the same cache.
    """
    there = {file.name for file in folder.iterdir()}
    if "vision_config" in read_json(folder / "config.json"):
        return not there.isdisjoint(_TOKENIZERS) and not there.isdisjoint(_PROCESSORS)
    return not there.isdisjoint((*_TOKENIZERS, *_PROCESSORS))


def _has_model(folder: Path, weights: bool) -> bool:
    """Return whether a folder has config.json and, if `weights`, all weights of the model."""
    if not (folder / "config.json").exists() or not weights:
        return (folder / "config.json").exists()
    names = _weights_of(folder, [file.name for file in folder.iterdir()])
    return bool(names) and all((folder / name).exists() for name in names)


def _fetch_data(fetch: _Fetch) -> Path:
    card = fetch.files(["README.md"] if "README.md" in fetch.sizes else [])
    return fetch.files(_chosen(fetch.wanted, list(fetch.sizes), card))


def _names_in(folder: Path) -> list[str]:
    return [str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()]


def _chosen(data: Repository, names: Sequence[str], folder: Path) -> list[str]:
    """Return the names of the files of a data set's training split, by the rules of the package `datasets`.

    These are the files of the configuration in README.md, else files with `train` in their name, else all except other
    splits. Raises UserError.
    """
    files = sorted(name for name in names if name.endswith(_DATA) and Path(name).name not in _NO_DATA)
    files = [name for name in files if not any(part.startswith((".", "_")) for part in name.split("/"))]
    if configurations := _configurations(folder / "README.md"):
        files = _of_configuration(data, configurations, files)
    else:
        files = _of_folder(data.part or "", files)
    if not files:
        others = Counter(Path(name).suffix or Path(name).name for name in names).most_common(5)
        raise data.problem(
            f"has no training split in files of {', '.join(_DATA)}{f' of {data.part}' if data.part else ''} (it has "
            f"{', '.join(suffix for suffix, _ in others) or 'no files'}): run `hf download {data.name} --repo-type "
            "dataset --local-dir DIR`, and name the files in it that are to be read"
        )
    suffix = next(suffix for suffix in _DATA if any(name.endswith(suffix) for name in files))
    return [name for name in files if name.endswith(suffix)]


def _of_folder(folder: str, files: Sequence[str]) -> list[str]:
    """Return the training files below a folder ("": all), where nothing names them: by the words in their names."""
    below = f"{folder}/".lstrip("/")
    names = [name.removeprefix(below) for name in files if name.startswith(below)]
    found = [name for name in names if _TRAIN.search(name)] or [name for name in names if not _OTHERS.search(name)]
    return [f"{below}{name}" for name in found]


def without_other_splits(names: Sequence[str]) -> list[str]:
    """Return file names without those of other splits (test, val, …), if some say that they are of `train`."""
    if not any(map(_TRAIN.search, names)):
        return [*names]
    return [name for name in names if _TRAIN.search(name) or not _OTHERS.search(name)]


def _configurations(readme: Path) -> Mapping[str, Any]:
    """Return the configurations in a data set's README.md, by name; empty if it has none or cannot be read."""
    import yaml  # type: ignore[import-untyped, unused-ignore]

    try:
        _, begin, rest = read_bytes(readme, at_most=_LARGEST).decode(errors="replace").partition("---\n")
        found = yaml.safe_load(rest.partition("\n---")[0]) if begin else None
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return {}
    listed = found.get("configs") if isinstance(found, dict) else None
    named = [each for each in listed if isinstance(each, dict)] if isinstance(listed, list) else []
    return {str(each.get("config_name", "default")): each for each in named}


def _of_configuration(data: Repository, configurations: Mapping[str, Any], files: Sequence[str]) -> list[str]:
    """Return the training files of the configuration `data.part`, else of the default one. Raises UserError."""
    known = list(configurations)
    shown = f"{', '.join(known[:12])}{f' and {len(known) - 12} more' if len(known) > 12 else ''}"
    default = [each for each in known if configurations[each].get("default")]
    default += [each for each in known if each == "default"]
    if data.part is None and not default and len(known) > 1:
        raise data.problem(f"has several configurations: name one as {data.name}/{known[0]}, of {shown}")
    name = data.part or (default or known)[0]
    if name not in configurations:
        raise data.problem(f"has no configuration {name}, but {shown}")
    if not (said := configurations[name].get("data_files")):
        return _of_folder(str(configurations[name].get("data_dir", "")).strip("./"), files)
    splits: dict[str, list[str]] = {}
    for each in said if isinstance(said, list) else [said]:
        each = each if isinstance(each, dict) else {"path": each}
        paths = each.get("path")
        splits.setdefault(str(each.get("split", "train")), []).extend(
            map(str, paths if isinstance(paths, list) else [paths])
        )
    if "train" not in splits:
        raise data.problem(f"has no split train{f' in {name}' if name != 'default' else ''}, but {', '.join(splits)}")
    patterns = list(map(_as_regex, splits["train"]))
    return [name for name in files if any(re.fullmatch(pattern, name) for pattern in patterns)]


def _as_regex(pattern: str) -> str:
    """Return the regular expression of a pattern of fsspec, in which `**` alone matches slashes."""
    pieces = re.findall(r"\*\*/|\*\*|\*|\?|\[[^]]+\]|.", pattern.removeprefix("./"))
    wild = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    return "".join(
        wild.get(each) or (each.replace("[!", "[^") if len(each) > 1 else re.escape(each)) for each in pieces
    )
