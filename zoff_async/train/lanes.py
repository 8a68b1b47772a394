"""Time by lane from the spans of a run: how busy each lane was, and how much of that compute covered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zoff_async.scheduler import Span
from zoff_async.trace.intervals import intersection, length_s, union


@dataclass(frozen=True)
class LaneTime:
    """Seconds in which a lane did something, a step.

    Attributes:
        busy_s: Time with at least one action running.
        work_s: Durations of its actions added up: above ``busy_s`` where several run at once.
        hidden_s: The part of ``busy_s`` that compute covers.
        share: ``busy_s`` over the length of a step.
    """

    busy_s: float
    work_s: float
    hidden_s: float
    share: float


def lane_times(spans: Sequence[Span]) -> dict[str, LaneTime]:
    """Per lane, the mean over the steps that ``spans`` hold."""
    if not spans:
        return {}
    steps = len({span.step for span in spans})
    step_s = (max(span.end_s for span in spans) - min(span.start_s for span in spans)) / steps
    compute = union((s.start_s, s.end_s) for s in spans if s.lane == "compute")
    times = {}
    for lane in sorted({span.lane for span in spans}):
        intervals = [(s.start_s, s.end_s) for s in spans if s.lane == lane]
        busy = union(intervals)
        times[lane] = LaneTime(
            busy_s=length_s(busy) / steps,
            work_s=sum(end - start for start, end in intervals) / steps,
            hidden_s=length_s(intersection(busy, compute)) / steps,
            share=length_s(busy) / steps / step_s,
        )
    return times
