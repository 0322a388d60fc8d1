"""The timeline as a matplotlib figure: device over host on one time axis.

No pyplot: nothing is registered globally, so a figure is shown once, and freed when nobody holds it.
"""

from __future__ import annotations

import io
import textwrap
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, get_font
from matplotlib.patches import Patch, StepPatch

from interactive_infer.errors import InvalidRequestError
from interactive_infer.timeline.analysis import (
    HOST_WORK,
    Bubble,
    Intervals,
    Window,
    awaiting_intervals,
    busy_intervals,
    clip,
    coverage,
    duration,
    held_intervals,
    host_intervals,
    intersect,
    intervals,
    lags_in,
    total,
    union,
)
from interactive_infer.timeline.recorder import Phase, Recording
from interactive_infer.timeline.summary import Summary, percent, summarize

_WIDTH_IN, _DPI = 10.0, 110
_MARKED = 5  # bubbles that get a label
_LEFT, _RIGHT = 0.115, 0.935  # of the figure's width, where the axes begin and end
_BINS = 900  # about the axes' width in pixels: what is narrower is drawn by the share of its bin that it covers
_LEAST = 0.06  # of a lane's height, about a pixel: the least that something is drawn
_FONT = "DejaVu Sans"  # matplotlib brings it along
_HOST_LANES = {
    Phase.PLAN: "plan",
    Phase.LAUNCH: "launch",
    Phase.COMMIT: "commit",
    Phase.DETOKENIZE: "detokenize",
    Phase.PUBLISH: "publish",
    Phase.LOAD: "load",
    Phase.CAPTURE: "capture",
    Phase.AWAIT: "awaiting",
    Phase.GC: "garbage coll.",
    Phase.CALLBACK: "callbacks",
    Phase.USER: "user spans",
    Phase.CELL: "user cells",
}


@dataclass(frozen=True)
class _Theme:
    background: str
    text: str
    faint: str
    grid: str
    decode: str
    prefill: str
    work: str
    other: str
    awaiting: str
    user: str
    lag: str
    overlap: str
    bubble: str


# Hues of Okabe and Ito's palette, which people with any common colour blindness tell apart; lanes carry the
# rest.
_THEMES = {
    "light": _Theme(
        background="#ffffff",
        text="#1f2328",
        faint="#656d76",
        grid="#d8dde3",
        decode="#0072b2",
        prefill="#56b4e9",
        work="#e69f00",
        other="#8c6bb1",
        awaiting="#b8bfc7",
        user="#cc79a7",
        lag="#57606a",
        overlap="#009e73",
        bubble="#d55e00",
    ),
    "dark": _Theme(
        background="#14171c",
        text="#e6e9ed",
        faint="#9aa4af",
        grid="#333a43",
        decode="#3b9fdd",
        prefill="#a5dcff",
        work="#f0b429",
        other="#b39ddb",
        awaiting="#566270",
        user="#e39bc4",
        lag="#aab4bf",
        overlap="#1fbf92",
        bubble="#ff8a4c",
    ),
}


class TimelineFigure(Figure):
    """A figure that notebooks display; of a plain one IPython knows no picture until pyplot is imported."""

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self.savefig(buffer, format="png")
        return buffer.getvalue()


