"""Compiles `no_device.cpp`, once per torch and source."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

_SOURCE = Path(__file__).with_name("no_device.cpp")


def shim(folder: Path) -> Path | None:
    """The library, made in `folder` unless it is there; None where there is no compiler."""
    compiler, spec = shutil.which("g++"), find_spec("torch")
    torch = Path(spec.origin).parent
    if compiler is None:
        return None
    mark = hashlib.sha256(_SOURCE.read_bytes() + (torch / "version.py").read_bytes()).hexdigest()[:16]
    made = folder / f"no_device-{mark}.so"
    if not made.exists():
        unfinished = made.with_suffix(f".{os.getpid()}.tmp")
        libraries = ["-L", str(torch / "lib"), "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{torch / 'lib'}"]
        command = [compiler, "-std=c++20", "-O0", "-shared", "-fPIC", "-I", str(torch / "include"), str(_SOURCE)]
        subprocess.run([*command, "-o", str(unfinished), *libraries], check=True, timeout=300)
        unfinished.rename(made)
    return made
