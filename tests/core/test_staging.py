"""What the host sends for a step, read back as the kernels would read it."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from interactive_infer.core.scheduler import Plan, Row
from interactive_infer.core.shapes import Shape, Shapes
from interactive_infer.core.staging import Layout, PageTables, exact_shape, fill

SLOTS = 8
MAX_LENGTH = 96  # 60 tokens at most below, and two pages of 16 that a sequence has grown by


def row(slot, start, count, pages, *, samples=True, from_device=False, write_from=0, load_history=False):
    known = [1000 * slot + i for i in range(start + count - from_device)]
    sequence = SimpleNamespace(token_ids=known)
    return Row(sequence, start, count, samples, from_device, write_from, pages, slot, load_history, 0)


@st.composite
def plans(draw):
    size = draw(st.sampled_from([1, 4, 16]))
    free = iter(draw(st.permutations(range(1, 400))))
    rows = []
    for slot in draw(st.lists(st.integers(0, SLOTS - 1), unique=True, min_size=1, max_size=SLOTS)):
        start = draw(st.integers(0, 40))
        count = draw(st.integers(1, 20))
        grown = draw(st.integers(0, 2))  # since the row was planned
        pages = [next(free) for _ in range(-(-(start + count) // size) + grown)]
        write_from = draw(st.integers(0, start + count))
        rows.append(
            row(
                slot,
                start,
                count,
                pages,
                samples=draw(st.booleans()),
                from_device=draw(st.booleans()),
                write_from=write_from,
                load_history=True,
            )
        )
    rows.sort(key=lambda r: r.count > 1)
    return size, rows


def card_reads(layout: Layout, buffer: np.ndarray, table: torch.Tensor, leftover):
    """What `GraphRunner` does with the buffer, on a CPU tensor."""
    tensors = layout.tensors(torch.from_numpy(buffer))
    flat = table.view(-1)
    if leftover[0]:
        flat[torch.tensor(leftover[0])] = torch.tensor(leftover[1], dtype=torch.int32)
    flat.index_copy_(0, tensors["update_at"], tensors["update_to"].to(torch.int32))
    return tensors, layout.batch(tensors, table)


@given(plans(), st.booleans())
def test_every_token_gets_its_id_position_and_place(plan, padded):
    size, rows = plan
    exact = exact_shape(Plan(rows, sum(r.count for r in rows), 0, []))
    assert exact.tokens == sum(r.count for r in rows)
    shape = Shapes(SLOTS, 512).choose(exact) if padded else exact
    tables = PageTables(SLOTS, -(-MAX_LENGTH // size))
    layout = Layout(shape, size, SLOTS, tables.width)
    buffer = np.full(layout.size + 5, 77, np.int64)  # left from an earlier step
    leftover = fill(layout, layout.arrays(buffer), rows, tables)
    assert (buffer[layout.size :] == 77).all(), "writes its own part only"
    table = torch.zeros((SLOTS + 1, tables.width), dtype=torch.int32)
    tensors, batch = card_reads(layout, buffer, table, leftover)

    used = torch.zeros(shape.tokens, dtype=torch.bool)
    sampled = []
    for index, r in enumerate(rows):
        if index < exact.decodes:
            at, first = index, index
        else:
            at = shape.decodes + index - exact.decodes
            first = int(batch.query_start[at - shape.decodes])
            assert int(batch.query_start[at - shape.decodes + 1]) - first == r.count
        used[first : first + r.count] = True
        assert int(batch.kv_len[at]) == r.start + r.count
        assert batch.page_table[int(batch.row_slot[at])][: len(r.pages)].tolist() == r.pages
        for j in range(r.count):
            position = r.start + j
            assert int(batch.positions[first + j]) == position
            source = int(tensors["source"][first + j])
            if r.from_device and j == r.count - 1:
                assert source == r.slot
            else:
                assert source == -1
                assert int(tensors["ids"][first + j]) == r.sequence.token_ids[position]
            stored = r.pages[position // size] * size + position % size if position >= r.write_from else position % size
            assert int(batch.write_to[first + j]) == stored
        if r.samples:
            sampled.append(first + r.count - 1)
    assert tensors["logits_at"][: len(sampled)].tolist() == sampled
    # Padding is harmless.
    assert (batch.write_to[~used] == 0).all()
    assert (tensors["source"][~used] == -1).all()
    assert (batch.row_slot[exact.decodes : shape.decodes] == SLOTS).all()
    assert (batch.kv_len[exact.decodes : shape.decodes] == 0).all()
    assert int(batch.query_start[0]) == shape.decodes
    assert (batch.query_start.diff() >= 0).all()


def test_only_new_pages_are_sent():
    tables = PageTables(SLOTS, 16)
    assert tables.updates([row(2, 0, 8, [5, 6], load_history=True)]) == ([32, 33], [5, 6])
    assert tables.updates([row(2, 8, 1, [5, 6, 9])]) == ([34], [9])
    assert tables.updates([row(2, 9, 1, [5, 6, 9])]) == ([], [])
    # Somebody else gets the slot.
    assert tables.updates([row(2, 0, 4, [3], load_history=True)]) == ([32], [3])


def test_updates_that_do_not_fit_come_back():
    rows = [row(1, 200, 1, list(range(1, 52)), load_history=True)]
    layout = Layout(Shape(1, 0, 0, 1), 4, SLOTS, 64)
    tables = PageTables(SLOTS, 64)
    at, to = fill(layout, layout.arrays(np.zeros(layout.size, np.int64)), rows, tables)
    assert len(at) == len(to) == 51 - layout.updates
    assert to == list(range(1 + layout.updates, 52))
