"""Read users' data sets as `Conversation`s: files by record number, WebDataset tars as a stream."""

from megavlm.data.records.containers import Records, is_held_out
from megavlm.data.records.identity import data_identity, difference
from megavlm.data.records.opening import is_stream, name_of, open_records
from megavlm.data.records.tars import cache_of, open_stream, open_tars, prepare_stream

__all__ = [
    "Records",
    "cache_of",
    "data_identity",
    "difference",
    "is_held_out",
    "is_stream",
    "name_of",
    "open_records",
    "open_stream",
    "open_tars",
    "prepare_stream",
]
