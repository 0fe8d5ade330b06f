"""What a run is: `schema` declares it, `cli.parse` and `load` read it, `rules.check` refuses what cannot work."""

from megavlm.config.layout_rules import launches_in_order, overlapped, sequence_parallel

__all__ = ["launches_in_order", "overlapped", "sequence_parallel"]
