"""Say where the threads of this process are: one line for the training thread, and all stacks in a file."""

from __future__ import annotations

import faulthandler
import io
import json
import linecache
import sys
import threading
import time
import traceback
from pathlib import Path

from megavlm.files import open_new, replace_file

# Files whose functions wait for other ranks, and what a line that waits for a transfer looks like elsewhere.
_COLLECTIVES = ("torch/distributed/distributed_c10d.py", "torch/distributed/c10d_logger.py")
_WAITS = (".wait(", ".synchronize(", ".tolist(", ".item(")


def place_of(thread: int) -> tuple[str, bool]:
    """Return where a thread is, as "all_reduce in distributed_c10d.py:2890 called by …", and whether it waits there for
    other ranks; ("", False) for a thread that has ended.
    """
    frame = sys._current_frames().get(thread)
    if frame is None:
        return "", False
    frames = traceback.extract_stack(frame)
    inner = frames[-1]
    collective = next((each.name for each in reversed(frames) if each.filename.endswith(_COLLECTIVES)), None)
    waits = collective is not None or any(
        word in linecache.getline(inner.filename, inner.lineno or 0) for word in _WAITS
    )
    ours = next((each for each in reversed(frames) if "/megavlm/" in each.filename), None)
    text = f"{inner.name} ({_short(inner)})"
    if ours is not None and ours is not inner:
        text += f" called by {ours.name} ({_short(ours)})"
    return text, waits


def processor_time(thread: int) -> int:
    """Return the nanoseconds of processor time that a living thread has used: none is added while it waits."""
    return time.clock_gettime_ns(time.pthread_getcpuclockid(thread))


def write_stacks(path: Path, header: str) -> None:
    """Write the stacks of all threads of this process, and into a file beside it what torch's flight recorder holds.

    The file names the training thread's identifier, since `faulthandler` prints identifiers alone.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with io.TextIOWrapper(open_new(path), encoding="utf-8") as file:
        print(header, file=file)
        for thread in threading.enumerate():
            print(f"thread 0x{thread.ident or 0:016x}: {thread.name}", file=file)
        print(file=file, flush=True)
        faulthandler.dump_traceback(file, all_threads=True)
    record = flight_record()
    if record is not None:
        replace_file(path.with_suffix(".collectives.json"), record)


def flight_record() -> bytes | None:
    """Return the last collectives of this process that torch's flight recorder holds, as JSON; None if there are none.

    Gloo's are recorded always, NCCL's where TORCH_FR_BUFFER_SIZE (earlier TORCH_NCCL_TRACE_BUFFER_SIZE) is above 0. Not
    run on a GPU so far.
    """
    torch = sys.modules.get("torch")
    binding = getattr(getattr(torch, "_C", None), "_distributed_c10d", None)
    for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):
        dump = getattr(binding, name, None)
        if dump is None:
            continue
        text = dump()
        content: bytes = text if isinstance(text, bytes) else str(text).encode()
        try:
            return content if json.loads(content).get("entries") else None
        except ValueError:
            return content
    return None


def _short(frame: traceback.FrameSummary) -> str:
    parts = Path(frame.filename).parts
    return f"{'/'.join(parts[-3:])}:{frame.lineno}"
