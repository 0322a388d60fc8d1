"""Several engines at the same time: what each one's timeline should know of the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from interactive_infer.timeline.analysis import HOST_WORK, devices_of
from interactive_infer.timeline.bubbles import WORDS
from interactive_infer.timeline.recorder import Phase, Work
from interactive_infer.timeline.recording import WORK, Recording


def beside(recordings: Mapping[str, Recording]) -> dict[str, Recording]:
    """Each recording with what the others did: their steps on its devices as work of the kind OTHER, their work on the
    host as spans of the phase OTHER, by their names.

    Then a device that works for one engine is not idle for another, and a bubble can be put down to another engine.
    Each is as complete, and its clock as exact, as the worst of them: what is missing of one is missing in all.
    """
    return {
        name: _joined(recording, {other: theirs for other, theirs in recordings.items() if other != name})
        for name, recording in recordings.items()
    }


def _joined(recording: Recording, others: Mapping[str, Recording]) -> Recording:
    mine = devices_of(recording)
    work, work_names = [recording.work], [recording.work_names]
    spans, names = [recording.spans], [recording.names]
    for other, theirs in others.items():
        steps = theirs.steps[np.isin(theirs.steps["device"], mine)]
        rows = np.zeros(len(steps), WORK)
        for column in ("start", "end", "stream", "device"):
            rows[column] = steps[column]
        rows["kind"] = Work.OTHER
        work.append(rows)
        work_names.append(np.full(len(rows), other, np.object_))
        on_host = theirs.spans[np.isin(theirs.spans["phase"], (*HOST_WORK, Phase.LOAD, Phase.CAPTURE))]
        words = np.array([f"{other}: {WORDS.get(phase, '')}" for phase in Phase], np.object_)[on_host["phase"]]
        on_host["phase"], on_host["ref"] = Phase.OTHER, 0
        spans.append(on_host)
        names.append(words)
    return replace(
        recording,
        work=np.concatenate(work),
        work_names=np.concatenate(work_names),
        spans=np.concatenate(spans),
        names=np.concatenate(names),
        complete_from=max(each.complete_from for each in (recording, *others.values())),
        clock_error_ns=max(each.clock_error_ns for each in (recording, *others.values())),
    )
