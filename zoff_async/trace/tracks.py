"""Rows of a lane: a lane that runs several actions at once is drawn as several rows.

Which worker ran a chunk is not recorded. A span goes to the row that has been free for longest, so the span
before it in its row is the one that made room for it if the lane was full.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from zoff_async.scheduler import Span
from zoff_async.trace.timeline import Timeline


class Track(NamedTuple):
    """One row of a lane, its spans in order."""

    lane: str
    row: int
    spans: tuple[Span, ...]

    @property
    def name(self) -> str:
        return self.lane if self.row < 0 else f"{self.lane} {self.row}"


def rows(spans: Iterable[Span], capacity: int = 1) -> list[list[Span]]:
    """Spread one lane's spans over at least ``capacity`` rows without overlap; more where they ran ahead.

    Actions without a bucket (the norm, nodes of the user's own) hold no worker: they go into a gap that is
    left, or into a row of their own.
    """
    ordered = sorted(spans, key=lambda s: (s.start_s, s.end_s))
    found: list[list[Span]] = [[] for _ in range(capacity)]
    for span in (span for span in ordered if span.action.bucket is not None):
        free = [row for row in found if not row or row[-1].end_s <= span.start_s]
        usual = [row for row in free if any(row is known for known in found[:capacity])]
        if free:
            min(usual or free, key=_free_since).append(span)
        else:
            found.append([span])
    for span in (span for span in ordered if span.action.bucket is None):
        for row in found:
            place = bisect_right(row, span.start_s, key=lambda s: s.start_s)
            if (not place or row[place - 1].end_s <= span.start_s) and (
                place == len(row) or span.end_s <= row[place].start_s
            ):
                row.insert(place, span)
                break
        else:
            found.append([span])
    return found


def _free_since(row: list[Span]) -> float:
    return row[-1].end_s if row else float("-inf")


def capacities(timeline: Timeline) -> Mapping[str, int]:
    """Capacity of each lane in the newest plan; lanes that only spans name have one."""
    found = dict.fromkeys((span.lane for span in timeline.spans), 1)
    for _, plan in sorted(timeline.plans.items()):
        found |= {lane.name: lane.capacity for lane in plan.lanes}
    return found


def tracks(timeline: Timeline) -> list[Track]:
    """All rows of all lanes that did something, in the order of the plan's lanes."""
    by_lane: dict[str, list[Span]] = {}
    for span in timeline.spans:
        by_lane.setdefault(span.lane, []).append(span)
    room = capacities(timeline)
    order = _lane_order(timeline)
    found = []
    for lane in sorted(by_lane, key=lambda name: order.index(name) if name in order else len(order)):
        capacity = room.get(lane, 1)
        split = rows(by_lane[lane], capacity)
        single = capacity == 1
        for number, spans in enumerate(split):
            found.append(Track(lane, -1 if single and not number else number, tuple(spans)))
    return found


def _lane_order(timeline: Timeline) -> list[str]:
    order: list[str] = []
    for _, plan in sorted(timeline.plans.items()):
        order += [lane.name for lane in plan.lanes if lane.name not in order]
    return order or ["compute", "d2h", "cpu", "h2d", "net"]
