import io

import pytest

from megavlm.metrics.callback import StepEnd
from megavlm.metrics.progress import ProgressLine, duration


def record(iteration: int, step_time: float = 2.0) -> dict[str, float | int | None]:
    return {
        "iteration": iteration,
        "skipped_samples": int(iteration in (4, 5)),
        "loss": 2.34567,
        "grad_norm": 0.5,
        "learning_rate": 1e-3,
        "tokens_per_second": 12345.6,
        "step_time_s": step_time,
        "mfu": None,
    }


def test_a_file_gets_a_plain_line_every_interval_and_at_the_end() -> None:
    stream = io.StringIO()
    progress = ProgressLine(7, stream, log_interval=3)
    for iteration in range(1, 8):
        progress.on_step_end(StepEnd(record(iteration)))
    lines = stream.getvalue().splitlines()
    assert [line.split(" | ")[0] for line in lines] == ["iteration 3/7", "iteration 6/7", "iteration 7/7"]
    assert lines[0] == (
        "iteration 3/7 | loss 2.3457 | grad norm 0.500 | lr 1.00e-03 | 12,346 tokens/s | step 2.000 s | ETA 0:08"
    )
    assert lines[1].endswith("step 2.000 s | 2 skipped | ETA 0:02")
    progress.on_step_end(StepEnd(record(7) | {"reward_margin": 0.25, "reward_accuracy": 0.9}))
    assert " | loss 2.3457 | margin 0.250 | 90% of pairs right | grad norm" in stream.getvalue().splitlines()[-1]
    progress.on_step_end(StepEnd(record(7) | {"reward_accuracy": 0.9, "chosen_share": 0.5}))
    assert " | loss 2.3457 | 90% of answers right | grad norm" in stream.getvalue().splitlines()[-1]


@pytest.mark.parametrize(
    ("step_times", "remaining", "eta"),
    [([60.0, 1.0, 1.0, 1.0, 1.0], 95, "1:35"), ([1.0] * 100 + [3.0] * 100, 1, "0:03")],
    ids=["one slow step does not move it", "it follows a lasting change"],
)
def test_the_eta_is_of_the_median_of_the_last_steps(step_times: list[float], remaining: int, eta: str) -> None:
    stream = io.StringIO()
    progress = ProgressLine(len(step_times) + remaining, stream)
    for iteration, step_time in enumerate(step_times, start=1):
        progress.on_step_end(StepEnd(record(iteration, step_time)))
    assert stream.getvalue().splitlines()[-1].endswith(f"ETA {eta}")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0:00"), (42, "0:42"), (59.7, "1:00"), (725, "12:05"), (11220, "3:07:00"), (187200, "2 d 4:00:00")],
)
def test_durations_read_like_a_clock(seconds: float, text: str) -> None:
    assert duration(seconds) == text
