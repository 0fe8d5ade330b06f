"""Hugging Face checkpoints, in and out: `table.py` says what a name table is, `families/` has one per architecture."""
