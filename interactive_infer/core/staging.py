"""What the host sends to a card for a step: one buffer, one copy.

Everything is int64, which costs a few kilobytes and spares casts on the card.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
from torch import Tensor

from interactive_infer.core.attention.batch import StepBatch
from interactive_infer.core.kv_cache import NULL_PAGE
from interactive_infer.core.scheduler import Plan, Row
from interactive_infer.core.shapes import Shape

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Layout:
    """Where each input of a step of `shape` lies in the buffer. Of the page table it knows the size, `[num_slots + 1,
    table_width]`: padding reads and writes its last row.

    `ids`: token ids, `source`: the slot whose last sampled token is taken instead, -1 for none; `update_at`,
    `update_to`: entries of the flattened page table that change and the pages they change to; `slots`: for each row its
    slot; `logits_at`: the tokens whose logits are wanted, those of the rows that sample.
    """

    shape: Shape
    page_size: int
    num_slots: int
    table_width: int

    @property
    def updates(self) -> int:
        """Page table entries that a step can change within its graph."""
        return self.shape.rows + self.shape.tokens // self.page_size + 1

    @cached_property
    def slices(self) -> dict[str, slice]:
        """The sections' places, in elements."""
        shape = self.shape
        sizes = {
            "ids": shape.tokens,
            "source": shape.tokens,
            "positions": shape.tokens,
            "write_to": shape.tokens,
            "query_start": shape.chunks + 1,
            "kv_len": shape.rows,
            "slots": shape.rows,
            "logits_at": shape.samples,
            "update_at": self.updates,
            "update_to": self.updates,
        }
        slices, start = {}, 0
        for name, size in sizes.items():
            slices[name] = slice(start, start + size)
            start += size
        return slices

    @cached_property
    def size(self) -> int:
        """Elements of the whole."""
        return self.slices["update_to"].stop

    @cached_property
    def padding(self) -> Ints:
        """The inputs of a step of padding alone: it writes to the null page and attends to nothing."""
        inputs = np.zeros(self.size, np.int64)
        inputs[self.slices["source"]] = -1
        inputs[self.slices["query_start"]] = self.shape.decodes
        inputs[self.slices["slots"]] = self.num_slots
        inputs[self.slices["update_at"]] = self.num_slots * self.table_width
        return inputs

    def arrays(self, buffer: Ints) -> dict[str, Ints]:
        """Views of the sections in a host buffer, and of `all` of them."""
        return {"all": buffer[: self.size]} | {name: buffer[place] for name, place in self.slices.items()}

    def tensors(self, buffer: Tensor) -> dict[str, Tensor]:
        """Views of the sections in a device buffer."""
        return {name: buffer[place] for name, place in self.slices.items()}

    def batch(self, tensors: dict[str, Tensor], page_table: Tensor) -> StepBatch:
        """What the kernels read of it."""
        return StepBatch(
            num_decodes=self.shape.decodes,
            positions=tensors["positions"],
            write_to=tensors["write_to"],
            query_start=tensors["query_start"],
            kv_len=tensors["kv_len"],
            row_slot=tensors["slots"],
            page_table=page_table,
            page_size=self.page_size,
        )


class PageTables:
    """The page tables that the card knows, by slot, so that only what is new is sent.

    The card's table is `[num_slots + 1, width]`; the last row is that of padding.
    """

    def __init__(self, num_slots: int, width: int) -> None:
        self.num_slots = num_slots
        self.width = width
        self._sent = [0] * num_slots

    def updates(self, rows: list[Row]) -> tuple[list[int], list[int]]:
        """Flat indices and pages that the card lacks for a step of `rows`; counts them as sent."""
        at: list[int] = []
        to: list[int] = []
        sent, width = self._sent, self.width
        for row in rows:
            slot, pages = row.slot, row.pages
            known = 0 if row.load_history else sent[slot]
            if len(pages) > known:
                at.extend(range(slot * width + known, slot * width + len(pages)))
                to.extend(pages[known:])
            sent[slot] = len(pages)
        return at, to


def exact_shape(plan: Plan) -> Shape:
    """The shape of a step without padding."""
    rows = plan.rows
    decodes = len(rows)
    if plan.num_tokens > decodes:
        decodes = sum(row.count == 1 for row in rows)
    return Shape(decodes, len(rows) - decodes, plan.num_tokens - decodes, sum([row.samples for row in rows]))


def fill(layout: Layout, into: dict[str, Ints], rows: list[Row], tables: PageTables) -> tuple[list[int], list[int]]:
    """Write a step's inputs `into` the arrays of a layout; returns page table updates that did not fit in."""
    shape, size = layout.shape, layout.page_size
    into["all"][:] = layout.padding
    at, to = tables.updates(rows)
    fits = min(len(at), layout.updates)
    if fits:
        into["update_at"][:fits] = at[:fits]
        into["update_to"][:fits] = to[:fits]
    decodes = sum([row.count == 1 for row in rows])
    if decodes:
        _fill_decodes(into, rows[:decodes], size)
    logits_at = [index for index, row in enumerate(rows[:decodes]) if row.samples]
    first = shape.decodes
    for index, row in enumerate(rows[decodes:]):
        end, stop = first + row.count, row.start + row.count
        known = row.sequence.token_ids[row.start : stop]
        into["ids"][first : first + len(known)] = known
        if row.from_device:
            into["source"][end - 1] = row.slot
        position = np.arange(row.start, stop)
        into["positions"][first:end] = position
        pages = np.array(row.pages)[position // size]
        stored = np.where(position >= row.write_from, pages, NULL_PAGE)
        into["write_to"][first:end] = stored * size + position % size
        into["query_start"][index + 1 :] = end
        into["kv_len"][shape.decodes + index] = stop
        into["slots"][shape.decodes + index] = row.slot
        if row.samples:
            logits_at.append(end - 1)
        first = end
    into["logits_at"][: len(logits_at)] = logits_at
    return at[fits:], to[fits:]


def _fill_decodes(into: dict[str, Ints], rows: list[Row], size: int) -> None:
    n = len(rows)
    slots, positions = into["slots"][:n], into["positions"][:n]
    slots[:] = [row.slot for row in rows]
    positions[:] = [row.start for row in rows]
    np.add(positions, 1, out=into["kv_len"][:n])
    if all([row.from_device for row in rows]):
        into["source"][:n] = slots
    else:
        into["source"][:n] = [row.slot if row.from_device else -1 for row in rows]
        into["ids"][:n] = [0 if row.from_device else row.sequence.token_ids[row.start] for row in rows]
    into["write_to"][:n] = [
        (row.pages[row.start // size] if row.start >= row.write_from else NULL_PAGE) * size + row.start % size
        for row in rows
    ]
