"""Several timelines one above the other, on one scale, with a table of their numbers."""

from __future__ import annotations

from interactive_infer.timeline.analysis import Window, last_of, window_of
from interactive_infer.timeline.beside import beside
from interactive_infer.timeline.figure import (
    DPI,
    LEFT,
    MARGIN,
    RIGHT,
    SMALL,
    WIDTH_IN,
    TimelineFigure,
    colors_of,
    draw_lanes,
    fitting,
    font,
    height_of,
    legend,
    scale_of,
    wrapped,
)
from interactive_infer.timeline.lanes import lanes_of
from interactive_infer.timeline.recording import Recording
from interactive_infer.timeline.summary import Distribution, Summary, percent, summarize

_TITLE, _CELL = 9.5, 8.5  # points
_TITLE_IN, _LINE_IN, _ROW_IN = 0.15, 0.17, 0.19
_FIRST = 0.25  # of the figure's width, where the table's first column of numbers begins


def draw_several(
    held: dict[str, tuple[Recording, str, str]], last: float | None, *, theme: str, together: bool
) -> TimelineFigure:
    """`held`: recording, device and source by name. One time axis a panel, all of the longest one's length; see
    `timeline.compare`. Host work is drawn as a whole."""
    colors = colors_of(theme)
    recordings = {name: recording for name, (recording, _, _) in held.items()}
    if together:
        recordings = beside(recordings)
    windows = _windows(recordings, last, together)
    summaries = {
        name: summarize(recordings[name], windows[name], device=device, source=source)
        for name, (_, device, source) in held.items()
    }
    lanes = {
        name: lanes_of(recordings[name], windows[name], summary, colors, brief=True)
        for name, summary in summaries.items()
    }
    table = rows_of(summaries)
    titles = {name: wrapped(f"{name}: {mine.headline()}", _TITLE, bold=True) for name, mine in summaries.items()}
    above = {name: _TITLE_IN + _LINE_IN * (title.count("\n") + 1) for name, title in titles.items()}
    panels = {name: height_of(mine) + above[name] for name, mine in lanes.items()}
    top, below = 0.35, 0.62 + _ROW_IN * len(table)
    height = top + sum(panels.values()) + below
    figure = TimelineFigure(figsize=(WIDTH_IN, height), dpi=DPI, facecolor=colors.background)
    length = max(t1 - t0 for t0, t1 in windows.values())
    scale, unit = scale_of(length)
    y = height - top
    axes = None
    for name, panel in panels.items():
        above_it = (y - 0.06) / height
        figure.text(MARGIN, above_it, titles[name], color=colors.text, va="top", **font(_TITLE, weight="bold"))
        place = (LEFT, (y - panel + 0.04) / height, RIGHT - LEFT, (panel - above[name]) / height)
        axes = figure.add_axes(place, sharex=axes)
        draw_lanes(axes, lanes[name], summaries[name], length, scale, colors)
        axes.tick_params(labelbottom=name == list(held)[-1])
        y -= panel
    assert axes is not None
    beginning = "the window's start" if together else "each one's start"
    axes.set_xlabel(f"time in {unit} from {beginning}", color=colors.faint, fontsize=SMALL)
    legend(figure, list(summaries.values()), colors, y=1 - 0.06 / height)
    column = (1 - MARGIN - _FIRST) / len(summaries)
    for number, row in enumerate(table):
        at = (below - 0.62 + 0.08 - _ROW_IN * number) / height
        bold = number == 0
        for index, cell in enumerate(row):
            x = _FIRST + column * (index - 1) if index else MARGIN
            shown = fitting(cell, (column if index else _FIRST) * WIDTH_IN - 0.1, _CELL, bold=bold)
            weight = "bold" if bold else "normal"
            figure.text(x, at, shown, color=colors.text, va="top", **font(_CELL, weight=weight))
    return figure


def rows_of(summaries: dict[str, Summary]) -> list[list[str]]:
    """The table: the names, then what is compared, a row each; rows in which nobody has anything are left out."""
    rows = [["", *summaries]]
    for what, value in (
        ("device busy", lambda s: _share(s.busy)),
        ("busy while there was work", lambda s: _share(s.busy_runnable)),
        ("host work hidden", lambda s: _share(s.overlap)),
        ("tokens waited for host work", lambda s: _share(s.critical_path and s.critical_path.host)),
        ("steps/s", lambda s: f"{s.steps_per_s:,.1f}" if s.steps else ""),
        ("tokens/s", lambda s: f"{s.tokens_per_s:,.1f}" if s.tokens else ""),
        ("first token, ms, p50 / p99", lambda s: _spread(s.first_token)),
        ("between tokens, ms, p50 / p99", lambda s: _spread(s.between_tokens)),
        ("bubbles, ms in all", lambda s: f"{1e3 * s.bubble_s:,.1f}"),
        ("largest bubble", lambda s: str(s.largest_bubble or "none")),
        ("loop lag, ms, p50 / p99", lambda s: _spread(s.lag)),
    ):
        values = [value(summary) for summary in summaries.values()]
        if any(values):
            rows.append([what, *values])
    return rows


def _windows(recordings: dict[str, Recording], last: float | None, together: bool) -> dict[str, Window]:
    windows = {name: window_of(recording, last) for name, recording in recordings.items()}
    if not together:
        return windows
    known = [window for window in windows.values() if window[0] < window[1]] or list(windows.values())
    t0, t1 = min(t0 for t0, _ in known), max(t1 for _, t1 in known)
    return dict.fromkeys(windows, (last_of(t0, t1, last), t1))


def _share(share: float | None) -> str:
    return "" if share is None else percent(share, 1)


def _spread(found: Distribution | None) -> str:
    return "" if found is None else f"{found.p50:,.2f} / {found.p99:,.2f}"
