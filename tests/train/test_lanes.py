"""Time by lane from spans."""

from __future__ import annotations

from zoff_async.scheduler import Action, Span
from zoff_async.train.lanes import LaneTime, lane_times


def span(lane: str, start_s: float, end_s: float, step: int = 0) -> Span:
    return Span(Action("adam", 0), lane, step, start_s, end_s, 0)


def test_a_lane_with_two_workers_is_busy_once_and_works_twice():
    spans = [span("cpu", 0, 2), span("cpu", 1, 3), span("compute", 0, 1)]

    assert lane_times(spans)["cpu"] == LaneTime(busy_s=3, work_s=4, hidden_s=1, share=1)


def test_times_are_a_step():
    spans = [span("cpu", 0, 2, step=0), span("cpu", 4, 6, step=1), span("d2h", 6, 8, step=1)]

    assert lane_times(spans) == {
        "cpu": LaneTime(busy_s=2, work_s=2, hidden_s=0, share=0.5),
        "d2h": LaneTime(busy_s=1, work_s=1, hidden_s=0, share=0.25),
    }


def test_without_spans_there_are_no_lanes():
    assert lane_times([]) == {}
