"""What each data set contributes, for `--dry-run`."""

from __future__ import annotations

from megavlm.config.resolve import data_kind
from megavlm.config.schema import Config
from megavlm.data.order import BLOCK, apportioned
from megavlm.data.records import is_stream, name_of, open_records


def table(config: Config) -> str:
    """A line for each data set: its records, and its share of the samples. Empty for data that is computed.

    Raises UserError for a data set that cannot be read.
    """
    if data_kind(config) != "files":
        return ""
    sources = config.data.datasets
    counts = apportioned([source.weight for source in sources], BLOCK)
    width = max(len("data"), *(len(name_of(source)) for source in sources))
    lines = [f"{'data':{width}}  {'records':>12}  share of samples"]
    for source, count in zip(sources, counts, strict=True):
        records = "tars" if is_stream(source) else f"{len(open_records(source)):,}"
        lines.append(f"{name_of(source):{width}}  {records:>12}  {count / BLOCK:7.1%}")
    return "\n".join(lines)
