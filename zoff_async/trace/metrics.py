"""Figures of each step as flat dictionaries, for TensorBoard, wandb or a CSV file.

step_s                    length of the step, from first forward to first forward
busy/LANE                 share of the lane's time (capacity counted) in which it worked
work_s/KIND               durations of the kind's actions added up
exposed_s/KIND            seconds in which it ran and nothing on the compute lane did (not for forward, backward)
hidden_s/KIND             the same beside compute
bytes_per_s/KIND          bandwidth while it ran, for copies
parameters_per_s/adam     of one worker
wait_s/WHAT               the thread that trains stood still (weights, room), or was inside step()
"""

from __future__ import annotations

from zoff_async.trace.exposure import kind_uses
from zoff_async.trace.intervals import intersection, length_s, union
from zoff_async.trace.steps import Window, windows
from zoff_async.trace.timeline import Timeline
from zoff_async.trace.tracks import capacities


def metrics(timeline: Timeline) -> list[dict[str, float]]:
    """One dictionary a whole step, in order; ``step`` is its number."""
    return [_of(timeline, window) for window in windows(timeline)]


def last_metrics(timeline: Timeline) -> dict[str, float]:
    """Those of the last whole step; empty before there is one."""
    whole = windows(timeline)
    return _of(timeline, whole[-1]) if whole else {}


def _of(timeline: Timeline, window: Window) -> dict[str, float]:
    figures: dict[str, float] = {"step": window.step, "step_s": window.length_s}
    room = capacities(timeline)
    inside = [(window.start_s, window.end_s)]
    busy: dict[str, float] = {}
    for span in timeline.spans:
        if span.end_s > window.start_s and span.start_s < window.end_s:
            part = intersection([(span.start_s, span.end_s)], inside)
            busy[span.lane] = busy.get(span.lane, 0.0) + length_s(part)
    for lane in sorted(busy):
        figures[f"busy/{lane}"] = busy[lane] / (room.get(lane, 1) * window.length_s)
    for kind in kind_uses(timeline, [window]):
        figures[f"work_s/{kind.kind}"] = kind.work_s
        if kind.lane != "compute":
            figures[f"exposed_s/{kind.kind}"] = kind.exposed_s
            figures[f"hidden_s/{kind.kind}"] = kind.hidden_s
        if kind.bytes_per_s is not None:
            figures[f"bytes_per_s/{kind.kind}"] = kind.bytes_per_s
        if kind.kind == "adam" and kind.numel_per_s is not None:
            figures["parameters_per_s/adam"] = kind.numel_per_s
    for what in sorted({wait.what for wait in timeline.waits}):
        mine = union((wait.start_s, wait.end_s) for wait in timeline.waits if wait.what == what)
        figures[f"wait_s/{what}"] = length_s(intersection(mine, inside))
    return figures
