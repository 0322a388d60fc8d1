from __future__ import annotations

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from interactive_infer.errors import InvalidRequestError
from interactive_infer.timeline import Phase, Recorder, Timeline, Work
from interactive_infer.timeline.trace import from_dict, to_dict


def test_a_timeline_stands_alone() -> None:
    timeline = Timeline()
    assert timeline.summary().busy is None
    assert "nothing recorded" in str(timeline.summary())
    with timeline.span("my work"):
        pass
    assert timeline.recorder.snapshot().names.tolist() == ["my work"]
    assert timeline.summary().steps == 0
    timeline.clear()
    assert len(timeline.recorder.snapshot().spans) == 0
    for name in ("", 3):
        with pytest.raises(InvalidRequestError, match="name"):
            timeline.span(name)  # type: ignore[arg-type]


def test_a_summary_reads_and_is_escaped(hostile: str, made: Timeline) -> None:
    summary = made.summary()
    assert summary.largest_bubble is not None and summary.largest_bubble.cause == hostile
    assert "CPU device busy" in str(summary) and "upper bound" in str(summary)
    shown = summary._repr_html_()
    assert "<img" not in shown and "&lt;img" in shown
    # Else a front end sets what is between the name's dollar signs as mathematics.
    assert shown.startswith('<table class="mathjax_ignore tex2jax_ignore">') and "$\\frac{1}$" in shown
    assert "bubbles=" not in repr(summary)  # thousands of them


def test_a_saved_timeline_loads_equal(made: Timeline, tmp_path: Path) -> None:
    timeline = made
    path = tmp_path / "trace.json"
    timeline.save(path)
    again = Timeline.load(str(path))
    assert again.recorder.snapshot() == timeline.recorder.snapshot()
    assert again.summary() == timeline.summary()
    assert (again.device, again.source) == (timeline.device, timeline.source)
    assert [file.name for file in tmp_path.iterdir()] == ["trace.json"]


def test_what_was_dropped_is_known_after_loading(tmp_path: Path) -> None:
    timeline = Timeline(Recorder(spans=3, steps=2))
    for i in range(9):
        timeline.recorder.record(Phase.PLAN, i, i + 1, i)
    timeline.save(tmp_path / "t.json")
    held = Timeline.load(tmp_path / "t.json").recorder.snapshot()
    assert held == timeline.recorder.snapshot() and held.complete_from == 7


big = st.integers(2**52, 2**52 + 2**47)  # on a clock far from zero, up to 39 hours apart


@given(
    st.lists(st.tuples(st.sampled_from(Phase), big, big, st.integers(-5, 2**40), st.text())),
    st.lists(st.tuples(big, big)),
    st.lists(st.tuples(big, st.integers(0, 2**40))),
)
def test_any_recording_survives_the_trace(
    spans: list[tuple[Phase, int, int, int, str]], steps: list[tuple[int, int]], lags: list[tuple[int, int]]
) -> None:
    recorder = Recorder(spans=64, steps=64, lags=64, edges=64)
    for phase, a, b, ref, name in spans:
        recorder.record(phase, min(a, b), max(a, b), ref, name or None)
    for a, b in steps:
        recorder.step(
            min(a, b),
            max(a, b),
            step_id=a,
            batch_size=1,
            tokens=9,
            prefill_tokens=b % 9,
            stream=a % 3,
            device=b % 2 - 1,
            generations=[a % 5, b % 7][: a % 3],
            drawn=[b % 9 - 1, a][: a % 3],
        )
        recorder.work(min(a, b), max(a, b), f"{a}", kind=Work(a % 3), stream=b % 4, device=a % 2)
        recorder.asked(a, b, a % 4)
        recorder.profiled(min(a, b), max(a, b) + 1)
    for moment, late in lags:
        recorder.lag(moment, late)
        recorder.runnable(moment, late)
    held = recorder.snapshot()
    assert from_dict(json.loads(json.dumps(to_dict(held)))) == held


def test_the_trace_is_what_viewers_expect(made: Timeline) -> None:
    held = made.recorder.snapshot()
    data = to_dict(held, device="CPU device")
    events = data["traceEvents"]
    complete = [event for event in events if event["ph"] == "X"]
    assert len(complete) == len(held.spans) + len(held.steps)
    assert all(event["ts"] >= 0 and event["dur"] >= 0 for event in complete)
    for phase in set(held.spans["phase"].tolist()):
        mine = held.spans[held.spans["phase"] == phase]
        shown = [event for event in complete if event["args"].get("phase") == Phase(phase).name.lower()]
        assert len(shown) == len(mine)
        assert sum(event["dur"] for event in shown) * 1_000 == pytest.approx(int((mine["end"] - mine["start"]).sum()))
    counters = [event for event in events if event["ph"] == "C"]
    assert len(counters) == len(held.lags) + len(held.runnable)
    device = [event for event in complete if event["cat"] == "device"]
    total = (held.steps["end"] - held.steps["start"]).sum()
    assert sum(event["dur"] for event in device) * 1_000 == pytest.approx(int(total))
    assert sum(event["name"].startswith("prefill") for event in device) == 3
    titles = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert {"CPU device", "CPU device, stream 3", "host: plan", "host: await", "host: cell"} <= set(titles.values())
    assert {event["tid"] for event in complete} == set(titles)
    assert {event["ph"] for event in events} == {"X", "M", "C", "s", "f"}
    tracks: dict[int, list[tuple[float, float]]] = {}
    for event in complete:
        tracks.setdefault(event["tid"], []).append((event["ts"], event["ts"] + event["dur"]))
    for spans in tracks.values():
        spans.sort()
        assert all(end <= start + 1e-3 for (_, end), (start, _) in pairwise(spans))


