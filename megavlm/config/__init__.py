"""The configuration: `schema` declares it, `cli.parse` and `load` read it, `rules.check` validates it."""

from megavlm.config.layout_rules import launches_in_order, overlapped, sequence_parallel

__all__ = ["launches_in_order", "overlapped", "sequence_parallel"]
