"""Read a page as a browser does: elements must be closed in order."""

from __future__ import annotations

from html.parser import HTMLParser

VOID = ("meta", "br", "img", "wbr")


class Balanced(HTMLParser):
    """Asserts that every element is closed in the order in which it was opened; collects text."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None: ...

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def told(page: str) -> str:
    """Return the text of an HTML page, or of a part of it."""
    reader = Balanced()
    reader.feed(page)
    reader.close()
    assert not reader.open
    return " ".join(" ".join(reader.text).split())
