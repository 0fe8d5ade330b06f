"""Draw a pipeline step: one row per rank, one bar per pass, as SVG."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from html import escape

from megavlm.arch.schedules import BACKWARD, FORWARD, WEIGHT, Event, Timeline

# The layers of a chunk, and the colours of its bars by what they do.
PARTS = ("language", "vision", "vision and language")
_COLOURS: Mapping[str, tuple[str, str, str]] = {
    FORWARD: ("#3b76c4", "#8a63c9", "#5f6cc6"),
    BACKWARD: ("#3f9a6b", "#c07a2c", "#7f8a4c"),
    WEIGHT: ("#9bc9ae", "#e3bd8d", "#bfc39e"),
}
_WORDS = {FORWARD: "forward", BACKWARD: "backward", WEIGHT: "backward of weights"}
_ROW, _GAP, _LEFT, _WIDTH, _AXIS, _HEAD = 26, 6, 58, 1400, 26, 48
_NARROWEST_NUMBER = 15.0  # a bar that is narrower has no room for its micro-batch
WIDTH = _LEFT + _WIDTH + 20  # of a picture


def svg(
    timeline: Timeline, *, title: str, part_of_chunk: Callable[[int], str] = lambda chunk: "language", top: int = 0
) -> str:
    """Return the picture as an element of SVG, `height(timeline)` high, to be placed `top` from above.

    Args:
        timeline: with its events (`simulate(…, keep_events=True)`).
        part_of_chunk: which of `PARTS` the layers of a chunk are.
        top: distance from above.
    """
    assert timeline.events, "the events of this timeline were not kept"
    scale = _WIDTH / timeline.seconds
    drawn = [
        f'<text x="0" y="16" font-size="17" fill="currentColor">{escape(title)}</text>',
        f'<text x="0" y="36">{_time(timeline.seconds)} a step, of which ranks are idle {timeline.bubble:.1%}; numbers '
        f"are micro-batches; {_key(timeline, part_of_chunk)}</text>",
    ]
    for rank in range(len(timeline.busy)):
        drawn.append(
            f'<rect x="{_LEFT}" y="{_y(rank)}" width="{_WIDTH}" height="{_ROW}" rx="3" fill="#8884"/>'
            f'<text x="0" y="{_y(rank) + 17}">rank {rank}</text>'
        )
    timed = (event for event in timeline.events if event.end > event.start)
    drawn += [_bar(event, scale, part_of_chunk(event.step.chunk)) for event in timed]
    for tick, anchor in enumerate(("start", "middle", "middle", "middle", "end")):
        drawn.append(
            f'<text x="{_LEFT + _WIDTH * tick / 4:.1f}" y="{height(timeline) - 6}" text-anchor="{anchor}">'
            f"{_time(timeline.seconds * tick / 4)}</text>"
        )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" y="{top}" width="100%" viewBox="0 0 {WIDTH} {height(timeline)}" '
        'font-family="system-ui, sans-serif" font-size="11" fill="#80858e">\n' + "\n".join(drawn) + "\n</svg>"
    )


def height(timeline: Timeline) -> int:
    """Return the height of a picture whose width is `WIDTH`."""
    return _y(len(timeline.busy)) + _AXIS


def _bar(event: Event, scale: float, part: str) -> str:
    step, x, width = event.step, _LEFT + event.start * scale, (event.end - event.start) * scale
    y = _y(event.rank)
    tip = (
        f"{_WORDS[step.kind]} of micro-batch {step.micro + 1}, chunk {step.chunk} ({part}): "
        f"{_time(event.start)} to {_time(event.end)}"
    )
    number = f'<text x="{x + width / 2:.2f}" y="{y + 17}" text-anchor="middle" fill="#fff">{step.micro + 1}</text>'
    return (
        f'<g><title>{escape(tip)}</title><rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{_ROW}" rx="2" '
        f'fill="{_COLOURS[step.kind][PARTS.index(part)]}"/>{number if width >= _NARROWEST_NUMBER else ""}</g>'
    )


def _key(timeline: Timeline, part_of_chunk: Callable[[int], str]) -> str:
    there = {part_of_chunk(event.step.chunk) for event in timeline.events}
    return ", ".join(
        f'<tspan fill="{colour}">■</tspan> {part} {_WORDS[kind]}'
        for kind in dict.fromkeys(event.step.kind for event in timeline.events)
        for part, colour in zip(PARTS, _COLOURS[kind], strict=True)
        if part in there
    )


def _y(rank: int) -> int:
    return _HEAD + rank * (_ROW + _GAP)


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.1f} ms"
