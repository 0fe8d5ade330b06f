"""How a reader of other people's data may end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from megavlm.errors import UserError
from megavlm.inputs.bad_sample import BadSample, Reason

LONGEST = 2_000  # characters of a message


def assert_answered(read: Callable[[], Any]) -> Exception | None:
    """Call a reader: it succeeds, or raises UserError or BadSample with one line, which is returned."""
    error = refusal(read)
    if error is not None:
        text = str(error)
        assert len(text.splitlines()) == 1, text[:LONGEST]
        assert len(text) < LONGEST, text[:LONGEST]
    return error


def refusal(read: Callable[[], Any]) -> Exception | None:
    try:
        read()
    except (UserError, BadSample) as error:
        return error
    return None


def reason_of(read: Callable[..., Any], *args: Any, **options: Any) -> Reason:
    """Call a reader; return the reason for which its sample is a bad one."""
    with pytest.raises(BadSample) as raised:
        read(*args, **options)
    return raised.value.reason
