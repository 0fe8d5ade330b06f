"""The commonest reason is told with an example and with what helps."""

from __future__ import annotations

from megavlm.inputs.bad_sample import REMEDIES, Reason, Skipped, SkipSummary


def skipped(reason: Reason, number: int, *, partly: bool = False) -> Skipped:
    return Skipped(f"a.json[{number}]", "a", reason, f"detail {number}", partly)


def test_ranks_count_together() -> None:
    one = SkipSummary().add([skipped(Reason.MISSING, 1), skipped(Reason.TOO_LONG, 2), skipped(Reason.TOO_LONG, 3)])
    two = SkipSummary().add([skipped(Reason.MISSING, 4), skipped(Reason.MISSING, 5, partly=True)])
    assert one.message().startswith("2 × too_long, as a.json[2]: detail 2. To mend it, raise --seq-length")
    both = SkipSummary().merged([one, two]).add([skipped(Reason.MISSING, 6)])
    assert both.message().startswith("3 × missing_file, as a.json[1]: detail 1. To mend it, name the folder")
    assert one.counts[Reason.MISSING] == 1


def test_every_reason_has_a_remedy() -> None:
    assert REMEDIES.keys() < set(Reason)
    for reason in Reason:
        assert "To mend it, " in SkipSummary().add([skipped(reason, 0)]).message()
