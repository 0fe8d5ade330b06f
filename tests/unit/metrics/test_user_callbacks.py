from __future__ import annotations

import errno
import sys
from pathlib import Path

import pytest

from megavlm.errors import UserError
from megavlm.metrics.callback import Callback, Stop
from megavlm.resilience.phases import Phases
from megavlm.train.hooks.hook import Callbacks
from megavlm.train.outputs import load
from tests.support.user_callbacks import Broken, Diary

HERE = "tests.support.user_callbacks"


def test_callbacks_are_made_in_the_order_of_their_names() -> None:
    first, second = load([f"{HERE}:Diary", f"{HERE}:Broken"])
    assert (type(first), type(second)) == (Diary, Broken)


def test_a_module_in_the_working_directory_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a_module_of_mine.py").write_text(
        "from megavlm.metrics.callback import Callback\nclass Mine(Callback): ...\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (mine,) = load(["a_module_of_mine:Mine"])
    assert type(mine).__name__ == "Mine"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("no_such_module:X", "Python finds no module no_such_module: add its folder to PYTHONPATH"),
        (f"{HERE}:Diry", "has no Diry: did you mean Diary?"),
        (f"{HERE}:NoCallback", "makes a NoCallback: derive it from megavlm.metrics.callback.Callback"),
        (f"{HERE}:Unmakeable", "cannot be made: RuntimeError (user_callbacks.py, line "),
        ("a_bad_module:X", "cannot be imported: NameError (a_bad_module.py, line 2): name 'undefined' is not defined"),
        ("a_needy_module:X", "cannot be imported: ModuleNotFoundError (a_needy_module.py, line 1): No module named"),
    ],
)
def test_a_mistake_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, said: str) -> None:
    (tmp_path / "a_bad_module.py").write_text("\nundefined\n")
    (tmp_path / "a_needy_module.py").write_text("import no_such_package_at_all\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError) as error:
        load([name])
    assert str(error.value).startswith(f"--callback {name}")
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_a_full_disk_ends_no_run(capsys: pytest.CaptureFixture[str]) -> None:
    """Pages and charts are left out, which is said once; what comes after them is called."""

    class Full(Callback):
        def on_stop(self, stop: Stop) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

    class After(Callback):
        def on_stop(self, stop: Stop) -> None:
            print("called")

    callbacks = Callbacks(Phases(), own=[Full(), After()])
    for _ in range(2):
        callbacks.on_stop(None)
    printed = capsys.readouterr()
    assert printed.out == "called\ncalled\n"
    (line,) = printed.err.splitlines()
    assert "Full cannot write (No space left on device): the run goes on" in line
