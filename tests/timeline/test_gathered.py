"""Short spans become few, and none of their time is lost."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from interactive_infer.timeline.gathered import Gathered
from interactive_infer.timeline.recorder import Phase, Recorder


@given(st.lists(st.tuples(st.integers(0, 3_000_000), st.integers(1, 50_000)), min_size=1, max_size=200))
def test_time_is_kept_and_spans_are_few(steps):
    recorder = Recorder()
    gathered, now, total = Gathered(recorder, Phase.DETOKENIZE), 10_000_000, 0
    for index, (gap, took) in enumerate(steps):
        now += gap
        gathered.add(now, now + took, last=index == len(steps) - 1)
        now += took
        total += took
    spans = recorder.snapshot().spans
    assert int((spans["end"] - spans["start"]).sum()) == total
    assert len(spans) <= (now - 10_000_000) // 5_000_000 + 1
    assert (np.diff(spans["end"]) > 0).all()
    assert (spans["start"][1:] >= spans["end"][:-1]).all(), "they do not overlap"
    assert spans["end"][-1] == now
