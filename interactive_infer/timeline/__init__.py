"""Was the device busy, and if not, why: a recorder, what follows from its records, a figure and a trace file.

Works without an engine too: `Timeline()` stands alone for training loops or other device work.
"""

from __future__ import annotations

from interactive_infer.timeline.analysis import Bubble
from interactive_infer.timeline.recorder import Phase, Recorder, Recording
from interactive_infer.timeline.summary import Summary
from interactive_infer.timeline.timeline import Timeline

__all__ = ["Bubble", "Phase", "Recorder", "Recording", "Summary", "Timeline"]
