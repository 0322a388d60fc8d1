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
    _, decode = (part for part in axes.collections if isinstance(part, PolyCollection))
    extents = [path.get_extents() for path in decode.get_paths()]
    assert [(round(box.x0, 9), round(box.x1, 9)) for box in extents] == [(0, 4), (10, 14), (20, 24)]
    assert axes.get_xlim() == (0, 24)


def test_crowded_lanes_show_shares() -> None:
    timeline = Timeline()
    for i in range(5_000):
        timeline.recorder.step(10_000 * i, 10_000 * i + 5_000, step_id=i, batch_size=1, tokens=1, prefill_tokens=0)
    figure = timeline.figure()
    part = figure.axes[0].collections[0]
    heights = [path.get_extents().height for path in part.get_paths()]
    assert len(heights) == 600
    assert min(heights) > 0.3 * 0.8 and max(heights) < 0.7 * 0.8
    assert any("crowded" in text for text in texts(figure))


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
