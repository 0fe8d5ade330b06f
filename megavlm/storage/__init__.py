"""Folders in object stores and other file systems that fsspec knows, and how URLs that name them differ from paths.

A URL that would not do what it seems to do, or would put a secret into files, is refused.
"""

from __future__ import annotations

import re

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_SECRET = re.compile(r"(?<=://)[^/@\s]+@|[?&](?:[A-Za-z0-9._-]+=)\S*")


def is_url(text: str) -> bool:
    """Return whether a text names a place by URL, and not by path."""
    return bool(_URL.match(text))


def complaint(url: str) -> str | None:
    """Return what is wrong with a URL and what to do, or None. Whatever follows is written to files and logs."""
    _, _, rest = url.partition("://")
    host = rest.partition("/")[0]
    if "@" in host or "?" in rest:
        return "has a password or a signature: leave it out, and let the environment have the credentials"
    if "::" in url:
        return "chains file systems: name one"
    if any(part in (".", "..") for part in rest.split("/")):
        return "has . or .. in it: write the whole URL"
    if not rest.strip("/"):
        return "names no bucket and no folder: write one, as in gs://BUCKET/FOLDER"
    return None


def without_secrets(text: str) -> str:
    """Return a message of a library without what may be a password, a signature or a token of a URL."""
    return _SECRET.sub("", text)
