"""Report the demo's results: a table of accuracies with and without the right image."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from megavlm.data.source import HeldOutPrompt


def exact_match_table(questions: Sequence[HeldOutPrompt], answers: Sequence[str], shuffled: Sequence[str]) -> str:
    """Return a table of the exact-match accuracy of each kind of question, given the answers with the questions' own
    images and with those of other questions (`shuffled`).

    "blind guess" is the score of always giving the kind's most frequent answer. With shuffled images, a model that
    reads its answers off the image falls to about the blind guess.
    """
    header = f"{'question':<14} {'n':>5} {'exact match':>12} {'shuffled images':>16} {'blind guess':>12}"
    rows = [header, "-" * len(header)]
    for kind in dict.fromkeys(question.kind for question in questions):
        places = [place for place, question in enumerate(questions) if question.kind == kind]
        right = [questions[place].reference for place in places]
        scores = [
            sum(given[place] == reference for place, reference in zip(places, right, strict=True)) / len(places)
            for given in (answers, shuffled)
        ]
        blind = max(Counter(right).values()) / len(places)
        rows.append(f"{kind:<14} {len(places):>5} {scores[0]:>12.1%} {scores[1]:>16.1%} {blind:>12.1%}")
    return "\n".join(rows)
