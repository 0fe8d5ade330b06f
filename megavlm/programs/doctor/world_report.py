"""Write what a check of all nodes found, as text and as JSON."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict

from megavlm.planner.hardware import Hardware
from megavlm.programs.doctor.formatting import as_lines
from megavlm.programs.doctor.problems import Problem
from megavlm.programs.doctor.world_problems import Survey, expected


def world_text(survey: Survey, found: Sequence[Problem], profile: Hardware | None) -> str:
    """Return a line for each subject, and one for each problem with its remedy."""
    rows = list(_rows(survey, profile))
    width = max(len(name) for name, _ in rows)
    lines = [f"{name:<{width}}  {value}" for name, value in rows]
    return "\n".join([*lines, "", *(as_lines(found) or ["all nodes are alike, and none is slow"])])


def world_json(survey: Survey | None, found: Sequence[Problem]) -> str:
    """Return the same as JSON; without a survey where the check ended before it had one."""
    told = None if survey is None else asdict(survey)
    return json.dumps({"world": told, "problems": [asdict(each) for each in found]}, indent=2)


def _rows(survey: Survey, profile: Hardware | None) -> Iterator[tuple[str, str]]:
    first = survey.facts[0]
    yield "nodes", f"{len(survey.names)}: {', '.join(survey.names[:8])}{' …' if len(survey.names) > 8 else ''}"
    yield "ranks", str(sum(map(len, survey.ranks)))
    for fact in ("torch", "NCCL", "driver", "GPUs", "adapters"):
        if fact in first:
            yield fact, first[fact]
    if len(survey.clocks) > 1:
        widest = max(survey.clocks, key=lambda clock: abs(clock.ahead))
        yield "clocks", f"at most {abs(widest.ahead) * 1e3:.1f} ms apart (± {widest.within * 1e3:.1f} ms)"
    for what in dict.fromkeys(key for rates in survey.rates.values() for key in rates):
        values = [rates[what] for rates in survey.rates.values()]
        yield what, f"{statistics.median(values):.3g}, slowest {min(values):.3g}, fastest {max(values):.3g}"
    for what, kind in dict.fromkeys((each.what, each.kind) for each in survey.bandwidths):
        same = [each for each in survey.bandwidths if (each.what, each.kind) == (what, kind)]
        rates = [each.value / 1e9 for each in same]
        promised = "" if profile is None else f", the profile has {expected(same[0], survey, profile) / 1e9:.3g}"
        spread = f"{rates[0]:.3g}" if len(rates) == 1 else f"{min(rates):.3g} to {max(rates):.3g} in {len(rates)}"
        yield f"{what}, {kind}", f"{spread} GB/s per rank{promised}"
