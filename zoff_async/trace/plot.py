"""A picture of the last steps: a row a lane, buckets by colour, what stood exposed, and the critical path.

Reading aids are in the picture itself: rows say what they do, runs of one kind are named, a legend explains
hatching and outlines, and the verdict stands under the title. 1200 pixels wide as PNG; PDF and SVG for papers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from zoff_async.errors import ZoffError
from zoff_async.scheduler import Span
from zoff_async.trace.causes import Causes
from zoff_async.trace.critical import PathAction, critical_path
from zoff_async.trace.exposure import compute_time, exposed_time
from zoff_async.trace.gantt import last_windows
from zoff_async.trace.intervals import difference, intersection
from zoff_async.trace.limits import lived
from zoff_async.trace.steps import Window
from zoff_async.trace.timeline import Timeline
from zoff_async.trace.tracks import Track

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = (".png", ".pdf", ".svg")
_DPI = 100
_WIDTH_INCHES = 12.0
_ROW_INCHES = 0.62
#: What stands beside a row.
_ROW_WORDS = {
    "compute": "model",
    "d2h": "gradients to host",
    "cpu": "host cores",
    "h2d": "weights to device",
    "net": "between machines",
}
#: What stands over a run of one kind.
_KIND_WORDS = {
    "fwd": "forward",
    "bwd": "backward",
    "d2h": "copies",
    "acc": "sums",
    "norm": "norm",
    "adam": "Adam",
    "h2d": "uploads",
}
#: Kinds drawn lower than their row's main work, so that both can be told apart.
_LOW = {"fwd": 0.6, "acc": 0.45, "norm": 0.45}
_HEIGHT = 0.62
_INK = "#1a1a1a"
_PATH_INK = "#c1121f"


class Row(NamedTuple):
    """One row of the picture."""

    label: str
    lane: str
    spans: Sequence[Span]


def plot(timeline: Timeline, path: str | Path, *, steps: int, verdict: bool) -> None:
    """See ``Timeline.plot``.

    Raises:
        ValueError: if the file's ending is none of .png, .pdf, .svg, or the timeline has no spans.
        ZoffError: if matplotlib is not installed.
    """
    ending = check_format(path)
    drawn = figure(timeline, steps=steps, verdict=verdict)
    # No date inside: the same timeline gives the same file.
    stamp: dict[str, dict[str, None]] = {".png": {}, ".pdf": {"CreationDate": None}, ".svg": {"Date": None}}
    drawn.savefig(path, dpi=_DPI, metadata=stamp[ending])


def check_format(path: str | Path) -> str:
    """The picture format that a file's name asks for.

    Raises:
        ValueError: if it is none of ours.
    """
    ending = Path(path).suffix.lower()
    if ending not in FORMATS:
        raise ValueError(f"cannot draw into {Path(path).name!r}: its name must end in {', '.join(FORMATS)}")
    return ending


def figure(timeline: Timeline, *, steps: int = 2, verdict: bool = True) -> Figure:
    """The picture as a matplotlib figure, for one who wants to change it."""
    if not timeline.spans:
        raise ValueError("the timeline has no spans: record a step first (OffloadConfig(trace_steps=...))")
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ZoffError("drawing needs matplotlib: pip install 'zoff-async[plot]'") from error
    shown = last_windows(timeline, steps)
    causes = Causes(lived(timeline))
    rows = list(_rows(causes.tracks, shown))
    sentence = _verdict(timeline) if verdict else ""
    height = 1.5 + _ROW_INCHES * len(rows) + (0.42 if sentence else 0.0)
    drawn = Figure(figsize=(_WIDTH_INCHES, height), layout="constrained")
    axes = drawn.add_subplot()
    _Picture(axes, timeline, causes, rows, shown).draw()
    drawn.suptitle(_title(timeline, sentence), x=0.01, ha="left", fontsize=10)
    return drawn


def _verdict(timeline: Timeline) -> str:
    """The report's sentence; none where there are too few steps for a report."""
    try:
        return timeline.report().verdict
    except ValueError:
        return ""


def _title(timeline: Timeline, sentence: str) -> str:
    import textwrap

    facts = timeline.facts
    words = [f"policy {facts['policy']}"] if "policy" in facts else []
    words += [f"on {facts['device']}"] if "device" in facts else []
    return "\n".join([" ".join(words) or "the last steps", *textwrap.wrap(sentence, 165)])


