from __future__ import annotations

import pytest

from interactive_infer.timeline import Phase, Timeline

MS = 1_000_000


@pytest.fixture
def hostile() -> str:
    return "<img src=x onerror=alert(1)> $\\frac{1}$ \u6f22\u5b57 \U0001f9ff\nsecond line"


@pytest.fixture
def made(hostile: str) -> Timeline:
    """29 steps, every tenth with prefill, one on another stream, a hostile span name, a cell, heartbeats."""
    timeline = Timeline(device="CPU device")
    recorder = timeline.recorder
    recorder.runnable(1_000, 2)
    for i in range(1, 30):
        start = i * 10 * MS
        recorder.record(Phase.PLAN, start, start + 100_001, i)
        recorder.record(Phase.LAUNCH, start + 100_001, start + 300_000, i)
        recorder.step(
            start + MS,
            start + 9 * MS,
            step_id=i,
            batch_size=2,
            tokens=64 if i % 10 == 1 else 2,
            prefill_tokens=62 if i % 10 == 1 else 0,
        )
        recorder.record(Phase.AWAIT, start + 300_000, start + 9 * MS + 100_000, i)
        recorder.record(Phase.COMMIT, start + 9 * MS + 100_000, start + 9 * MS + 200_000, i)
        recorder.lag(start + 5 * MS, 123_457 * i)
    recorder.step(310 * MS, 320 * MS, step_id=30, batch_size=1, tokens=1, prefill_tokens=0, graph=True, stream=3)
    recorder.record(Phase.USER, 299 * MS + 200_000, 310 * MS, 0, hostile)
    recorder.record(Phase.CELL, 100 * MS, 320 * MS, 12)
    recorder.runnable(321 * MS, 0)
    return timeline
