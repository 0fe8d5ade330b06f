"""Any pipeline of a few ranks."""

from __future__ import annotations

from hypothesis import strategies as st

from megavlm.arch.schedules import PipelineShape

SHAPES = st.one_of(
    st.builds(
        PipelineShape,
        schedule=st.sampled_from(["gpipe", "1f1b", "zb-h1"]),
        pp=st.integers(1, 6),
        vpp=st.just(1),
        micro_batches=st.integers(1, 12),
    ),
    st.tuples(st.integers(2, 4), st.integers(2, 3), st.integers(1, 3)).map(
        lambda drawn: PipelineShape("interleaved", drawn[0], drawn[1], drawn[0] * drawn[2])
    ),
)
