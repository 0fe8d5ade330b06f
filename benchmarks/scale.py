"""Count what grows with the number of ranks, at 8, 64, 1,024 and 16,384 of them.

    .venv/bin/python benchmarks/scale.py [--no-record]

Groups are made by the real code on torch's fake groups, requests to the store by the real watchdog, at all four sizes.
What a save, a load and a start from Hugging Face files ask of the file system is counted while a run of 1, 2 and 4
processes does it, by wrapping the functions of `os` in each process and in the writers that it forks (what the
safetensors library opens is not seen), and what ranks tell one another as pickled objects; larger worlds follow by the
law that is written beside the counts.
"""

from __future__ import annotations

import argparse
import builtins
import io
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from record import append, circumstances

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
SIZES = (8, 64, 1024, 16384)
COUNTED = (1, 2, 4)
IN_PIECES = (".distcp", ".safetensors")  # files that are read by pieces; others are read whole
LAWS = {
    "groups that a rank makes": "constant",
    "groups in the world": "17 N / 64 + 73, with several data-parallel copies",
    "requests to the store in a second": "2 N / 5, at most 910",
    "a minute of waiting for writers: listings": "constant",
    "a minute of waiting for writers: stats": "4 N",
}

# What the program at 9456fd7 asked at 1,024 and 16,384 ranks: groups were counted, the rest follows from its code.
BEFORE = {
    "groups that a rank makes": (3_185, 47_825),
    "requests to the store in a second": (600, 10_000),
    "a minute of waiting for writers: listings": (1_200, 1_200),
    "a minute of waiting for writers: stats": (2_400 * 1_024, 2_400 * 16_384),
    "load: stats": (8 * 1_024**2, 8 * 16_384**2),
}

_GROUPS = """
import json, sys
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from megavlm import backend
backend.activate()
from megavlm.arch.dims import Dims
from megavlm.parallel import groups
world, made, theirs = int(sys.argv[1]), [], dist.new_group
dims = Dims(tp=8, pp=min(8, world // 8), dp=world // (8 * min(8, world // 8)))
dist.init_process_group("fake", rank=world // 2, world_size=world, store=FakeStore())
def counted(ranks, *args, **words):
    made.append(len(ranks))
    return theirs(ranks, *args, **words)
dist.new_group = counted
groups.build_groups(dims, tied_owners=(0, dims.pp - 1), seed=1, timeout_minutes=1)
print(len(made), sum(world // size for size in made if size > 1))
"""


def groups_of(world: int) -> dict[str, float]:
    """Return the groups that a rank makes at TP8·PP8, and those of more than one rank in the world."""
    done = subprocess.run([sys.executable, "-c", _GROUPS, str(world)], capture_output=True, text=True, check=True)
    own, all_of_them = map(int, done.stdout.split())
    return {"groups that a rank makes": own, "groups in the world": all_of_them}


class _Asked:
    """A store that counts requests."""

    def __init__(self) -> None:
        import torch.distributed as dist

        self.count, self._store = 0, dist.HashStore()

    def clone(self) -> _Asked:
        return self

    def __getattr__(self, name: str) -> Any:
        self.count += 1
        return getattr(self._store, name)


def store_requests(world: int) -> dict[str, float]:
    """Return what the store is asked in a second by all ranks of a run that goes on."""
    from megavlm.resilience.hang_reports import Limits
    from megavlm.resilience.phases import Phases
    from megavlm.resilience.watchdog import RunMember, Watchdog, seconds_between_reports

    asked = {}
    for rank in (0, 1):  # one of the two that read all reports, and one of the others
        store = _Asked()
        Watchdog(Phases(), RunMember(rank, world, Path()), store, limits=Limits())._round(1.0)
        asked[rank] = store.count
    return {
        "requests to the store in a second": (2 * asked[0] + (world - 2) * asked[1])
        / seconds_between_reports(world, None)
    }