def _rows(tracks: Sequence[Track], shown: Sequence[Window]) -> Iterator[Row]:
    start_s, end_s = shown[0].start_s, shown[-1].end_s
    for track in tracks:
        inside = [span for span in track.spans if span.start_s < end_s and span.end_s > start_s]
        busy_s = sum(span.end_s - span.start_s for span in inside)
        if busy_s > 0.002 * (end_s - start_s) or track.row <= 0:
            yield Row(f"{_ROW_WORDS.get(track.lane, track.lane)}\n{track.name}", track.lane, inside)


class _Picture:
    """Draws one timeline into one pair of axes; milliseconds from the first shown step."""

    def __init__(
        self, axes: Axes, timeline: Timeline, causes: Causes, rows: Sequence[Row], shown: Sequence[Window]
    ) -> None:
        self._axes = axes
        self._timeline = timeline
        self._causes = causes
        self._rows = rows
        self._shown = shown
        self._start_s = shown[0].start_s
        self._end_s = shown[-1].end_s
        buckets = [span.action.bucket for row in rows for span in row.spans if span.action.bucket is not None]
        self._last_bucket = max(buckets, default=0)
        self._row_of = {span: place for place, row in enumerate(rows) for span in row.spans}
        self._span_of = {(span.step, span.action): span for span in self._row_of}
        self._colours: dict[int, Any] = {}

    def draw(self) -> None:
        for place, row in enumerate(self._rows):
            self._draw_row(place, row)
            self._name_runs(place, row)
        for window in self._shown:
            self._outline(critical_path(self._causes, window))
        self._draw_steps()
        self._finish()

    # Rows

    def _draw_row(self, place: int, row: Row) -> None:
        from matplotlib.collections import PolyCollection

        corners = [_corners(*self._box(span, place)) for span in row.spans]
        colours = [self._colour(span.action.bucket) for span in row.spans]
        if corners:
            bars = PolyCollection(corners, facecolors=colours, edgecolors="white", linewidths=0.3, zorder=2)
            self._axes.add_collection(bars)
        if row.lane == "compute":
            self._shade_idle(place)
        else:
            self._hatch_exposed(place, row)

    def _hatch_exposed(self, place: int, row: Row) -> None:
        """Hatch what ran while the model did nothing."""
        time = intersection(exposed_time(self._timeline, row.spans), [(self._start_s, self._end_s)])
        self._axes.broken_barh(
            [(self._ms(start_s), self._ms(end_s) - self._ms(start_s)) for start_s, end_s in time],
            (place - _HEIGHT / 2, _HEIGHT),
            facecolor="none",
            edgecolor=(1.0, 1.0, 1.0, 0.75),
            hatch="////",
            linewidth=0.0,
            zorder=3,
        )

    def _shade_idle(self, place: int) -> None:
        """Grey where the model does nothing: the time that overlap is there to save."""
        idle = difference([(self._start_s, self._end_s)], compute_time(self._timeline))
        self._axes.broken_barh(
            [(self._ms(start_s), self._ms(end_s) - self._ms(start_s)) for start_s, end_s in idle],
            (place - _HEIGHT / 2, _HEIGHT),
            facecolor="#e4e4e4",
            linewidth=0.0,
            zorder=1,
        )
        for start_s, end_s in idle:
            if end_s - start_s >= 0.05 * (self._end_s - self._start_s):
                middle = self._ms((start_s + end_s) / 2)
                self._axes.text(middle, place, "waits", ha="center", va="center", fontsize=7, color="#666666")

    def _box(self, span: Span, place: int) -> tuple[tuple[float, float], float, float]:
        """(left, upper), width and height: rows count downwards, and all bars of a row stand on one line."""
        height = _HEIGHT * _LOW.get(span.action.kind, 1.0)
        left = self._ms(max(span.start_s, self._start_s))
        right = self._ms(min(span.end_s, self._end_s))
        return (left, place + _HEIGHT / 2 - height), right - left, height

    def _colour(self, bucket: int | None) -> Any:
        if bucket is None:
            return _INK
        if bucket not in self._colours:
            self._colours[bucket] = _shade(bucket / self._last_bucket if self._last_bucket else 0.5)
        return self._colours[bucket]

    def _name_runs(self, place: int, row: Row) -> None:
        """Write the kind over every long enough run of it."""
        ordered = sorted(row.spans, key=lambda span: span.start_s)
        runs: list[list[Span]] = []
        for span in ordered:
            if runs and runs[-1][-1].action.kind == span.action.kind and runs[-1][-1].step == span.step:
                runs[-1].append(span)
            else:
                runs.append([span])
        least_ms = 0.035 * (self._ms(self._end_s))
        for run in runs:
            start_ms, end_ms = self._ms(run[0].start_s), self._ms(run[-1].end_s)
            start_ms, end_ms = max(start_ms, 0.0), min(end_ms, self._ms(self._end_s))
            if end_ms - start_ms >= least_ms:
                kind = run[0].action.kind
                self._axes.text(
                    (start_ms + end_ms) / 2,
                    place - _HEIGHT / 2 - 0.04,
                    _KIND_WORDS.get(kind, kind),
                    ha="center",
                    va="bottom",
                    fontsize=7,
                    color=_INK,
                )

    # The critical path

    def _outline(self, path: Sequence[PathAction]) -> None:
        from matplotlib.collections import LineCollection, PolyCollection

        corners, ends = [], []
        for item in path:
            span = self._span_of.get((item.step, item.action))
            if span is None or item.end_s <= item.start_s:
                continue
            (_, low), _, height = self._box(span, self._row_of[span])
            left, right = self._ms(item.start_s), self._ms(item.end_s)
            corners.append(_corners((left, low), right - left, height))
            ends.append((left, right, low + height / 2))
        lines = [[(before[1], before[2]), (after[0], after[2])] for before, after in pairwise(ends)]
        if corners:
            self._axes.add_collection(LineCollection(lines, colors=_PATH_INK, linewidths=0.9, zorder=4))
            outlines = PolyCollection(corners, facecolors="none", edgecolors=_PATH_INK, linewidths=1.1, zorder=5)
            self._axes.add_collection(outlines)

    # Around

    def _draw_steps(self) -> None:
        from zoff_async.trace.figures import seconds

        for window in self._shown:
            self._axes.axvline(self._ms(window.start_s), color=_INK, linewidth=0.8, linestyle=(0, (4, 3)), zorder=1)
            self._axes.text(
                self._ms(window.start_s),
                -0.78,
                f" step {window.step}: {seconds(window.length_s)}",
                fontsize=8,
                va="bottom",
                ha="left",
                color=_INK,
            )
        self._axes.axvline(self._ms(self._end_s), color=_INK, linewidth=0.8, linestyle=(0, (4, 3)), zorder=1)

    def _finish(self) -> None:
        axes = self._axes
        axes.set_xlim(0.0, self._ms(self._end_s))
        axes.set_ylim(len(self._rows) - 0.5, -0.85)
        axes.set_yticks(range(len(self._rows)), [row.label for row in self._rows], fontsize=8)
        axes.tick_params(axis="y", length=0)
        axes.tick_params(axis="x", labelsize=8)
        axes.set_xlabel("milliseconds", fontsize=8)
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
        self._legend()

    def _legend(self) -> None:
        from matplotlib.patches import Patch

        middle = _shade(0.5)
        handles = [
            Patch(facecolor=_shade(0.0), label="bucket 0 (last layers)"),
            Patch(facecolor=_shade(1.0), label=f"bucket {self._last_bucket} (first layers)"),
            Patch(facecolor=middle, edgecolor="white", hatch="////", label="exposed: the model waits meanwhile"),
            Patch(facecolor="none", edgecolor=_PATH_INK, label="critical path: what the step's length is made of"),
        ]
        self._axes.legend(
            handles=handles, loc="upper center", bbox_to_anchor=(0.5, -0.09), ncols=4, fontsize=8, frameon=False
        )

    def _ms(self, at_s: float) -> float:
        return (at_s - self._start_s) * 1e3


def _corners(lower_left: tuple[float, float], width: float, height: float) -> list[tuple[float, float]]:
    left, low = lower_left
    return [(left, low), (left + width, low), (left + width, low + height), (left, low + height)]


def _shade(share: float) -> Any:
    """A bucket's colour. The ends of the map are too dark and too light for hatching and for white paper."""
    from matplotlib import colormaps

    return colormaps["viridis"](0.08 + 0.84 * share)
