"""Read users' data sets as `Conversation`s: files by record number, WebDataset tars as a stream."""

from megavlm.data.records.identity import data_identity, difference
from megavlm.data.records.opening import is_stream, name_of, open_records
from megavlm.data.records.streams import open_stream, prepare_stream

__all__ = ["data_identity", "difference", "is_stream", "name_of", "open_records", "open_stream", "prepare_stream"]
