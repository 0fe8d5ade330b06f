"""What a run is: `schema` declares it, `cli.parse` and `load` read it, `rules.check` refuses what cannot work."""

from megavlm.config.layout_rules import overlapped, sequence_parallel

__all__ = ["overlapped", "sequence_parallel"]
