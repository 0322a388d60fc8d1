from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from interactive_infer.core.spent import Spent

DOINGS = ("queue", "prefill", "decode", "paused", "preempted")


@given(st.lists(st.tuples(st.sampled_from(DOINGS), st.integers(0, 100))), st.integers(0, 100))
def test_the_parts_are_what_was_done_and_add_up(moves: list[tuple[str, int]], last: int) -> None:
    spent, now = Spent(1_000), 1_000
    expected = dict.fromkeys(DOINGS, 0)
    doing = "queue"
    for then, ns in [*moves, (None, last)]:
        now += ns
        expected[doing] += ns
        spent.go(then, now)  # type: ignore[arg-type]
        doing = then or doing
    assert spent.now() == spent.ns == expected
    assert sum(spent.ns.values()) == now - 1_000
    spent.go("decode", now + 50)
    assert spent.now() == expected, "it has ended for good"


def test_what_goes_on_counts_up_to_now() -> None:
    spent = Spent(0)
    first, second = spent.now()["queue"], spent.now()["queue"]
    assert 0 < first <= second
