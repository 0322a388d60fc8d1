"""The timeline as a matplotlib figure: device over host on one time axis.

No pyplot: nothing is registered globally, so a figure is shown once, and freed when nobody holds it.
"""

from __future__ import annotations

import bisect
import io
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, get_font
from matplotlib.patches import Patch, StepPatch

from interactive_infer.errors import InvalidRequestError
from interactive_infer.timeline.analysis import Window, duration, lags_in
from interactive_infer.timeline.bubbles import Bubble
from interactive_infer.timeline.intervals import Intervals, coverage, total
from interactive_infer.timeline.lanes import THEMES, Lane, Theme, lanes_of
from interactive_infer.timeline.recording import Recording
from interactive_infer.timeline.summary import Summary, percent, summarize

WIDTH_IN, DPI = 9.0, 100  # 900 pixels: a notebook shows them one to one
_MARKED = 5  # bubbles that get a label, unless they are nothing beside the largest
_WORTH_A_LABEL = 0.01  # of the largest bubble's length
LEFT, RIGHT = 0.13, 0.92  # of the figure's width, where the axes begin and end
_BINS = round(WIDTH_IN * DPI * (RIGHT - LEFT))  # pixels: what is narrower shows by the share of one that it covers
_LEAST = 0.12  # of a lane's height, two pixels: the least that something is drawn
_STEP_PIXELS = 8  # of a step's width: from there on, steps without a gap between them are told apart
TITLE, LABEL, SMALL = 11.0, 9.0, 8.5  # points
MARGIN = 0.012  # of the figure's width, left of texts
_MOST_CHARACTERS = 600  # of a text: two lines of the narrowest
_FONT = "DejaVu Sans"  # matplotlib brings it along


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

    Lanes, top down: the device (one a stream; prefill and decode told apart; what else ran on it, kernels where they
    are known), host work as a whole and by phase (what the device's work hides and what it does not told apart),
    awaiting, the user's spans by name and cells by number, loop lag, and how many texts could run. Bubbles fill the
    device's lane; bands run down from the largest, which are labelled with their length and cause; where nothing could
    run the lane says so. Only lanes with something in them are drawn, and at the right stands the share of the window
    that each covers. A lane with spans narrower than a pixel shows by its height how much of every pixel they cover, so
    that ink is in proportion to time. `awaiting` leaves out the time in which the loop was late.
    """
    colors = colors_of(theme)
    summary = summarize(recording, window, device=device, source=source)
    lanes = lanes_of(recording, window, summary, colors)
    has_lag = bool(len(lags_in(recording, window)))
    has_counts = bool(len(recording.runnable))
    title = wrapped(summary.headline(), TITLE, bold=True)
    note = wrapped(_note(summary, any(_is_crowded(lane.parts, window) for lane in lanes)), SMALL)
    inches = [height_of(lanes), *([0.45] if has_lag else []), *([0.34] if has_counts else [])]
    between, bottom = 0.08, 0.56 + 0.15 * (note.count("\n") + 1)
    top = 0.42 + 0.19 * (title.count("\n") + 1)
    height = top + sum(inches) + between * (len(inches) - 1) + bottom
    figure = TimelineFigure(figsize=(WIDTH_IN, height), dpi=DPI, facecolor=colors.background)
    grid = figure.add_gridspec(
        len(inches),
        1,
        height_ratios=inches,
        left=LEFT,
        right=RIGHT,
        top=1 - top / height,
        bottom=bottom / height,
        hspace=between * len(inches) / sum(inches),
    )
    main = figure.add_subplot(grid[0])
    scale, unit = scale_of(window[1] - window[0])
    draw_lanes(main, lanes, summary, window[1] - window[0], scale, colors)
    axes = [main]
    if has_lag:
        axes.append(figure.add_subplot(grid[1], sharex=main))
        _draw_lag(axes[-1], recording, window, scale, colors)
    if has_counts:
        axes.append(figure.add_subplot(grid[len(axes)], sharex=main))
        _draw_counts(axes[-1], recording, window, scale, colors)
    for each in axes[:-1]:
        each.tick_params(labelbottom=False)
    axes[-1].set_xlabel(f"time in {unit} from the window's start", color=colors.faint, fontsize=SMALL)
    figure.text(MARGIN, 1 - 0.12 / height, title, color=colors.text, va="top", **font(TITLE, weight="bold"))
    legend(figure, [summary], colors, y=1 - (top - 0.27) / height)
    figure.text(MARGIN, 0.07 / height, note, color=colors.faint, va="bottom", **font(SMALL))
    return figure


def _note(summary: Summary, crowded: bool) -> str:
    """What the numbers were measured from, and how far to trust them."""
    steps = f", {summary.steps:,} steps" if summary.steps else ""
    parts = [f"Busy from {summary.source}.", f"Window {summary.window_s:.3f} s{steps}."]
    if summary.clock_error_ns:
        parts.append(f"Device clock ± {summary.clock_error_ns / 1e3:.0f} µs.")
    if crowded:
        parts.append("Where spans are narrower than a pixel, height is the share they cover.")
    return " ".join(parts)


def colors_of(theme: str) -> Theme:
    if theme not in THEMES:
        raise InvalidRequestError("theme", theme, f"known are {', '.join(map(repr, THEMES))}")
    return THEMES[theme]


def height_of(lanes: list[Lane]) -> float:
    """Inches that they are drawn in, with the room for the bubbles' labels above."""
    return 0.6 + 0.26 * len(lanes)


def scale_of(length_ns: int) -> tuple[float, str]:
    """Nanoseconds a unit of the time axis, and the unit."""
    return (1e6, "ms") if length_ns < 2_000_000_000 else (1e9, "s")


def _is_crowded(parts: list[tuple[Intervals, str]], window: Window) -> bool:
    """Whether any span of the lane, or gap between two, is narrower than a pixel."""
    narrow = (window[1] - window[0]) / _BINS
    return any(bool((np.diff(part.ravel()) < narrow).any()) for part, _ in parts)


def draw_lanes(axes: Axes, lanes: list[Lane], summary: Summary, length_ns: int, scale: float, colors: Theme) -> None:
    """Lanes and bubbles of the summary's window; the axis is `length_ns` long, which may be more."""
    window, length = summary.window_ns, max(summary.window_ns[1] - summary.window_ns[0], 1)
    style(axes, colors)
    across, small = axes.get_yaxis_transform(), font(SMALL, color=colors.faint, va="center")
    for row, lane in enumerate(lanes):
        half = 0.4 if lane.is_device else 0.34
        if _is_crowded(lane.parts, window) and length > _BINS:
            # In whole numbers: a float of so many ns since 1970 is off by hundreds.
            edges = np.array([window[0] + length * pixel // _BINS for pixel in range(_BINS + 1)], np.int64)
            whole = coverage(lane.parts[0][0], edges)
            drawn = np.where(whole > 0, np.maximum(whole, _LEAST), 0)
            stretch = np.divide(drawn, whole, out=np.zeros(_BINS), where=whole > 0)
            for part, color in lane.parts:
                tops = row + half - 2 * half * stretch * coverage(part, edges)
                bottom, places = row + half, (edges - window[0]) / scale
                patch = StepPatch(tops, places, baseline=bottom, fill=True, color=color, linewidth=0)
                axes.add_artist(patch)  # `stairs` would work out limits, and take longer than the drawing
        else:
            for part, color in lane.parts:
                axes.add_collection(_boxes((part - window[0]) / scale, row, half, color), autolim=False)
        if len(lane.cuts) * _STEP_PIXELS < _BINS:
            cuts = (lane.cuts - window[0]) / scale
            # Notches: what is as high as the lane is a gap.
            axes.vlines(cuts, row + 0.4 * half, row + half, colors=colors.background, linewidth=0.8)
        for start, end, text, color in lane.texts:
            if (end - start) / length_ns * (RIGHT - LEFT) * WIDTH_IN > _width_in(text, SMALL) + 0.04:
                middle = ((start + end) / 2 - window[0]) / scale
                axes.text(middle, row, text, **font(SMALL, color=color, ha="center", va="center"))
        axes.text(1.008, row, _share(total(lane.covered) / length), transform=across, **small)
    axes.text(1.008, -0.75, "of window", transform=across, **small)
    axes.set_ylim(len(lanes) - 0.45, -2.1)  # the room above the device is for the bubbles' labels
    labels = [fitting(lane.label, LEFT * WIDTH_IN - 0.15, LABEL) for lane in lanes]
    axes.set_yticks(range(len(lanes)), labels, **font(LABEL, color=colors.text))
    axes.set_xlim(0, max(length_ns, 1) / scale)
    if length_ns == 0:
        axes.set_xticks([])
    _draw_bubbles(axes, summary, max(length_ns, 1), scale, colors)


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


def _draw_bubbles(axes: Axes, summary: Summary, length_ns: int, scale: float, colors: Theme) -> None:
    """Bands through all lanes at the largest bubbles; labels in two rows, largest first, if there is room."""
    t0, _ = summary.window_ns
    marked = sorted(summary.bubbles, key=lambda bubble: -bubble.duration_ns)[:_MARKED]
    marked = [each for each in marked if each.duration_ns >= _WORTH_A_LABEL * marked[0].duration_ns]
    taken: list[tuple[int, float, float]] = []
    for bubble in marked:
        start, end = (bubble.start_ns - t0) / scale, (bubble.end_ns - t0) / scale
        axes.axvspan(start, end, color=colors.bubble, alpha=0.16, linewidth=0, zorder=0)
        text = _label(bubble)
        middle = (start + end) / 2 * scale / length_ns
        half = _width_in(text, SMALL) / 2 / ((RIGHT - LEFT) * WIDTH_IN) + 0.007  # of the axes' width
        x = min(max(middle, half), 1 - half)
        row = next((r for r in (0, 1) if all(o != r or abs(x - c) > half + h for o, c, h in taken)), None)
        if row is None:
            continue
        taken.append((row, x, half))
        y = -0.9 - 0.75 * row
        across = axes.get_yaxis_transform()
        axes.plot([middle, middle], [y, -0.42], color=colors.bubble, linewidth=0.8, transform=across, zorder=2)
        box = {"boxstyle": "square,pad=0.12", "facecolor": colors.background, "edgecolor": "none"}
        small = font(SMALL, color=colors.label, ha="center", va="center")
        axes.text(x, y, text, transform=across, bbox=box, zorder=3, **small)


def _label(bubble: Bubble) -> str:
    return f"{duration(bubble.duration_ns)} {fitting(bubble.cause, 2.2, SMALL)}"


def _draw_lag(axes: Axes, recording: Recording, window: Window, scale: float, colors: Theme) -> None:
    """Each heartbeat as a stem at the time it ran, as high as it was late, and the slope of its lateness before. Of
    those in one pixel, the latest."""
    beats = lags_in(recording, window)
    pixel = ((beats["at"] - window[0]) / max(window[1] - window[0], 1) * _BINS).astype(np.int64)
    order = np.lexsort((beats["lag"], pixel))
    beats = beats[order[np.append(np.flatnonzero(np.diff(pixel[order])), len(order) - 1)]]
    x, late = (beats["at"] - window[0]) / scale, beats["lag"] / 1e6
    long = beats["lag"] > (window[1] - window[0]) / _BINS
    ran, top = x[long], late[long]
    slopes = np.zeros((len(ran), 3, 2))
    slopes[:, 0, 0], slopes[:, 1, 0], slopes[:, 2, 0] = ran - beats["lag"][long] / scale, ran, ran
    slopes[:, 1, 1] = top
    style(axes, colors)
    axes.add_collection(PolyCollection(list(slopes), facecolors=colors.lag, alpha=0.3, linewidths=0), autolim=False)
    axes.vlines(x, 0, late, colors=colors.lag, linewidth=1.0)
    axes.plot(x, late, ".", color=colors.lag, markersize=3)
    highest = max(float(late.max()), 0.5)
    axes.set_ylim(0, 1.15 * highest)
    axes.set_yticks([0.5 * highest], [f"loop lag\n0 to {highest:.1f} ms"], **font(LABEL, color=colors.text))


def _draw_counts(axes: Axes, recording: Recording, window: Window, scale: float, colors: Theme) -> None:
    """How many texts could run: 0 while all are paused, or there is nothing to do."""
    at, count = recording.runnable["at"], recording.runnable["count"]
    first = max(int(np.searchsorted(at, window[0], side="right")) - 1, 0)
    at, count = at[first:], count[first:]
    edges = (np.clip(np.append(at, window[1]), *window) - window[0]) / scale
    style(axes, colors)
    axes.add_artist(StepPatch(count, edges, fill=True, color=colors.awaiting, linewidth=0))
    highest = max(int(count.max(initial=0)), 1)
    axes.set_ylim(0, 1.15 * highest)
    axes.set_yticks([0.5 * highest], [f"can run\n0 to {highest}"], **font(LABEL, color=colors.text))


def style(axes: Axes, colors: Theme) -> None:
    axes.set_facecolor(colors.background)
    axes.grid(axis="x", color=colors.grid, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(length=0, labelcolor=colors.faint, labelsize=SMALL)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(colors.grid)


def legend(figure: Figure, summaries: list[Summary], colors: Theme, y: float) -> None:
    """Names the colours that the lanes' labels do not."""
    entries = []
    if any(summary.prompt_tokens for summary in summaries):
        entries = [("decode", colors.decode), ("prefill", colors.prefill)]
    if any(summary.overlap is not None for summary in summaries):
        entries += [("host work hidden (overlap)", colors.overlap), ("host work not hidden", colors.work)]
    if any(summary.bubbles for summary in summaries):
        entries += [("bubble: work to do, device idle", colors.bubble)]
    figure.legend(
        handles=[Patch(facecolor=color, label=name) for name, color in entries],
        loc="upper left",
        bbox_to_anchor=(MARGIN - 0.004, y),
        borderaxespad=0,
        borderpad=0.3,
        ncols=max(len(entries), 1),
        frameon=False,
        handlelength=1.0,
        handleheight=0.7,
        columnspacing=1.4,
        prop=FontProperties(family=_FONT, size=SMALL),
        labelcolor=colors.text,
    )


def font(size: float, **more: Any) -> dict[str, Any]:
    # parse_math: text from outside may hold dollar signs, and is data.
    return {"fontsize": size, "fontfamily": _FONT, "parse_math": False, "usetex": False, **more}


def wrapped(text: str, size: float, *, bold: bool = False) -> str:
    """`text` in lines as long as the figure is wide."""
    line, lines, width = "", [], WIDTH_IN * (1 - 2 * MARGIN)
    for word in plain(_start_of(text)).split(" "):
        longer = f"{line} {word}" if line else word
        if line and _width_in(longer, size, bold) > width:
            lines.append(line)
            longer = word
        line = fitting(longer, width, size, bold=bold)
    return "\n".join([*lines, line])


def fitting(text: str, inches: float, size: float, *, bold: bool = False) -> str:
    """`text` in one line, cut off where it would be wider."""
    shown = plain(_start_of(text))
    if _width_in(shown, size, bold) <= inches:
        return shown
    # A name may be long, and measuring takes as long as what is measured: halve what is in question.
    length = bisect.bisect_right(range(len(shown)), inches, key=lambda n: _width_in(shown[:n] + "…", size, bold)) - 1
    return shown[: max(length, 0)].rstrip() + "…"


def _start_of(text: str) -> str:
    """What of `text` can be drawn at all."""
    return text if len(text) <= _MOST_CHARACTERS else text[: _MOST_CHARACTERS - 1] + "…"


def _width_in(text: str, size: float, bold: bool = False) -> float:
    """How wide `text` is drawn, in inches."""
    face = get_font(findfont(FontProperties(family=_FONT, weight="bold" if bold else "normal")))
    face.set_size(size, DPI)
    face.set_text(text, 0.0)
    return float(face.get_width_height()[0]) / 64 / DPI


def plain(text: str) -> str:
    """One line that the font can show: other characters, and control characters, become U+FFFD."""
    face = get_font(findfont(_FONT))
    return "".join(c if c == " " or (c.isprintable() and face.get_char_index(ord(c))) else "\ufffd" for c in text)
