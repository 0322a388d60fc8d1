from __future__ import annotations

import gc
import sys
import weakref
from itertools import combinations
from types import SimpleNamespace

import numpy as np
import pytest
from matplotlib.text import Text

from interactive_infer.errors import InvalidRequestError
from interactive_infer.timeline import Phase, Timeline, Work
from interactive_infer.timeline import figure as figure_module
from interactive_infer.timeline.figure import fitting
from interactive_infer.timeline.lanes import THEMES


def texts(figure: object) -> list[str]:
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
    axes = figure.axes[0]
    _, _, decode = stairs(axes)
    assert len(decode) == round(figure.bbox.width * axes.get_position().width), "one a pixel"
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


def test_the_latest_beat_of_each_pixel_is_drawn() -> None:
    from matplotlib.collections import LineCollection

    timeline = Timeline()
    timeline.recorder.step(0, 10_000_000_000, step_id=1, batch_size=1, tokens=1, prefill_tokens=0)
    for beat in range(10_000):
        timeline.recorder.lag(beat * 1_000_000, 7_000_000 if beat == 5_005 else 1_000 * (beat % 10))
    figure = timeline.figure()
    lag = figure.axes[1]
    (stems,) = (each for each in lag.collections if isinstance(each, LineCollection))
    tops = [path.vertices[1, 1] for path in stems.get_paths()]
    assert len(tops) <= round(figure.bbox.width * lag.get_position().width) + 1
    assert max(tops) == 7.0 and min(tops) == pytest.approx(0.009), "of every pixel's ten or more beats one is 9 µs late"


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
    made.clock = SimpleNamespace(error_ns=12_000)  # that makes the footnote its longest
    for figure in (timeline.figure(), made.figure()):
        figure.draw_without_rendering()  # places what stands along the axes
        for axes in figure.axes:
            for text in (*figure.texts, *axes.texts, *axes.get_yticklabels(), axes.xaxis.label):
                box = text.get_window_extent()
                assert min(box.x0, box.y0) >= 0 and box.x1 <= figure.bbox.x1 and box.y1 <= figure.bbox.y1, text
        axes = figure.axes[0]
        frame = axes.get_window_extent()
        labels = [text for text in axes.texts if " ms " in text.get_text()]
        assert labels
        for label in labels:
            box = label.get_window_extent()
            assert frame.x0 <= box.x0 and box.x1 <= frame.x1
        boxes = [label.get_window_extent() for label in labels]
        assert not any(a.overlaps(b) for a, b in combinations(boxes, 2))


def test_a_label_is_cut_off_where_it_would_be_too_wide() -> None:
    assert fitting("a few words", 5.0, 8.5) == "a few words"
    cut = fitting("x" * 500, 1.0, 8.5)
    assert cut.startswith("xxx") and cut.endswith("…") and 5 < len(cut) < 40


def test_the_users_spans_have_lanes_by_name_and_cells_their_numbers() -> None:
    timeline = Timeline()
    recorder = timeline.recorder
    recorder.step(0, 100_000_000, step_id=1, batch_size=1, tokens=1, prefill_tokens=0)
    for number, name in enumerate(("forward", "backward", "data", "logging", "else")):
        recorder.record(Phase.USER, 0, (50 - 10 * number) * 1_000_000, name=name)
    recorder.record(Phase.CELL, 0, 60_000_000, 7)
    recorder.record(Phase.CELL, 70_000_000, 70_100_000, 8)
    shown = texts(timeline.figure())
    assert {"forward", "backward", "data", "user spans", "user cells", "[7]"} <= set(shown)
    assert not {"logging", "else", "[8]"} & set(shown)
    assert "50.0 %" in shown and "20.0 %" in shown


def test_steps_without_a_gap_are_told_apart_where_there_is_room() -> None:
    from matplotlib.collections import LineCollection

    for count, drawn in ((20, 19), (500, 0)):
        timeline = Timeline()
        for number in range(count):
            start = 1_000_000 * number
            timeline.recorder.step(start, start + 1_000_000, step_id=number, batch_size=1, tokens=1, prefill_tokens=0)
        lanes = timeline.figure().axes[0]
        lines = [path for each in lanes.collections if isinstance(each, LineCollection) for path in each.get_paths()]
        assert len(lines) == drawn


def test_where_nothing_could_run_the_device_says_so() -> None:
    timeline = Timeline()
    recorder = timeline.recorder
    for start in (0, 100_000_000):
        recorder.runnable(start, 1)
        recorder.step(start, start + 20_000_000, step_id=start, batch_size=1, tokens=1, prefill_tokens=0)
        recorder.runnable(start + 20_000_000, 0)
    assert texts(timeline.figure()).count("nothing to run") == 1


