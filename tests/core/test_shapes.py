"""Which graph a step is replayed from. (Capture and replay need a card: test_gpu.py.)"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from interactive_infer.core.shapes import Shape, Shapes


@st.composite
def steps(draw):
    max_batch_size = draw(st.integers(1, 3000))
    max_step_tokens = draw(st.integers(1, 20_000))
    decodes = draw(st.integers(0, min(max_batch_size, max_step_tokens)))
    room, rows = max_step_tokens - decodes, max_batch_size - decodes
    chunks = draw(st.integers(0, min(rows, room // 2))) if rows else 0
    if not chunks and not decodes:
        decodes = 1
    chunk_tokens = draw(st.integers(2 * chunks, room)) if chunks else 0
    samples = draw(st.integers(0, decodes + chunks))
    return Shapes(max_batch_size, max_step_tokens), Shape(decodes, chunks, chunk_tokens, samples)


@given(steps())
def test_every_step_fits_a_captured_shape(case):
    shapes, exact = case
    chosen = shapes.choose(exact)
    assert chosen in shapes.all()
    assert chosen.decodes >= exact.decodes
    assert chosen.chunks >= exact.chunks
    assert chosen.chunk_tokens >= exact.chunk_tokens
    assert chosen.samples >= exact.samples
    assert shapes.rows(exact.samples or 1) >= exact.samples


@given(steps())
def test_a_step_of_decodes_has_no_chunk_tokens(case):
    shapes, exact = case
    if not exact.chunks:
        chosen = shapes.choose(exact)
        assert (chosen.chunks, chosen.chunk_tokens) == (0, 0)
        assert chosen.decodes <= max(2 * exact.decodes, 1), "padding at most doubles a batch"


@given(steps())
def test_a_step_with_chunks_is_padded_to_a_few_times_its_tokens_at_most(case):
    shapes, exact = case
    if exact.chunks:
        chosen = shapes.choose(exact)
        assert chosen.chunk_tokens <= max(64, (4 if exact.chunk_tokens <= 256 else 2) * exact.chunk_tokens)
        assert chosen.decodes <= max(8, 8 * exact.decodes)


@pytest.mark.parametrize("options", [(1, 1), (64, 512), (256, 2048), (1000, 10_000)])
def test_shapes_come_largest_first_and_once(options):
    shapes = Shapes(*options).all()
    assert len(set(shapes)) == len(shapes)
    tokens = [shape.tokens for shape in shapes]
    assert tokens == sorted(tokens, reverse=True)
    assert tokens[0] == sum(options)
    decodes = [shape.decodes for shape in shapes if not shape.chunks]
    assert decodes[0] == options[0]
    assert decodes[-1] == 1
