"""The last steps as text for a terminal: a row a lane, a column a slice of time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from zoff_async.scheduler import Span
from zoff_async.trace.figures import seconds
from zoff_async.trace.steps import Window, windows
from zoff_async.trace.timeline import Timeline
from zoff_async.trace.tracks import Track, tracks

#: What a bucket is drawn as; later buckets begin again.
_BUCKETS = "0123456789abcdefghijklmnopqrstuvwxyz"
#: What an action without a bucket is drawn as.
_WHOLE = "#"
_IDLE = "·"
#: Rows of a lane that did almost nothing (an action that held no worker) are left out.
_LEAST = 0.002


def gantt(timeline: Timeline, *, steps: int, width: int) -> str:
    """See ``Timeline.gantt``: each column shows the bucket that took most of its time.

    Raises:
        ValueError: if the timeline has no spans, or ``width`` is below 40.
    """
    if not timeline.spans:
        raise ValueError("the timeline has no spans: record a step first (OffloadConfig(trace_steps=...))")
    if width < 40:
        raise ValueError(f"width is {width}: at least 40 columns are needed")
    shown = last_windows(timeline, steps)
    start_s, end_s = shown[0].start_s, shown[-1].end_s
    rows = [(name, spans) for name, spans in _rows(timeline) if _is_busy(spans, start_s, end_s)]
    margin = max(len(name) for name, _ in rows) + 2
    columns = width - margin
    edges_s = [start_s + (end_s - start_s) * i / columns for i in range(columns + 1)]
    lines = [_ruler(shown, edges_s, margin)]
    lines += [name.ljust(margin) + "".join(_cells(spans, edges_s)) for name, spans in rows]
    legend = (
        f"{seconds((end_s - start_s) / columns)} a column; 0-9a-z: bucket, {_WHOLE}: norm and others, {_IDLE}: idle"
    )
    return "\n".join([*lines, " " * margin + legend]) + "\n"


def last_windows(timeline: Timeline, count: int) -> Sequence[Window]:
    """The last whole steps; if there are none, all there is."""
    whole = windows(timeline)
    if whole:
        return whole[-count:]
    start_s = min(span.start_s for span in timeline.spans)
    end_s = max(span.end_s for span in timeline.spans)
    return [Window(timeline.steps[-1], start_s, max(end_s, start_s + 1e-9))]


def _rows(timeline: Timeline) -> Iterable[tuple[str, Sequence[Span]]]:
    """Forward and backward share a lane but are two rows: which of the two it is is what one looks for."""
    for track in tracks(timeline):
        kinds = _kinds_apart(track)
        for kind in kinds:
            yield kind, [span for span in track.spans if span.action.kind == kind]
        if not kinds:
            yield track.name, track.spans


def _kinds_apart(track: Track) -> list[str]:
    kinds = list(dict.fromkeys(span.action.kind for span in track.spans))
    return sorted(kinds, key=("fwd", "bwd").index) if set(kinds) <= {"fwd", "bwd"} else []


def _is_busy(spans: Sequence[Span], start_s: float, end_s: float) -> bool:
    inside = sum(max(0.0, min(s.end_s, end_s) - max(s.start_s, start_s)) for s in spans)
    return inside > _LEAST * (end_s - start_s)


def _ruler(shown: Sequence[Window], edges_s: Sequence[float], margin: int) -> str:
    columns = len(edges_s) - 1
    ruler = [" "] * columns
    for window in shown:
        at = min(columns - 1, sum(edge <= window.start_s for edge in edges_s[1:]))
        text = f"|step {window.step}, {seconds(window.length_s)}"
        ruler[at : at + len(text)] = text[: columns - at]
    return (" " * margin + "".join(ruler)).rstrip()


def _cells(spans: Sequence[Span], edges_s: Sequence[float]) -> list[str]:
    columns = len(edges_s) - 1
    width_s = edges_s[1] - edges_s[0]
    shares: list[dict[str, float]] = [{} for _ in range(columns)]
    for span in spans:
        first = max(0, int((span.start_s - edges_s[0]) / width_s))
        for column in range(first, columns):
            overlap_s = min(span.end_s, edges_s[column + 1]) - max(span.start_s, edges_s[column])
            if span.end_s <= edges_s[column]:
                break
            if overlap_s > 0:
                sign = _sign(span)
                shares[column][sign] = shares[column].get(sign, 0.0) + overlap_s
    return [_cell(share, width_s) for share in shares]


def _sign(span: Span) -> str:
    bucket = span.action.bucket
    return _WHOLE if bucket is None else _BUCKETS[bucket % len(_BUCKETS)]


def _cell(share: dict[str, float], width_s: float) -> str:
    """Idle unless something ran for a good part of the column."""
    busy_s = sum(share.values())
    return max(share, key=lambda sign: share[sign]) if busy_s >= 0.3 * width_s else _IDLE