def draw(
    recording: Recording, window: Window, *, device: str = "device", source: str, theme: str = "light"
) -> TimelineFigure:
    """Draw [t0, t1) of a recording.

    Lanes, top down: the device (one a stream; prefill and decode told apart), host work as a whole and by
    phase (what the device's work hides and what it does not told apart), awaiting, the user's cells, loop
    lag. Bubbles fill the device's lane; bands run down from the largest, which are labelled with their length
    and cause. Only lanes with something in them are drawn, and at the right stands the share of the window
    that each covers. A lane with spans narrower than a pixel shows by its height how much of every pixel they
    cover, so that ink is in proportion to time. `awaiting` leaves out the time in which the loop was late.
    """
    if theme not in _THEMES:
        raise InvalidRequestError("theme", theme, f"known are {', '.join(map(repr, _THEMES))}")
    colors = _THEMES[theme]
    summary = summarize(recording, window, device=device, source=source)
    lanes = _lanes(recording, window, summary, colors)
    has_lag = bool(len(lags_in(recording, window)))
    title = textwrap.fill(_plain(summary.headline()), 104)
    inches = [0.6 + 0.26 * len(lanes), *([0.45] if has_lag else [])]
    between, bottom = 0.06, 0.68
    top = 0.42 + 0.19 * (title.count("\n") + 1)
    height = top + sum(inches) + between * (len(inches) - 1) + bottom
    figure = TimelineFigure(figsize=(_WIDTH_IN, height), dpi=_DPI, facecolor=colors.background)
    grid = figure.add_gridspec(
        len(inches),
        1,
        height_ratios=inches,
        left=_LEFT,
        right=_RIGHT,
        top=1 - top / height,
        bottom=bottom / height,
        hspace=between * len(inches) / sum(inches),
    )
    main = figure.add_subplot(grid[0])
    scale, unit = (1e6, "ms") if window[1] - window[0] < 2_000_000_000 else (1e9, "s")
    _style(main, colors)
    _draw_lanes(main, lanes, window, scale, colors)
    _draw_bubbles(main, summary, scale, colors)
    main.set_xlim(0, max(window[1] - window[0], 1) / scale)
    if window[0] == window[1]:
        main.set_xticks([])
    axes = [main]
    if has_lag:
        axes.append(figure.add_subplot(grid[1], sharex=main))
        main.tick_params(labelbottom=False)
        _draw_lag(axes[1], recording, window, scale, colors)
    axes[-1].set_xlabel(f"time in {unit} from the window's start", color=colors.faint, fontsize=8)
    figure.text(0.012, 1 - 0.12 / height, title, color=colors.text, va="top", **_font(11, weight="bold"))
    _legend(figure, summary, colors, y=1 - (top - 0.27) / height)
    crowded = any(_is_crowded(parts, window) for _, parts in lanes)
    binned = " Where spans are narrower than a pixel, height is the share they cover." if crowded else ""
    note = f"busy share from {source}. Window {summary.window_s:.3f} s, {summary.steps:,} steps.{binned}"
    figure.text(0.012, 0.07 / height, _plain(note), color=colors.faint, va="bottom", **_font(7.5))
    return figure


Parts = list[tuple[Intervals, str]]  # each with its colour; the later ones lie inside the first
Lane = tuple[str, Parts]


def _lanes(recording: Recording, window: Window, summary: Summary, colors: _Theme) -> list[Lane]:
    """(label, parts) top down; empty ones are left out, the device's never."""
    steps, spans = recording.steps, recording.spans
    bubbles = np.array([(b.start_ns, b.end_ns) for b in summary.bubbles], np.int64).reshape(-1, 2)
    lanes: list[Lane] = []
    streams = np.unique(steps["stream"]).tolist() or [0]
    for stream in streams:
        mine = steps[steps["stream"] == stream]
        decode = mine[mine["prefill_tokens"] == 0]
        shown = union(clip(intervals(mine), *window))
        parts = [
            (union(shown, bubbles), colors.bubble),
            (shown, colors.prefill),
            (union(clip(intervals(decode), *window)), colors.decode),
        ]
        lanes.append(("device" if len(streams) == 1 else f"stream {stream}", parts))
    busy, host = busy_intervals(recording, window), host_intervals(recording, window)
    if len(host):
        lanes.append(("host work", [(host, colors.work), (intersect(busy, host), colors.overlap)]))
    shade = {Phase.AWAIT: colors.awaiting, Phase.CELL: colors.user, Phase.USER: colors.user}
    shade |= dict.fromkeys((Phase.LOAD, Phase.CAPTURE, Phase.GC, Phase.CALLBACK), colors.other)
    for phase, label in _HOST_LANES.items():
        if phase is Phase.AWAIT:
            part = awaiting_intervals(recording, window)
        else:
            part = union(clip(intervals(spans[spans["phase"] == phase]), *window))
        parts = [(part, shade.get(phase, colors.work))]
        if phase in HOST_WORK:
            parts.append((intersect(busy, part), colors.overlap))
        lanes.append((label, parts))
        if phase is Phase.AWAIT:
            lanes.append(("loop late", [(clip(held_intervals(recording), *window), colors.lag)]))
    return lanes[: len(streams)] + [lane for lane in lanes[len(streams) :] if len(lane[1][0][0])]


