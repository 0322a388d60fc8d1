from __future__ import annotations

import gc
import sys
import weakref

import pytest

from interactive_infer.errors import InvalidRequestError
from interactive_infer.timeline import Phase, Timeline

matplotlib = pytest.importorskip("matplotlib")


def texts(figure: object) -> list[str]:
    from matplotlib.text import Text

    return [text.get_text() for text in figure.findobj(Text) if text.get_text()]  # type: ignore[attr-defined]


def stairs(axes: object) -> list[object]:
    """Of the lanes drawn by pixels, each part's heights: 0 to 1 of the lane's."""
    from matplotlib.patches import StepPatch

    parts = [patch.get_data() for patch in axes.patches if isinstance(patch, StepPatch)]  # type: ignore[attr-defined]
    return [(bottom - tops) / (2 * (0.4 if bottom < 0.5 else 0.34)) for tops, _, bottom in parts]


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_it_shows_lanes_title_and_footnote(made: Timeline, theme: str) -> None:
    timeline = made
    figure = timeline.figure(theme=theme)
    assert figure._repr_png_().startswith(b"\x89PNG")
    shown = texts(figure)
    assert {"stream 0", "stream 3", "host work", "plan", "launch", "commit", "awaiting", "user cells"} <= set(shown)
    assert "detokenize" not in shown  # nothing there
    assert any(text.startswith("CPU device busy") for text in shown)
    assert any("upper bound" in text and "Window 0.32" in text for text in shown)
    assert any(text.startswith("loop lag") for text in shown)
    assert any("ms" in text and "<img" in text for text in shown)


def test_boxes_are_where_the_spans_are() -> None:
    from matplotlib.collections import PolyCollection

    timeline = Timeline()
    for i in range(3):
        start = 1_000_000 * (10 + 10 * i)
        timeline.recorder.step(start, start + 4_000_000, step_id=i, batch_size=1, tokens=1, prefill_tokens=0)
    (axes,) = timeline.figure().axes
    bubbles, _, decode = (part for part in axes.collections if isinstance(part, PolyCollection))
    extents = [path.get_extents() for path in decode.get_paths()]
    assert [(round(box.x0, 9), round(box.x1, 9)) for box in extents] == [(0, 4), (10, 14), (20, 24)]
    assert len(bubbles.get_paths()) == 1  # behind the steps, from the first to the last
    assert axes.get_xlim() == (0, 24)


def test_crowded_lanes_show_shares() -> None:
    timeline = Timeline()
    for i in range(5_000):
        timeline.recorder.step(10_000 * i, 10_000 * i + 5_000, step_id=i, batch_size=1, tokens=1, prefill_tokens=0)
    figure = timeline.figure()
    _, _, decode = stairs(figure.axes[0])
    assert len(decode) == 900
    assert decode.min() > 0.3 and decode.max() < 0.7
    assert any("narrower than a pixel" in text for text in texts(figure))


def test_what_is_narrower_than_a_pixel_takes_no_more_ink_than_time() -> None:
    """As many lines as the lane has pixels to the third would look like half of the time."""
    timeline = Timeline()
    for i in range(300):
        start = 30_000_000 * i
        timeline.recorder.step(start, start + 29_000_000, step_id=i, batch_size=1, tokens=1, prefill_tokens=0)
        timeline.recorder.record(Phase.PLAN, start + 28_000_000, start + 29_500_000, i)  # 5 %, two thirds of it hidden
    figure = timeline.figure()
    plan, hidden = stairs(figure.axes[0])[-2:]
    assert plan.mean() == pytest.approx(0.05, abs=0.02)
    assert hidden.mean() == pytest.approx(plan.mean() * 2 / 3, rel=0.1)
    assert "5.0 %" in texts(figure)


def test_a_held_loop_is_no_awaiting() -> None:
    timeline = Timeline()
    recorder = timeline.recorder
    recorder.step(0, 100_000_000, step_id=1, batch_size=1, tokens=1, prefill_tokens=0)
    recorder.record(Phase.AWAIT, 0, 100_000_000, 1)
    recorder.lag(90_000_000, 60_000_000)
    shown = texts(timeline.figure())
    assert {"awaiting", "loop late", "40.0 %", "60.0 %"} <= set(shown)


def test_labels_stay_inside(made: Timeline) -> None:
    timeline = Timeline()
    for i in range(100):
        start = 10_000_000 * i
        timeline.recorder.step(
            start, start + 9_500_000 - 200_000 * (i > 96), step_id=i, batch_size=1, tokens=1, prefill_tokens=0
        )
    for figure in (timeline.figure(), made.figure()):
        axes = figure.axes[0]
        frame = axes.get_window_extent()
        labels = [text for text in axes.texts if " ms " in text.get_text()]
        assert labels
        for label in labels:
            box = label.get_window_extent()
            assert frame.x0 <= box.x0 and box.x1 <= frame.x1
        right = max(text.get_window_extent().x1 for text in axes.texts)
        assert right <= figure.bbox.x1


def test_hostile_names_are_drawn_as_they_are_without_warnings(hostile: str, made: Timeline) -> None:
    figure = made.figure()
    figure._repr_png_()
    assert not any("\n" in text and "second" in text for text in texts(figure) if "busy" not in text)
    title = next(text for text in texts(figure) if "busy" in text)
    assert "$\\frac{1}$" in title.replace("\n", " ") and "\U0001f9ff" not in title
    assert "\U0001f9ff" in hostile


def test_nothing_recorded_and_host_only() -> None:
    empty = Timeline()
    assert empty.figure()._repr_png_()
    assert "device: nothing recorded" in texts(empty.figure())
    empty.recorder.record(Phase.LOAD, 5, 900)
    assert "load" in texts(empty.figure())


def test_an_unknown_theme_is_answered(made: Timeline) -> None:
    with pytest.raises(InvalidRequestError, match="theme"):
        made.figure(theme="pink")


def test_it_touches_nothing_global(made: Timeline) -> None:
    figure = made.figure()
    pyplot = sys.modules.get("matplotlib.pyplot")
    assert pyplot is None or not pyplot.get_fignums()
    gone = weakref.ref(figure)
    del figure
    gc.collect()
    assert gone() is None


def test_a_notebook_shows_it_once_with_and_without_pyplots_formatter(made: Timeline) -> None:
    IPython = pytest.importorskip("IPython.core.interactiveshell")
    from IPython.core.pylabtools import select_figure_formats

    shell = IPython.InteractiveShell()
    figure = made.figure()
    data, _ = shell.display_formatter.format(figure)
    assert set(data) == {"image/png", "text/plain"}
    select_figure_formats(shell, {"png"})  # what %matplotlib inline does
    data, _ = shell.display_formatter.format(figure)
    assert set(data) == {"image/png", "text/plain"}


def test_svg(made: Timeline, tmp_path: object) -> None:
    made.figure().savefig(f"{tmp_path}/t.svg")