@contextmanager
def noted(folder: Path, log: Path) -> Iterator[None]:
    """Write a line to `log` for each request about what is in `folder`, by this process and by those that it forks."""
    file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    below, link, size_of = str(folder), os.readlink, os.stat

    def note(kind: str, what: Any, number: int = 1) -> None:
        try:
            path = link(f"/proc/self/fd/{what}") if isinstance(what, int) else os.fsdecode(what)
        except OSError:
            return
        if path.startswith(below):
            os.write(file, f"{kind} {number}\n".encode())

    def counted(kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(what: Any = ".", *args: Any, **words: Any) -> Any:
            found = function(what, *args, **words)
            if kind == "opens" and isinstance(what, int):  # a descriptor, whose file was counted when it was opened
                return found
            note(kind, what, found if kind == "bytes read" else 1)
            if kind == "opens" and not str(what).endswith(IN_PIECES):
                note("bytes read", what, _size(what, size_of))
            return found

        return call

    kinds = {"open": "opens", "stat": "stats", "lstat": "stats", "listdir": "listings", "scandir": "listings"}
    kinds |= {"fsync": "flushes", "preadv": "bytes read"}
    noting: dict[str, Any] = {name: counted(kind, getattr(os, name)) for name, kind in kinds.items()}
    with (
        patch.multiple(os, **noting),
        patch.object(io, "open", counted("opens", io.open)),
        patch.object(builtins, "open", counted("opens", open)),
    ):
        yield
    os.close(file)


@contextmanager
def told(log: Path) -> Iterator[None]:
    """Write a line to `log` for each pickled object that this rank sends: its bytes times the ranks that receive it."""
    import torch.distributed as dist

    file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    pickled: Any = dist.distributed_c10d._object_to_tensor

    def counted(what: Any, device: Any, group: Any) -> Any:
        found, caller = pickled(what, device, group), sys._getframe(1)
        callers = {each.f_code.co_name for each in (caller, caller.f_back) if each is not None}
        to_all = callers & {"all_gather_object", "broadcast_object_list"}
        receivers = dist.get_world_size(group) - 1 if to_all else 1
        os.write(file, f"bytes told {int(found[1]) * receivers}\n".encode())
        return found

    with patch.object(dist.distributed_c10d, "_object_to_tensor", counted):
        yield
    os.close(file)


def waiting_save(world: int) -> dict[str, float]:
    """Return what the writer of rank 0 asks in a minute in which it waits for the reports of all others."""
    from megavlm.checkpoint import writer

    now = [0.0]

    def go_on() -> None:
        if now[0] >= 60:
            raise TimeoutError

    def sleep(seconds: float) -> None:
        now[0] += seconds

    with tempfile.TemporaryDirectory() as scratch:
        log, reports, checkpoint = (Path(scratch) / name for name in ("log", "reports", "checkpoint"))
        checkpoint.mkdir()
        for rank in range(world):
            for number in range(2):
                (checkpoint / f"__{rank}_{number}.distcp").touch()
        made = writer.Reports(reports)
        made.leave(0, None, None)
        (reports / "0.json").rename(reports / "ready")  # the folder is there, and no report
        clock = SimpleNamespace(monotonic=lambda: now[0], sleep=sleep)
        with patch.object(writer, "time", clock), noted(Path(scratch), log), suppress(TimeoutError):
            made.of_all(world, checkpoint, go_on)
        asked = Counter(line.partition(" ")[0] for line in log.read_text().splitlines())
    return {f"a minute of waiting for writers: {kind}": asked[kind] for kind in ("listings", "stats")}


def _size(what: Any, stat: Callable[..., os.stat_result]) -> int:
    try:
        return stat(what).st_size
    except OSError:
        return 0


def _do(part: str, argv: list[str], run_dir: str, folder: str, logs: str) -> None:
    """Do a part of a run on this rank, and note what it asks of the file system."""
    from tests.support.training import started, train

    log = Path(logs) / f"{part}-{os.environ['RANK']}"
    with noted(Path(folder), log), told(log):
        if part == "save":
            return train(argv, run_dir)
        from megavlm.checkpoint.hf.pretrained import with_pretrained_model

        with started(argv, run_dir, with_pretrained_model if part == "start" else lambda config: config):
            pass


def files_of(world: int, model: str) -> dict[str, int]:
    """Return what all ranks of a world together ask of the file system; a start is from the folder `model`."""
    from tests.support.pool import Pool
    from tests.support.training import SMALL

    found: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as scratch:
        run, logs = (str(Path(scratch) / name) for name in ("run", "logs"))
        Path(logs).mkdir()
        own = [*SMALL, "--data-parallel-sharding", "optimizer"]
        given = f"--init-from {model} --datasets {ROOT}/examples/first_run/train.jsonl --seq-length 256 --gbs 4".split()
        pool = Pool(world)
        try:
            pool.run(_do, "save", own, run, f"{run}/checkpoints", logs)
            pool.run(_do, "load", own, run, f"{run}/checkpoints", logs)
            pool.run(_do, "start", given, f"{run}-2", model, logs)
        finally:
            pool.close()
        for log in Path(logs).iterdir():
            for line in log.read_text().splitlines():
                kind, _, number = line.rpartition(" ")
                name = f"{log.name.partition('-')[0]}: {kind}"
                found[name] = found.get(name, 0) + int(number)
    return found


def law(values: Mapping[int, int]) -> tuple[float, float, float]:
    """Return a, b, c of a + b·N + c·N² through what 1, 2 and 4 ranks ask. Where the slope does not rise, c is 0."""
    first, second = values[2] - values[1], (values[4] - values[2]) / 2
    c = max(0.0, (second - first) / 3)
    if c * 4 < 0.05 * values[4]:  # which rank holds which piece differs a little between worlds
        return values[4] - 4 * second, second, 0.0
    return values[1] - first + 2 * c, first - 3 * c, c


def in_words(found: tuple[float, float, float]) -> str:
    """Return a law in letters: "2 N + 10"."""
    a, b, c = found
    terms = [f"{number:,.4g}{power}" for number, power in ((c, " N²"), (b, " N"), (a, "")) if number]
    return " + ".join(terms).replace("+ -", "- ") or "0"


def rows() -> dict[str, dict[str, Any]]:
    """Return each quantity with its law, how it was found, and its value at each size."""
    found: dict[str, dict[str, Any]] = {}
    for size in SIZES:
        for name, value in (groups_of(size) | store_requests(size) | waiting_save(size)).items():
            row = found.setdefault(name, {"law": LAWS[name], "how": "the real code at each size", "at": {}})
            row["at"][str(size)] = value
    with tempfile.TemporaryDirectory() as folder:
        model = f"{folder}/model"
        subprocess.run([sys.executable, ROOT / "examples/first_run/small_model.py", model], check=True)
        counted = {world: files_of(world, model) for world in COUNTED}
    # How often a save lists depends on its seconds: `waiting_save` counts it by a clock of its own.
    for name in sorted({name for each in counted.values() for name in each} - {"save: listings"}):
        values = {world: each.get(name, 0) for world, each in counted.items()}
        a, b, c = law(values)
        found[name] = {
            "law": in_words((a, b, c)),
            "how": "counted at 1, 2 and 4, by the law beyond",
            "counted": {str(world): value for world, value in values.items()},
            "at": {str(size): a + b * size + c * size**2 for size in SIZES},
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-record", action="store_true", help="print the table only")
    options = parser.parse_args()
    record = {**circumstances(), "rows": rows(), "before": BEFORE}
    for name, row in record["rows"].items():
        values = "  ".join(f"{value:>15,.0f}" for value in row["at"].values())
        before = "; before: " + " and ".join(f"{value:,}" for value in BEFORE[name]) if name in BEFORE else ""
        print(f"{name:38}{values}  {row['law']} ({row['how']}{before})")
    if not options.no_record:
        append("scale", record)


if __name__ == "__main__":
    main()
