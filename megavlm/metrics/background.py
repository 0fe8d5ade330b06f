"""Let a tracker work in a thread of its own: neither a slow network nor an error of it reaches training."""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Callable

from megavlm.metrics.callback import Callback, Samples, Saved, Start, StepEnd, Stop, Validation
from megavlm.metrics.secrets import without_secrets

_CAPACITY = 1000  # calls that may wait: at ten steps a second, more than a minute and a half
# Seconds to wait at the end of a run; one that was asked to stop may be killed soon.
_PATIENCE = {"finished": 60.0, "failed": 20.0, "stopped": 5.0}

Call = Callable[[Callback], None]


class Background(Callback):
    """Passes calls on to a tracker, which its thread makes first. What finds no place in the queue is left out.

    A tracker that raises gets no more calls. Each of these is said once, on stderr, without secrets.
    """

    def __init__(self, name: str, make: Callable[[], Callback], *, capacity: int = _CAPACITY) -> None:
        """Start the thread. `name` is how the lines on stderr call the tracker."""
        self._name, self._make = name, make
        self._calls: queue.Queue[Call | None] = queue.Queue(capacity)
        self._left_out = 0
        self._broken = False
        self._thread = threading.Thread(target=self._work, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def on_start(self, start: Start) -> None:
        self._pass_on(lambda tracker: tracker.on_start(start))

    def on_step_end(self, step: StepEnd) -> None:
        self._pass_on(lambda tracker: tracker.on_step_end(step))

    def on_validation(self, validation: Validation) -> None:
        self._pass_on(lambda tracker: tracker.on_validation(validation))

    def on_samples(self, samples: Samples) -> None:
        self._pass_on(lambda tracker: tracker.on_samples(samples))

    def on_save(self, saved: Saved) -> None:
        self._pass_on(lambda tracker: tracker.on_save(saved))

    def on_stop(self, stop: Stop, *, patience: float | None = None) -> None:
        """Wait until all calls are done, for `patience` seconds at most."""
        patience = _PATIENCE[stop.state] if patience is None else patience
        ending = threading.Thread(target=self._end, args=(stop,), daemon=True)  # the queue may be full
        ending.start()
        self._thread.join(patience)
        if self._thread.is_alive():
            self._say(f"has not taken everything within {patience:g} s: the run ends without it")

    def _end(self, stop: Stop) -> None:
        self._calls.put(lambda tracker: tracker.on_stop(stop))
        self._calls.put(None)

    def _pass_on(self, call: Call) -> None:
        if self._broken:
            return
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            self._left_out += 1
            if self._left_out == 1:
                self._say("is too slow: what finds no place in its queue is left out; metrics.jsonl has everything")

    def _work(self) -> None:
        tracker: Callback | None = None
        for call in iter(self._calls.get, None):
            if self._broken:
                continue  # empties the queue
            try:
                tracker = self._make() if tracker is None else tracker
                call(tracker)
            # Whatever a library or a server does, training goes on.
            except BaseException as error:
                self._broken = True
                self._say(f"fails ({type(error).__name__}: {error}): the run goes on without it")

    def _say(self, text: str) -> None:
        line = " ".join(f"warning: --tracker {self._name} {text}".split())
        print(without_secrets(line), file=sys.stderr, flush=True)