def _is_crowded(parts: Parts, window: Window) -> bool:
    """Whether any span of the lane, or gap between two, is narrower than a pixel."""
    narrow = (window[1] - window[0]) / _BINS
    return any(bool((np.diff(part.ravel()) < narrow).any()) for part, _ in parts)


def _draw_lanes(axes: Axes, lanes: list[Lane], window: Window, scale: float, colors: _Theme) -> None:
    length = max(window[1] - window[0], 1)
    across, font = axes.get_yaxis_transform(), _font(7.5, color=colors.faint, va="center")
    for row, (label, parts) in enumerate(lanes):
        half = 0.4 if row == 0 else 0.34
        if _is_crowded(parts, window) and length > _BINS:
            edges = np.linspace(*window, _BINS + 1).astype(np.int64)
            whole = coverage(parts[0][0], edges)
            drawn = np.where(whole > 0, np.maximum(whole, _LEAST), 0)
            stretch = np.divide(drawn, whole, out=np.zeros(_BINS), where=whole > 0)
            for part, color in parts:
                tops = row + half - 2 * half * stretch * coverage(part, edges)
                bottom, places = row + half, (edges - window[0]) / scale
                patch = StepPatch(tops, places, baseline=bottom, fill=True, color=color, linewidth=0)
                axes.add_artist(patch)  # `stairs` would work out limits, and take longer than the drawing
        else:
            for part, color in parts:
                axes.add_collection(_boxes((part - window[0]) / scale, row, half, color), autolim=False)
        covered = parts[1][0] if label.startswith(("device", "stream")) else parts[0][0]  # there the first has bubbles
        axes.text(1.008, row, _share(total(covered) / length), transform=across, **font)
    axes.text(1.008, -0.75, "of window", transform=across, **font)
    axes.set_ylim(len(lanes) - 0.45, -2.1)  # the room above the device is for the bubbles' labels
    axes.set_yticks(range(len(lanes)), [label for label, _ in lanes], **_font(8.5, color=colors.text))


def _share(share: float) -> str:
    if 0 < share < 0.001:
        return "<0.1 %"
    return percent(share, 0 if share >= 0.9995 or share == 0 else 1)


def _boxes(spans: Any, row: float, half: float, color: str) -> PolyCollection:
    """Boxes as one collection."""
    corners = np.empty((len(spans), 4, 2))
    corners[:, :2, 0], corners[:, 2:, 0] = spans[:, :1], spans[:, 1:]
    corners[:, [0, 3], 1], corners[:, [1, 2], 1] = row + half, row - half
    return PolyCollection(list(corners), facecolors=color, linewidths=0, snap=False)


def _draw_bubbles(axes: Axes, summary: Summary, scale: float, colors: _Theme) -> None:
    """Bands through all lanes at the largest bubbles; labels in two rows, largest first, if there is room."""
    t0, t1 = summary.window_ns
    marked = sorted(summary.bubbles, key=lambda bubble: -bubble.duration_ns)[:_MARKED]
    taken: list[tuple[int, float, float]] = []
    for bubble in marked:
        start, end = (bubble.start_ns - t0) / scale, (bubble.end_ns - t0) / scale
        axes.axvspan(start, end, color=colors.bubble, alpha=0.16, linewidth=0, zorder=0)
        text = _label(bubble)
        middle = (start + end) / 2 * scale / max(t1 - t0, 1)
        half = _width_in(text, 7.5) / 2 / ((_RIGHT - _LEFT) * _WIDTH_IN) + 0.004  # of the axes' width
        x = min(max(middle, half), 1 - half)
        row = next((r for r in (0, 1) if all(o != r or abs(x - c) > half + h for o, c, h in taken)), None)
        if row is None:
            continue
        taken.append((row, x, half))
        y = -0.9 - 0.75 * row
        across = axes.get_yaxis_transform()
        axes.plot([middle, middle], [y, -0.42], color=colors.bubble, linewidth=0.8, transform=across, zorder=2)
        box = {"boxstyle": "square,pad=0.12", "facecolor": colors.background, "edgecolor": "none"}
        font = _font(7.5, color=colors.bubble, ha="center", va="center")
        axes.text(x, y, text, transform=across, bbox=box, zorder=3, **font)


