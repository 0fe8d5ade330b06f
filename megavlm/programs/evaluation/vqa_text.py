"""Normalise answers as VQA's evaluation does (Antol et al. 2015; https://visualqa.org/evaluation.html).

Its steps: drop or split at punctuation, lower-case, write numbers up to ten as digits, drop articles, and restore the
apostrophes of contractions. Its quirks are kept, since scores are compared with published ones.
"""

from __future__ import annotations

import re
from itertools import chain

_PUNCTUATION = ';/[]"{}()=+\\_-><@`,?!'
_COMMA_IN_NUMBER = re.compile(r"\d,\d")
_FULL_STOP = re.compile(r"\.(?!\d)")
_ARTICLES = frozenset(("a", "an", "the"))
_NUMBERS = {
    "none": "0",
    **{
        word: str(number) for number, word in enumerate("zero one two three four five six seven eight nine ten".split())
    },
}
# Contractions that the evaluation knows. It misses some ("we're", "let's", "she's", and all of "I").
_CONTRACTIONS = (
    "ain't aren't can't could've couldn't couldn't've didn't doesn't don't hadn't hadn't've hasn't haven't he'd "
    "he'd've he's how'd how'll how's isn't it'd it'd've it'll ma'am mightn't mightn't've might've mustn't must've "
    "needn't not've o'clock oughtn't 'ow's'at shan't she'd've should've shouldn't shouldn't've somebody'd've "
    "somebody'll somebody's someone'd someone'd've someone'll someone's something'd something'd've something'll "
    "that's there'd there'd've there're there's they'd they'd've they'll they're they've 'twas wasn't we'd've "
    "we've weren't what'll what're what's what've when's where'd where's where've who'd who'd've who'll who's "
    "who've why'll why're why's won't would've wouldn't wouldn't've y'all y'all'll y'all'd've you'd you'd've "
    "you'll you're you've"
).split()


def _without_an_apostrophe(word: str) -> list[str]:
    """Return the spellings that leave out one of the word's apostrophes."""
    return [word[:place] + word[place + 1 :] for place, letter in enumerate(word) if letter == "'"]


_APOSTROPHES = {
    **dict(chain.from_iterable(((wrong, word) for wrong in _without_an_apostrophe(word)) for word in _CONTRACTIONS)),
    "somebody'd": "somebodyd",  # the evaluation has this one the wrong way round
}


def normalised(answer: str) -> str:
    """Return an answer as VQA's evaluation compares it."""
    text = _without_punctuation(" ".join(answer.split()))
    words = [_NUMBERS.get(word, word) for word in text.lower().split()]
    return " ".join(_APOSTROPHES.get(word, word) for word in words if word not in _ARTICLES)


def _without_punctuation(text: str) -> str:
    """Drop punctuation next to a space (all of it, where a comma is inside a number), else put a space in its place."""
    has_number = _COMMA_IN_NUMBER.search(text) is not None
    found = text
    for mark in _PUNCTUATION:
        drop = has_number or f"{mark} " in text or f" {mark}" in text
        found = found.replace(mark, "" if drop else " ")
    return _FULL_STOP.sub("", found)
