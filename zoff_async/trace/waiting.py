"""How busy each lane was, and what it waited for in the rest of the time.

A gap on a lane ends with some action. Walking back from that action over what released it says, for every
part of the gap, which action it was that the lane was waiting for: ``d2h`` while a copy ran, ``adam`` while
Adam did. What lies between two actions of that walk is ``hand-over``. Before a forward or backward it is so only
while the caller waited for a weight; it is ``step()`` while the caller was inside that call, else ``caller``:
the training loop's own code.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from zoff_async.scheduler import Span
from zoff_async.trace.causes import Causes
from zoff_async.trace.intervals import Interval, difference, intersection, length_s, union
from zoff_async.trace.steps import Window
from zoff_async.trace.tracks import Track, capacities

HAND_OVER = "hand-over"
CALLER = "caller"
INSIDE_STEP = "step()"
NOTHING = "nothing to do"


@dataclass(frozen=True)
class LaneUse:
    """One lane, as shares of its time (capacity times the length of the steps); they add up to 1.

    ``waiting`` goes by what the lane waited for: a kind of action, ``hand-over``, ``step()``, ``caller`` or
    ``nothing to do``; the largest first.
    """

    lane: str
    capacity: int
    busy_s: float  # a step, over all its rows
    busy: float
    waiting: Mapping[str, float]


def lane_uses(causes: Causes, windows: Sequence[Window]) -> tuple[LaneUse, ...]:
    """Every lane that did something in the timeline, over the given steps."""
    room = capacities(causes.timeline)
    by_lane: dict[str, list[Track]] = {}
    for track in causes.tracks:
        by_lane.setdefault(track.lane, []).append(track)
    return tuple(_lane_use(causes, lane, room.get(lane, 1), by_lane[lane], windows) for lane in by_lane)


def _lane_use(causes: Causes, lane: str, capacity: int, tracks: Sequence[Track], windows: Sequence[Window]) -> LaneUse:
    total_s = capacity * sum(window.length_s for window in windows)
    busy_s = 0.0
    waiting: dict[str, float] = {}
    for track in tracks:
        for window in windows:
            busy_s += length_s(_clipped(((s.start_s, s.end_s) for s in track.spans), window))
        if track.row < capacity:
            for cause, seconds in _waits(causes, track, windows).items():
                waiting[cause] = waiting.get(cause, 0.0) + seconds
    # Rows beyond the capacity (an action that held no worker) leave less than the gaps add up to.
    idle_s = max(0.0, total_s - busy_s)
    gaps_s = sum(waiting.values())
    scale = idle_s / gaps_s / total_s if gaps_s else 0.0
    ordered = sorted(waiting.items(), key=lambda item: (-round(item[1] / total_s, 6), item[0]))
    shares = {cause: seconds * scale for cause, seconds in ordered}
    return LaneUse(lane, capacity, busy_s / len(windows), busy_s / total_s, shares)


def _waits(causes: Causes, track: Track, windows: Sequence[Window]) -> dict[str, float]:
    """Seconds of the track's gaps inside ``windows``, by what it waited for."""
    found: dict[str, float] = {}
    inside = union((window.start_s, window.end_s) for window in windows)
    at_s = float("-inf")
    for span in track.spans:
        gap = intersection([(at_s, span.start_s)], inside) if span.start_s > at_s else []
        if gap:
            left = gap
            for cause, interval in _walk(causes, span, gap[0][0]):
                part = intersection([interval], left)
                found[cause] = found.get(cause, 0.0) + length_s(part)
                left = difference(left, [interval])
            found[NOTHING] = found.get(NOTHING, 0.0) + length_s(left)
        at_s = max(at_s, span.end_s)
    rest = length_s(intersection([(at_s, float("inf"))], inside))
    if rest:
        found[NOTHING] = found.get(NOTHING, 0.0) + rest
    return {cause: seconds for cause, seconds in found.items() if seconds > 0}


def _walk(causes: Causes, span: Span, until_s: float) -> Iterable[tuple[str, Interval]]:
    """The time before ``span``, backwards, as pieces with what was waited for in each."""
    for current, release in causes.walk(span, until_s):
        if current is not span:
            yield current.action.kind, (current.start_s, current.end_s)
        if release is not None and release.span.end_s < current.start_s:
            yield from _between(causes, current, (release.span.end_s, current.start_s))


def _between(causes: Causes, after: Span, interval: Interval) -> Iterable[tuple[str, Interval]]:
    if not is_external(causes, after):
        return [(HAND_OVER, interval)]
    pieces: list[tuple[str, Interval]] = []
    left = [interval]
    waits = (
        (HAND_OVER, causes.waiting_for_weights),
        ("d2h", causes.waiting_for_room),
        (INSIDE_STEP, causes.inside_step),
    )
    for cause, known in waits:
        pieces += [(cause, part) for part in intersection(left, known)]
        left = difference(left, known)
    return [*pieces, *((CALLER, part) for part in left)]


def is_external(causes: Causes, span: Span) -> bool:
    """Whether somebody outside ran it: forward and backward."""
    plan = causes.timeline.plans.get(span.step)
    return span.action.kind in (plan.external if plan is not None else ("fwd", "bwd"))


def slot_waits_s(causes: Causes, windows: Sequence[Window]) -> dict[str, float]:
    """Seconds a step that each direction waited for a staging slot and for nothing else.

    An action waits for its slot from when all its other predecessors are done and its lane has room, until
    the slot is free. Chunks of one bucket wait together, and count once.
    """
    found: dict[str, list[Interval]] = {}
    for span in causes.timeline.spans:
        if not any(window.start_s <= span.start_s < window.end_s for window in windows):
            continue
        wait = _slot_wait(causes, span)
        if wait is not None:
            found.setdefault(_direction(causes, span), []).append(wait)
    return {name: length_s(union(waits)) / len(windows) for name, waits in found.items()}


def _slot_wait(causes: Causes, span: Span) -> Interval | None:
    slot_s = other_s = float("-inf")
    for before, _, rule in causes.edges.before(span):
        if rule == "slot-reuse":
            slot_s = max(slot_s, before.end_s)
        else:
            other_s = max(other_s, before.end_s)
    row = causes.row_before.get(span)
    if row is not None:
        other_s = max(other_s, row.end_s)
    slot_s = min(slot_s, span.start_s)
    return (other_s, slot_s) if float("-inf") < other_s < slot_s else None


def _direction(causes: Causes, span: Span) -> str:
    plan = causes.timeline.plans[span.step]
    names = [staging.name for staging in plan.staging if staging.filled_by == span.action.kind]
    return names[0] if names else span.action.kind


def _clipped(intervals: Iterable[Interval], window: Window) -> list[Interval]:
    return intersection(union(intervals), [(window.start_s, window.end_s)])