def _label(bubble: Bubble) -> str:
    return f"{duration(bubble.duration_ns)} {textwrap.shorten(_plain(bubble.cause), 32, placeholder='…')}"


def _draw_lag(axes: Axes, recording: Recording, window: Window, scale: float, colors: _Theme) -> None:
    """Each heartbeat as a stem at the time it ran, as high as it was late, and the slope of its lateness before."""
    beats = lags_in(recording, window)
    x, late = (beats["at"] - window[0]) / scale, beats["lag"] / 1e6
    long = beats["lag"] > (window[1] - window[0]) / _BINS
    ran, top = x[long], late[long]
    slopes = np.zeros((len(ran), 3, 2))
    slopes[:, 0, 0], slopes[:, 1, 0], slopes[:, 2, 0] = ran - beats["lag"][long] / scale, ran, ran
    slopes[:, 1, 1] = top
    _style(axes, colors)
    axes.add_collection(PolyCollection(list(slopes), facecolors=colors.lag, alpha=0.3, linewidths=0), autolim=False)
    axes.vlines(x, 0, late, colors=colors.lag, linewidth=1.0)
    axes.plot(x, late, ".", color=colors.lag, markersize=3)
    highest = max(float(late.max()), 0.5)
    axes.set_ylim(0, 1.15 * highest)
    axes.set_yticks([0.5 * highest], [f"loop lag\n0 to {highest:.1f} ms"], **_font(8.5, color=colors.text))


def _style(axes: Axes, colors: _Theme) -> None:
    axes.set_facecolor(colors.background)
    axes.grid(axis="x", color=colors.grid, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(length=0, labelcolor=colors.faint, labelsize=8)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(colors.grid)


def _legend(figure: Figure, summary: Summary, colors: _Theme, y: float) -> None:
    """Names the colours that the lanes' labels do not."""
    entries = [("decode", colors.decode), ("prefill", colors.prefill)] if summary.prompt_tokens else []
    if summary.overlap is not None:
        entries += [("host work hidden (overlap)", colors.overlap), ("host work not hidden", colors.work)]
    if summary.bubbles:
        entries += [("bubble: work to do, device idle", colors.bubble)]
    figure.legend(
        handles=[Patch(facecolor=color, label=name) for name, color in entries],
        loc="upper left",
        bbox_to_anchor=(0.004, y),
        borderaxespad=0,
        borderpad=0.3,
        ncols=max(len(entries), 1),
        frameon=False,
        handlelength=1.0,
        handleheight=0.7,
        columnspacing=1.4,
        prop=FontProperties(family=_FONT, size=8),
        labelcolor=colors.text,
    )


def _font(size: float, **more: Any) -> dict[str, Any]:
    # parse_math: text from outside may hold dollar signs, and is data.
    return {"fontsize": size, "fontfamily": _FONT, "parse_math": False, "usetex": False, **more}


def _width_in(text: str, size: float) -> float:
    """How wide `text` is drawn, in inches."""
    font = get_font(findfont(_FONT))
    font.set_size(size, 72)
    font.set_text(text, 0.0)
    return float(font.get_width_height()[0]) / 64 / 72


def _plain(text: str) -> str:
    """One line that the font can show: other characters, and control characters, become U+FFFD."""
    font = get_font(findfont(_FONT))
    return "".join(c if c == " " or (c.isprintable() and font.get_char_index(ord(c))) else "\ufffd" for c in text)
