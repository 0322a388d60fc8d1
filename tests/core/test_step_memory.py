"""A step's memory on both sides: what one copy takes to the card, and where kernels find it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from interactive_infer.core.sampling_packed import PackedInputs, PackedKey
from interactive_infer.core.shapes import Shape, Shapes
from interactive_infer.core.staging import Layout
from interactive_infer.core.step_memory import CardMemory, FlightMemory, result_words

SHAPES = Shapes(3, 12).all()
EXACT = [Shape(2, 1, 5, 3), Shape(0, 1, 3, 0), Shape(3, 0, 0, 1)]  # hooked steps are not padded
KEYS = [PackedKey(1), PackedKey(3, all_greedy=True), PackedKey(2, filtered=True, sparse=64), PackedKey(3, logprobs=20)]
SAMPLING_NBYTES = 2048


def layout_of(shape: Shape) -> Layout:
    return Layout(shape, page_size=4, num_slots=3, table_width=5)


@pytest.fixture(scope="module")
def card() -> CardMemory:
    drawn = max(key.output_nbytes for key in KEYS)
    return CardMemory([layout_of(shape) for shape in SHAPES], SAMPLING_NBYTES, drawn, torch.device("cpu"))


@pytest.fixture(scope="module")
def flights(card: CardMemory) -> list[FlightMemory]:
    zeros = torch.zeros
    with pytest.MonkeyPatch.context() as patch:  # only with a card can memory be pinned
        patch.setattr(torch, "zeros", lambda *size, pin_memory, **options: zeros(*size, **options))
        return [FlightMemory(card) for _ in range(3)]


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.sampled_from(SHAPES + EXACT), st.sampled_from([*KEYS, None])),
        min_size=2,
        max_size=6,
    )
)
def test_a_copy_takes_a_steps_own_and_nothing_else(
    card: CardMemory, flights: list[FlightMemory], steps: list[tuple[int, Shape, PackedKey | None]]
) -> None:
    for number, (which, shape, key) in enumerate(steps, start=1):
        flight, layout = flights[which], layout_of(shape)
        flight.arrays(layout)["all"][:] = np.arange(layout.size) + 1000 * number
        sections = flight.sampling.sections(key) if key is not None else {}
        for section in sections.values():
            section[...] = number
        card.bytes.fill_(255)
        flight.send(layout, key)
        inputs = card.inputs(layout)
        assert inputs.tolist() == (np.arange(layout.size) + 1000 * number).tolist()
        assert inputs.data_ptr() % 16 == 0, "what kernels were compiled for"
        assert int(card.reply_to[0]) == flight._result.data_ptr()
        if key is not None:
            found = PackedInputs.views(card.sampling, key)
            assert all((getattr(found, name) == number).all() for name in sections)
        sent = card.bytes[: card.inputs_nbytes] != 255
        first = inputs.storage_offset() * inputs.element_size()
        assert not sent[:first].any()
        assert (card.sampling[key.input_nbytes if key is not None else 0 :] == 255).all()


def test_a_result_lies_where_its_host_reads_it(card: CardMemory, flights: list[FlightMemory]) -> None:
    key, flight = KEYS[-1], flights[0]
    assert result_words(key) * 8 == 16 + key.output_nbytes
    card.drawn[: key.output_nbytes] = torch.arange(key.output_nbytes, dtype=torch.int32).to(torch.uint8)
    card.result[:2] = torch.tensor([5_000, 12_000])
    flight._result[: result_words(key)] = card.result[: result_words(key)]  # as the last kernel does
    assert flight.drawn[: key.output_nbytes].tolist() == card.drawn[: key.output_nbytes].tolist()
    assert flight.took() == 7_000
