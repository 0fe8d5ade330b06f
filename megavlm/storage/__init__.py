"""Access folders in object stores and other file systems through fsspec; recognise and check the URLs that name them.

A misleading URL, or a URL that would put a secret into files, is refused.
"""

from __future__ import annotations

import re

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_SECRET = re.compile(r"(?<=://)[^/@\s]+@|[?&](?:[A-Za-z0-9._-]+=)\S*")
_CONTAINER_AT = ("abfs", "abfss")  # Azure's URLs name CONTAINER@ACCOUNT


def is_url(text: str) -> bool:
    """Return whether a text is a URL (with a scheme and `://`) and not a path."""
    return bool(_URL.match(text))


def complaint(url: str) -> str | None:
    """Return an error message for a URL that is not supported, with the remedy; None for a valid URL.

    Passwords and signatures are refused, since URLs are written to files and logs.
    """
    scheme, _, rest = url.partition("://")
    host = rest.partition("/")[0]
    of_azure = scheme in _CONTAINER_AT and ":" not in host
    if ("@" in host and not of_azure) or "?" in rest:
        return "has a password or a signature: leave it out, and let the environment have the credentials"
    if "::" in url:
        return "chains file systems: name one"
    if any(part in (".", "..") for part in rest.split("/")):
        return "has . or .. in it: write the whole URL"
    if not rest.strip("/"):
        return "names no bucket and no folder: write one, as in gs://BUCKET/FOLDER"
    return None


def without_secrets(text: str) -> str:
    """Remove possible passwords, signatures and tokens of URLs from a library's message."""
    return _SECRET.sub("", text)
