"""Masked attention in spans: some consecutive queries with the keys that they may attend to.

A kernel with a mask computes all scores in the mask's rectangle. With spans, the scores of a causal mask are little
more than half of a square, and those of a sliding window grow linearly with the length.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megavlm.arch.image_tokens import tokens_per_grid
from megavlm.arch.kind import FP32
from megavlm.arch.scenario import Scenario
from megavlm.config.derived import masks_all_layers

QUERIES = 512  # per span


@dataclass(frozen=True)
class Span:
    """Consecutive queries and their keys, as indices among the tokens of all sequences."""

    queries: range
    keys: range

    @property
    def scores(self) -> int:
        """Return the number of scores that attention computes."""
        return len(self.queries) * len(self.keys)


def spans_of(bounds: Sequence[int], *, window: int | None, longest: int, step: int = QUERIES) -> Iterator[Span]:
    """Yield the spans of the sequences between `bounds` (0, …, T), in the order of their queries.

    Args:
        window: how many tokens a token attends to at most, itself and those before it; None: all before it.
        longest: tokens of the longest run in which tokens attend to later ones as well; 0 where none do.
        step: queries of a span.
    """
    for first in range(0, bounds[-1], step):
        last = min(first + step, bounds[-1])  # the queries are [first, last)
        begin = bounds[bisect_right(bounds, first) - 1]
        end = bounds[bisect_right(bounds, last - 1)]
        if window is not None:
            begin = max(begin, first - window + 1)
        yield Span(range(first, last), range(begin, min(end, last + max(longest - 1, 0))))


def mask_bytes(scenario: Scenario) -> float:
    """Return the bytes of the attention masks of a micro-batch, which all layers of a chunk share; 0 without masks."""
    return float(sum(span.scores for span in _typical_spans(scenario)) * scenario.bytes_each)


def score_bytes(scenario: Scenario, heads: int) -> float:
    """Return the bytes of attention scores that a backward pass holds at a time where `attention_softcap` bounds them.

    These are tanh, softmax, its gradient and their product, of the largest span, in fp32. Without a bound it is 0.
    """
    if scenario.model.language.attention_softcap is None:
        return 0.0
    largest = max(span.scores for span in _typical_spans(scenario))
    return 4.0 * largest * heads // scenario.dims.row_split.heads * FP32


def _typical_spans(scenario: Scenario) -> Iterator[Span]:
    language, vision, work = scenario.model.language, scenario.model.vision, scenario.work
    side = vision.image_size // vision.patch_size
    longest = tokens_per_grid((side, side), scenario.model.projector) if language.bidirectional_images else 0
    windows = {language.window_size} - {None}
    if masks_all_layers(language) and (language.window_size is None or language.full_attention_layers):
        windows.add(None)
    length = max(1, work.token_squares // max(1, work.tokens))  # tokens of a sample
    if language.bidirectional_prefix:
        longest = length
    tokens = work.tokens * scenario.dims.cp  # masks are of whole rows
    bounds = [*range(0, tokens, length), tokens]
    for window in windows:
        reach = max(window, longest) if language.bidirectional_prefix and window is not None else window
        yield from spans_of(bounds, window=reach, longest=longest)
