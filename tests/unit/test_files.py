"""Who writes files, and onto what: nothing goes through a link of a run folder or replaces what is no file."""

from __future__ import annotations

import argparse
import ast
import errno
import importlib
import json
import os
import re
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megavlm.errors import UserError
from megavlm.files import check_folder, open_new, open_to_append, replace_file, write_out
from megavlm.programs.main import COMMANDS

ROOT = Path(__file__).parents[2]

# Calls that write by themselves, with the reason why that neither follows a link that others made nor waits.
OWN = {
    ("data/records/writing.py", "replace"): "a tar that `open_new` has opened",
    ("train/run_dir.py", "touch"): "a name that nobody can know",
    ("storage/store.py", "open"): "a file of an object store",
    ("storage/cache.py", "rename"): "a folder of the user's own cache",
    ("storage/cache.py", "open"): "a lock in the user's own cache, which has no content",
    ("checkpoint/folders.py", "rename"): "folders of checkpoints",
    ("checkpoint/hf/adapters.py", "save_file"): "into a folder that is new",
    ("programs/launch/job.py", "open"): "creates, or fails; the file that torchrun names",
}
_WRITES = {"write_text", "write_bytes", "rename", "renames", "touch", "save_file", "savez", "copyfile", "copy2"}
_MAY_WRITE = re.compile(rf"\b({'|'.join(_WRITES)})\(|\.replace\(|\bopen\(")
_FLAGS = {"O_WRONLY", "O_RDWR", "O_CREAT", "O_APPEND", "O_TRUNC"}


def writing(tree: ast.AST) -> Iterator[str]:
    """Yield the names of calls that write a file: by name, by a mode, by flags of the system."""
    for node in (each for each in ast.walk(tree) if isinstance(each, ast.Call)):
        is_method = isinstance(node.func, ast.Attribute)
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name == "open":
            inner = [each for value in [*node.args, *node.keywords] for each in ast.walk(value)]
            modes = {str(each.value) for each in inner if isinstance(each, ast.Constant)}
            flags = {each.attr for each in inner if isinstance(each, ast.Attribute)}
            if flags & _FLAGS or any(set(mode) & set("wax+") and len(mode) <= 3 for mode in modes):
                yield name
        elif name in _WRITES or (name == "replace" and is_method and len(node.args) == 1 and not node.keywords):
            yield name  # `Path.replace` has one argument


def test_one_module_writes_files() -> None:
    """A file that is opened elsewhere may be a link that somebody else put there, a FIFO, or /dev/null."""
    package = ROOT / "megavlm"
    sources = {path: path.read_text(encoding="utf-8") for path in package.rglob("*.py") if path.name != "__init__.py"}
    found = {
        (str(path.relative_to(package)), name)
        for path, source in sources.items()
        if path != package / "files.py" and _MAY_WRITE.search(source)  # to parse all takes seconds
        for name in writing(ast.parse(source))
    }
    assert found - set(OWN) == set(), "write by megavlm/files.py, or say here why not"
    assert set(OWN) - found == set(), "these write no more"


def outputs() -> Iterator[tuple[str, str]]:
    """Yield each command that writes where a user says, and the option that says it, as their parsers have them."""

    def of(parser: argparse.ArgumentParser, words: str) -> Iterator[tuple[str, str]]:
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                for name, inner in action.choices.items():
                    yield from of(inner, f"{words} {name}")
            elif action.dest in ("out", "json") and action.nargs != 0:
                yield words, action.option_strings[0] if action.option_strings else ""

    for name, (module, _) in COMMANDS.items():
        if (parser := getattr(importlib.import_module(module), "_parser", None)) is not None:
            yield from of(parser(), name)


_SMALL = ("--model", "qwen2_5_vl_3b", "--gpus", "1", "--gpu", "h100", "--images", "1x224", "--seq-length", "512")
# What comes before the option; with None the file is written once measured, which takes minutes: by `write_out`.
_WORDS: dict[tuple[str, str], tuple[str, ...] | None] = {
    ("plan", "--out"): _SMALL,
    ("report", "--out"): ("RUN",),
    ("migrate", "--out"): ("RUN/ds.json",),
    ("preview", "--out"): None,
    ("channels", "--out"): None,
    ("doctor", "--json"): None,
    ("calibrate", "--out"): None,
    # Folders: said before anything is read.
    ("convert export", ""): ("none",),
    ("convert merge-lora", ""): ("none",),
    ("convert export-lora", ""): ("none",),
    ("prepare", ""): ("none",),
    ("embed", "--out"): ("none", "none"),
    ("logprobs", "--out"): ("none", "none"),
    ("evaluate", "--out"): ("none", "--task", "none"),
}


