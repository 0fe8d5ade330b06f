"""A page has a bar for every pass, is well-formed, and brings all it needs along."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree

from megavlm.arch.schedules import PipelineShape, Timeline, simulate, uniform
from megavlm.programs.gantt import html

SVG = "{http://www.w3.org/2000/svg}"


def step() -> Timeline:
    durations = uniform([1.0] * 4, [2.0] * 4, micro_batches=4)
    return simulate(PipelineShape("interleaved", pp=2, vpp=2, micro_batches=4), durations, keep_events=True)


def test_a_page_has_a_bar_for_every_pass() -> None:
    text = html(step(), title="TP2 <& PP2", part_of_chunk=lambda chunk: ("vision and language", "language")[chunk > 0])
    tree = ElementTree.fromstring(text[text.index("<svg") : text.index("</svg>") + 6])
    titles = [title.text for title in tree.iter(f"{SVG}title")]
    assert len(titles) == 2 * 4 * 4, "forward and backward of four micro-batches through four chunks"
    assert sum("vision and language" in (title or "") for title in titles) == 8
    assert re.findall("</tspan> ([a-z ]+)", text)[:2] == ["language forward", "vision and language forward"]
    assert "TP2 &lt;&amp; PP2" in text
    assert re.findall('text-anchor="(start|end)">([^<]+)', text) == [
        ("start", "0.0 ms"),
        ("end", f"{step().seconds:.2f} s"),
    ]
    assert "the first pass on a GPU takes as long as its host needs" in text
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")
