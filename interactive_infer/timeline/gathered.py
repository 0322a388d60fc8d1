"""Many short spans recorded as few."""

from __future__ import annotations

from interactive_infer.timeline.recorder import Phase, Recorder

_EVERY_NS = 5_000_000


class Gathered:
    """Short spans of one phase, recorded as one every 5 ms: as long as they are together, ending with the last of them.

    For what happens once a token and reader: recorded one by one, the spans would cost more than what they measure, and
    push everything else out of the ring. Adding from two threads at once may lose one of the two.
    """

    def __init__(self, recorder: Recorder, phase: Phase) -> None:
        self._recorder = recorder
        self._phase = phase
        self._total = 0
        self._first = 0

    def add(self, start_ns: int, end_ns: int, *, last: bool = False) -> None:
        """One more; `last`: record what there is."""
        if not self._total:
            self._first = start_ns
        self._total += end_ns - start_ns
        if last or end_ns - self._first > _EVERY_NS:
            total, self._total = self._total, 0
            self._recorder.record(self._phase, end_ns - total, end_ns)