def node(path: Path) -> None:
    """Make a device that swallows all; where that is not allowed, a FIFO without a reader."""
    try:
        os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    except PermissionError:
        os.mkfifo(path)


@pytest.mark.parametrize(("command", "option"), list(outputs()))
def test_no_command_replaces_a_device(command, option, tmp_path, monkeypatch, capsys):
    words = _WORDS[command, option]
    name, *inner = command.split()
    module = importlib.import_module(COMMANDS[name][0])
    if words is None:
        assert f'write_out("{option}"' in Path(str(module.__file__)).read_text(encoding="utf-8")
        return
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "RUN"
    run.mkdir()
    event = {"time": "2026-01-01T00:00:00+00:00", "kind": "start", "iteration": 0, "world": 1, "attempt": 0, "rank": 0}
    (run / "events.jsonl").write_text(json.dumps(event) + "\n")
    (run / "ds.json").write_text('{"train_batch_size": 8}')
    (run / "metrics.jsonl").write_text(
        "".join(
            json.dumps({"iteration": n, "loss": 1.0, "time": f"2026-01-01T00:00:0{n}+00:00"}) + "\n" for n in (1, 2)
        )
    )
    target = tmp_path / "n"
    node(target)
    before = target.lstat()
    status = module.main([*inner, *words, *([option] if option else []), str(target)])
    said = capsys.readouterr().err
    is_folder = option == "" or command in ("embed", "evaluate", "logprobs")
    assert status == (2 if is_folder or stat.S_ISFIFO(before.st_mode) else 0), said
    assert (target.lstat().st_mode, target.lstat().st_ino) == (before.st_mode, before.st_ino), "it was replaced"
    if is_folder:
        assert f"{target} is no folder" in said
        assert said.count("\n") == 1


def test_what_a_user_names_is_written_where_it_leads(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    link, file = tmp_path / "link", tmp_path / "elsewhere" / "file"
    link.symlink_to(file)
    for text in ("one", "two"):  # a dangling link; a link to a file
        write_out("--out", link, text)
        assert (link.is_symlink(), file.read_text()) == (True, text)
    print("before", flush=True)
    write_out("--out", Path("/dev/stdout"), "page\n")
    print("after", flush=True)
    assert capfd.readouterr().out == "before\npage\nafter\n"
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    with pytest.raises(UserError, match=r"^--out \S+fifo cannot be written: nobody reads it$"):
        write_out("--out", fifo, "page")
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    write_out("--out", fifo, b"page")
    assert os.read(reader, 100) == b"page"
    os.close(reader)
    with pytest.raises(UserError, match=r"--out /dev/full cannot be written: No space left on device"):
        write_out("--out", Path("/dev/full"), "page")
    with pytest.raises(UserError, match=r"--out \S+ cannot be written: a folder"):
        write_out("--out", tmp_path, "page")
    for write in (lambda path: write_out("--out", path, "page"), lambda path: check_folder("--out", path)):
        with pytest.raises(UserError, match=r"--out ~/x starts with ~, which only a shell expands"):
            write(Path("~/x"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["elsewhere", "fifo", "link"]


WRITERS: dict[str, Callable[[Path], object]] = {
    "replace": lambda path: replace_file(path, "new"),
    "open_new": lambda path: open_new(path).close(),
    "append": lambda path: open_to_append(path).close(),
}


@pytest.mark.parametrize("how", WRITERS)
def test_files_of_a_run_folder_are_files(how: str, tmp_path: Path) -> None:
    other, path = tmp_path / "other", tmp_path / "file"
    other.write_text("kept")
    path.symlink_to(other)
    if how == "append":
        with pytest.raises(OSError, match="a link, which is not followed") as refused:
            WRITERS[how](path)
        assert refused.value.errno == errno.ELOOP
    else:
        WRITERS[how](path)
        assert not path.is_symlink()
    assert other.read_text() == "kept"
    for make in (os.mkfifo, node, Path.mkdir):
        path.unlink(missing_ok=True)
        make(path)
        before = path.lstat()
        with pytest.raises(OSError, match=r"no regular file|a folder"):
            WRITERS[how](path)
        assert path.lstat().st_ino == before.st_ino
    assert sorted(each.name for each in tmp_path.iterdir()) == ["file", "other"], "something is left behind"
