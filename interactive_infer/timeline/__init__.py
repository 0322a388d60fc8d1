"""Was the device busy, and if not, why: a recorder, what follows from its records, a figure and a trace file.

Works without an engine too: `Timeline()` stands alone for training loops or other device work.
"""

from __future__ import annotations

from interactive_infer.timeline.bubbles import Bubble
from interactive_infer.timeline.recorder import Phase, Recorder, Work
from interactive_infer.timeline.recording import Recording
from interactive_infer.timeline.steps import Step
from interactive_infer.timeline.summary import Distribution, Summary
from interactive_infer.timeline.timeline import Timeline, compare, together

__all__ = [
    "Bubble",
    "Distribution",
    "Phase",
    "Recorder",
    "Recording",
    "Step",
    "Summary",
    "Timeline",
    "Work",
    "compare",
    "together",
]
