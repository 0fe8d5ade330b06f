"""Folders in object stores and other file systems that fsspec knows, named by URLs."""
