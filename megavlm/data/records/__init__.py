"""Random access to the records of users' data sets, each as a `Conversation`."""

from megavlm.data.records.containers import Records, is_held_out
from megavlm.data.records.identity import data_identity, difference
from megavlm.data.records.opening import is_tars, name_of, open_records

__all__ = [
    "Records",
    "data_identity",
    "difference",
    "is_held_out",
    "is_tars",
    "name_of",
    "open_records",
]
