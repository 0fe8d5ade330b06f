"""Messages are lines that a terminal shows and does not obey."""

from __future__ import annotations

import pickle

from megavlm.errors import StoreLost, UserError
from megavlm.inputs.bad_sample import BadSample, Reason, Skipped, SkipSummary

NAME = "a\x1b]0;title\x07\x9b2J\u202eb\udcff\nfinished\u2028×.json"
SHOWN = r"a\x1b]0;title\x07\x9b2J\u202eb\udcff finished ×.json"


def test_a_name_from_elsewhere_is_printed_and_not_obeyed() -> None:
    for error in (UserError(f"{NAME} is damaged"), StoreLost(f"{NAME} is damaged")):
        assert str(error) == str(pickle.loads(pickle.dumps(error))) == f"{SHOWN} is damaged"
    bad = BadSample(Reason.CORRUPT, NAME)
    assert (bad.detail, str(bad)) == (SHOWN, f"corrupt: {SHOWN}")
    assert (
        SkipSummary()
        .add([Skipped(NAME, NAME, Reason.CORRUPT, "x")])
        .message()
        .startswith(f"1 × corrupt, as {SHOWN}: x")
    )


def test_a_list_keeps_its_lines() -> None:
    assert str(UserError(f"two do not fit\n  a\n  {NAME}")) == f"two do not fit\n  a\n  {SHOWN}"