def test_bubbles_that_are_nothing_beside_the_largest_get_no_label() -> None:
    timeline = Timeline()
    for start, end in ((0, 10), (10.1, 20), (60, 70)):
        timeline.recorder.step(
            round(start * 1e6), round(end * 1e6), step_id=round(start), batch_size=1, tokens=1, prefill_tokens=0
        )
    labels = [text for text in texts(timeline.figure()) if text.endswith(" unknown") and "busy" not in text]
    assert labels == ["40.0 ms unknown"]


def _lightness(color: str) -> np.ndarray:
    """Linear RGB."""
    srgb = np.array([int(color[at : at + 2], 16) for at in (1, 3, 5)]) / 255
    return np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)


def _lab(linear: np.ndarray) -> np.ndarray:
    """CIE Lab of linear RGB, white D65."""
    to_xyz = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    xyz = np.array(to_xyz) @ np.clip(linear, 0, 1) / [0.95047, 1, 1.08883]
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def _contrast(a: str, b: str) -> float:
    """WCAG 2: 4.5 is asked of small text."""
    low, high = sorted(float(_lightness(color) @ [0.2126, 0.7152, 0.0722]) + 0.05 for color in (a, b))
    return high / low


# How people without one kind of cone see linear RGB: Machado, Oliveira, Fernandes 2009, severity 1.
SIGHTS = {
    "usual": np.eye(3),
    "protanopia": [[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]],
    "deuteranopia": [[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]],
    "tritanopia": [[1.256, -0.077, -0.179], [-0.078, 0.931, 0.148], [0.005, 0.691, 0.304]],
}


@pytest.mark.parametrize("sight", SIGHTS)
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_colours_that_lie_side_by_side_are_told_apart(theme: str, sight: str) -> None:
    colors = THEMES[theme]
    beside = [*combinations((colors.decode, colors.prefill, colors.bubble, colors.background), 2)]
    beside += combinations((colors.overlap, colors.work, colors.background), 2)
    beside += [(colors.awaiting, colors.background), (colors.user, colors.bubble), (colors.foreign, colors.bubble)]
    for a, b in beside:
        seen = [_lab(np.array(SIGHTS[sight]) @ _lightness(color)) for color in (a, b)]
        assert np.linalg.norm(seen[0] - seen[1]) > 20, (a, b)
    if sight == "usual":
        assert _contrast(colors.background, "#ffffff" if theme == "dark" else "#000000") > 15
        for text in (colors.text, colors.faint, colors.label):
            assert _contrast(text, colors.background) >= 4.5
        assert _contrast(colors.ink, colors.user) >= 4.5


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


def test_the_time_to_fit_a_text_does_not_grow_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[int] = []
    usual = figure_module._width_in

    def width_in(text: str, size: float, bold: bool = False) -> float:
        measured.append(len(text))
        return usual(text, size, bold)

    monkeypatch.setattr(figure_module, "_width_in", width_in)
    for text in ("a" * 100_000, "i" * 100_000, "two words " * 10_000):
        measured.clear()
        cut = fitting(text, 1.0, 9.0)
        assert cut.endswith("…") and text.startswith(cut[:-1])
        assert usual(cut, 9.0) <= 1.0 < usual(text[: len(cut) + 1] + "…", 9.0), "as much as there is room for"
        assert len(measured) <= 20 and sum(measured) < 5_000
        timeline = Timeline()
        timeline.recorder.step(0, 1_000, step_id=1, batch_size=1, tokens=1, prefill_tokens=0)
        timeline.recorder.step(5_000, 9_000, step_id=2, batch_size=1, tokens=1, prefill_tokens=0)
        timeline.recorder.record(Phase.USER, 1_000, 5_000, name=text)
        measured.clear()
        figure = timeline.figure()
        assert len(measured) < 500 and sum(measured) < 100_000
        assert figure.bbox.height < 600
        for shown in figure.texts:
            assert shown.get_window_extent().x1 <= figure.bbox.x1


def test_kernels_on_a_clock_that_counts_from_1970_are_drawn_to_the_nanosecond() -> None:
    base = 1_790_000_000_000_000_123
    timeline = Timeline()
    for number in range(3_000):
        timeline.recorder.work(base + 50 * number, base + 50 * number + 20, "k", kind=Work.KERNEL)
    figure = timeline.figure(window=(base, base + 150_000))
    (kernels,) = (part for part in stairs(figure.axes[0])[1:2])
    assert np.isfinite(kernels).all() and kernels.mean() == pytest.approx(0.4, abs=0.01)
    assert kernels.min() > 0.3 and kernels.max() < 0.5
