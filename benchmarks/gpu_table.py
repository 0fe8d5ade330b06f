"""Make the table of `gpu_vlm.py` from its measurements."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpu_sides import AUTOCAST, COMPILED, OURS, OURS_FILES, OURS_FP8, PURE, PURE_FILES, SINGLE
from gpu_workers import Answer

from megavlm.planner.hardware import peak_tflops

GIB = 2**30
_AGAINST = (AUTOCAST, COMPILED, PURE, SINGLE[0])


@dataclass(frozen=True)
class Row:
    """A line of the table. `met` is None if there is no target, or if it does not apply to this device."""

    what: str
    figure: str
    target: str = ""
    met: bool | None = None


def rows_of(result: Mapping[str, Any], device: str, *, judged: bool) -> list[Row]:
    """Return the lines of one model; targets apply only to published sizes."""
    name, answers = result["shape"], result.get("answers", {})
    if "error" in result:
        return [Row(name, f"not measured: {result['error']}")]
    rows = [Row(f"{name}: language layers", f"{result['layers']} of {result['of']}")]
    ablated = result["ablation"]
    for side in [] if ablated else (OURS, OURS_FP8, SINGLE[1]):
        if side.name in answers:
            rows += _side(result, side.name, side.precision, device, judged=judged)
    rows += _ablated(result, ablated) if ablated else []
    if OURS_FILES.name in answers:
        rows += _files(result)
    for side, each in answers.items():
        used = [", ".join([answer["layers"], *answer["attention"]]) for answer in good(each)]
        rows += [Row(f"{name}: {side}, attention", used[0])] if used and not ablated else []
    return rows


def _side(result: Mapping[str, Any], side: str, precision: str, device: str, *, judged: bool) -> Iterator[Row]:
    """Yield the rates of a megavlm side, and its ratios to each Transformers side."""
    answers, name, own = result["answers"], result["shape"], result["answers"][side]
    step, language = (median(own, f"{part}_seconds") for part in ("step", "language"))
    if step is None or language is None:
        yield Row(f"{name}: {side}", f"not measured: {_error(own)}")
        return

    def row(what: str, figure: str, target: str = "", met: bool | None = None) -> Row:
        shown = judged and bool(target)
        return Row(f"{name}: {side}, {what}", figure, target if shown else "", met if shown else None)

    least_tflops, least_ratio = (700, 2.0) if side == OURS_FP8.name else (500, 1.5)
    rate, whole = (
        result[f"{part}_flops"] / seconds / 1e12 for part, seconds in (("language", language), ("step", step))
    )
    peak = peak_tflops(device, precision)
    yield row("step", f"{step:.4f} s")
    yield row("language part", f"{rate:.3g} TFLOP/s", f"≥ {least_tflops}", rate >= least_tflops)
    yield row("whole step", f"{whole:.3g} TFLOP/s")
    yield row("MFU of the whole step", "not measured" if peak is None else f"{whole / peak:.1%}")
    for other in (other for other in _AGAINST if other.name in answers):
        theirs, goal = answers[other.name], other == AUTOCAST
        faster = ratio(theirs, own)
        if faster is None:
            yield row(f"against {other.name}", f"not measured: {_error(theirs)}")
            continue
        target = f"≥ {least_ratio}" if goal else ""
        yield row(f"times as fast as {other.name}", f"{faster:.2f} ×", target, faster >= least_ratio)
        share = most_bytes(own) / most_bytes(theirs)
        yield row(f"peak memory over that of {other.name}", f"{share:.2f}", "< 1" if goal else "", share < 1)
    yield row("peak memory", f"{most_bytes(own) / GIB:.2f} GiB")
    off = result["predicted_bytes"][side] / most_bytes(own) - 1
    yield row("predicted peak memory", f"{off:+.1%}", "within 10 %", abs(off) <= 0.1)


def _ablated(result: Mapping[str, Any], group: Sequence[str]) -> Iterator[Row]:
    """Yield seconds and memory of each side of a group, and their ratios to the first."""
    answers, first = result["answers"], group[0]
    base = median(answers.get(first, []), "step_seconds")
    for side in group:
        own = answers.get(side, [])
        step, what = median(own, "step_seconds"), f"{result['shape']}: {side}"
        if step is None:
            yield Row(what, f"not measured: {_error(own)}")
            continue
        figure = f"{step:.4f} s, {most_bytes(own) / GIB:.2f} GiB"
        if base is not None and side != first:
            figure += f": × {step / base:.3f}, × {most_bytes(own) / most_bytes(answers[first]):.3f}"
        off = result["predicted_bytes"][side] / most_bytes(own) - 1
        yield Row(what, f"{figure}; predicted {off:+.1%}")


def _files(result: Mapping[str, Any]) -> Iterator[Row]:
    """Yield the share of positions that is trained, and the cost of the data loader over tensors in memory."""
    name, side = result["shape"], OURS_FILES.name
    own, made = good(result["answers"][side]), good(result["answers"].get(OURS.name, []))
    if not own:
        yield Row(f"{name}: {side}", f"not measured: {_error(result['answers'][side])}")
        return
    useful, positions = (rate(own, part) for part in ("tokens", "positions"))
    yield Row(f"{name}: {side}, useful tokens", f"{useful:,.0f} of {positions:,.0f} positions a second")
    seconds = sum(sum(answer["step_seconds"]) for answer in own)
    yield Row(f"{name}: {side}, waits for data", f"{sum(sum(a['data_seconds']) for a in own) / seconds:.1%} of a step")
    theirs = good(result["answers"].get(PURE_FILES.name, []))
    if theirs:
        times = useful / rate(theirs, "tokens")
        yield Row(f"{name}: {PURE_FILES.name}, useful tokens", f"{rate(theirs, 'tokens'):,.0f} a second")
        yield Row(f"{name}: {side}, useful tokens over those of {PURE_FILES.name}", f"{times:.2f} ×")
    if made:
        yield Row(f"{name}: {side}, positions over those of {OURS.name}", f"{positions / rate(made, 'positions'):.2f}")


def good(answers: Sequence[Answer]) -> list[Answer]:
    """Return the turns that measured something."""
    return [answer for answer in answers if "error" not in answer]


def _error(answers: Sequence[Answer]) -> str:
    """Return why a side has no figure."""
    return next((answer["error"] for answer in answers if "error" in answer), "no round")


def rate(answers: Sequence[Answer], part: str) -> float:
    """Return tokens, or positions, per second over all timed steps."""
    return float(sum(answer[part] for answer in answers) / sum(sum(answer["step_seconds"]) for answer in answers))


def most_bytes(answers: Sequence[Answer]) -> float:
    """Return the peak memory over all rounds."""
    return float(max(answer["peak_bytes"] for answer in good(answers)))


def median(answers: Sequence[Answer], part: str) -> float | None:
    """Return the median over all rounds."""
    found = [value for answer in good(answers) for value in answer[part]]
    return statistics.median(found) if found else None


def ratio(theirs: Sequence[Answer], ours: Sequence[Answer]) -> float | None:
    """Return how many times faster megavlm is: the median over rounds of ratios of medians."""
    pairs = [(a, b) for a, b in zip(theirs, ours, strict=False) if "error" not in a and "error" not in b]
    steps = [[statistics.median(answer["step_seconds"]) for answer in pair] for pair in pairs]
    return statistics.median(a / b for a, b in steps) if steps else None


def table(rows: Sequence[Row]) -> str:
    """Return the table as text."""
    widths = [max(len(getattr(row, part)) for row in rows) for part in ("what", "figure", "target")]
    signs = {None: "", True: "met", False: "missed"}
    return "\n".join(
        f"{row.what:<{widths[0]}}  {row.figure:>{widths[1]}}  {row.target:<{widths[2]}}  {signs[row.met]}".rstrip()
        for row in rows
    )