def test_the_trace_is_in_the_trace_event_format(made: Timeline) -> None:
    """What "Trace Event Format" asks of each kind of event, and that each launch flows into its step."""
    recorder = made.recorder
    recorder.asked(500, 4, 0)
    recorder.work(20_000, 30_000, "mine", stream=2)
    events = json.loads(json.dumps(to_dict(recorder.snapshot(), device="GPU")))["traceEvents"]
    needed = {
        "X": {"name", "cat", "ts", "dur", "pid", "tid", "args"},
        "C": {"name", "ts", "pid", "args"},
        "i": {"name", "ts", "pid", "tid", "s"},
        "s": {"name", "cat", "id", "ts", "pid", "tid"},
        "f": {"name", "cat", "id", "ts", "pid", "tid", "bp"},
        "M": {"name", "pid", "args"},
    }
    for event in events:
        assert needed[event["ph"]] <= set(event), event
        assert isinstance(event["pid"], int) and isinstance(event.get("ts", 0.0), int | float)
        assert event["ph"] != "C" or all(isinstance(value, int | float) for value in event["args"].values())
    assert {event["ph"] for event in events} == set(needed)
    slices: dict[tuple[int, int], list[dict]] = {}
    for event in events:
        if event["ph"] == "X":
            slices.setdefault((event["pid"], event["tid"]), []).append(event)

    def around(flow: dict) -> str:
        """The slice that a viewer binds the flow's end to."""
        on_track = slices[flow["pid"], flow["tid"]]
        return next(s["name"] for s in on_track if s["ts"] <= flow["ts"] <= s["ts"] + s["dur"])

    starts = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    assert set(starts) == set(ends) == set(range(1, 30))
    for number in starts:
        assert around(starts[number]) == "launch" and around(ends[number]).endswith(f"step {number}")
        assert starts[number]["ts"] <= ends[number]["ts"]
    named = {(e["pid"], e["tid"]) for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    assert set(slices) <= named
    processes = {e["pid"]: e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "process_name"}
    assert set(processes.values()) == {"host", "GPU 0"}


def test_overlapping_spans_of_a_phase_get_tracks_of_their_own() -> None:
    recorder = Recorder()
    for start, end in ((0, 10), (5, 15), (10, 20), (16, 20)):
        recorder.record(Phase.AWAIT, start, end)
    events = [event for event in to_dict(recorder.snapshot())["traceEvents"] if event["ph"] == "X"]
    first, second = sorted({event["tid"] for event in events})
    assert [event["tid"] for event in events] == [first, second, first, second]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "not json",
        "[]",
        "{}",
        '{"otherData": 3}',
        '{"traceEvents": []}',
        '{"otherData": {"format": "interactive_infer timeline 2"}}',
        '{"otherData": {"format": "interactive_infer timeline 2", "origin_ns": 0, "complete_from_ns": 0, '
        '"device": "d", "source": "s"}, "traceEvents": [{"ph": "X", "ts": "x"}]}',
    ],
)
def test_a_file_that_is_no_saved_timeline_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(InvalidRequestError, match="path"):
        Timeline.load(path)


def test_other_bad_files(made: Timeline, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Timeline.load(tmp_path / "none.json")
    (tmp_path / "bin").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InvalidRequestError, match="path"):
        Timeline.load(tmp_path / "bin")
    with pytest.raises(FileNotFoundError):
        made.save(tmp_path / "no folder" / "t.json")


def test_show_prints_outside_of_ipython(
    made: Timeline, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    made.show()
    assert "CPU device busy" in capsys.readouterr().out


def test_a_figure_without_matplotlib_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "import interactive_infer, interactive_infer.timeline as t\n"
        "try: t.Timeline().figure()\n"
        "except interactive_infer.MissingPackageError as error: assert '[notebook] extra' in str(error), error\n"
        "else: raise AssertionError('no error')"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_importing_draws_in_nothing_heavy() -> None:
    code = (
        "import sys, interactive_infer.timeline as t; t.Timeline().summary(); "
        "heavy = {'matplotlib', 'IPython', 'ipywidgets', 'interactive_infer.notebook'} & set(sys.modules); "
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
