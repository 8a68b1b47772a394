"""What spans say: steady period, lane use, what stood exposed, slots held, and the critical path.

Steady figures are taken between the first forwards of two steps, so that both ends of the window see the
step before still at work.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from zoff_async.scheduler.action import Action, Span
from zoff_async.scheduler.cost import CostModel
from zoff_async.scheduler.plan import StepPlan

Interval = tuple[float, float]


def resource_bound_s(plan: StepPlan, cost: CostModel, waves: int) -> float:
    """The largest of the lanes' busy seconds a step over their capacity."""
    busy = {lane.name: 0.0 for lane in plan.lanes}
    for action in plan.actions:
        count = waves if plan.parts[action.kind] == "backward" else 1
        busy[plan.lane_of[action.kind]] += sum(cost.seconds(action.later(backward=r)) for r in range(count))
    return max(busy[lane.name] / lane.capacity for lane in plan.lanes)


def steady_window(plan: StepPlan, spans: Sequence[Span], steps: int) -> tuple[float, float, float]:
    """Start and end of the window of steady steps, and the period in it.

    The first half of the steps is left to warm up. A single step is its own window.
    """
    starts = _step_starts(plan, spans)
    first = (steps - 1) // 2
    if steps == 1 or len(starts) < steps:
        end_s = max((span.end_s for span in spans), default=0.0)
        return 0.0, end_s, end_s / steps
    return starts[first], starts[-1], (starts[-1] - starts[first]) / (steps - 1 - first)


def _step_starts(plan: StepPlan, spans: Iterable[Span]) -> list[float]:
    starts: dict[int, float] = {}
    for span in spans:
        if span.action.kind in plan.external:
            starts[span.step] = min(span.start_s, starts.get(span.step, span.start_s))
    return [starts[step] for step in sorted(starts)]


def utilisation(plan: StepPlan, spans: Iterable[Span], start_s: float, end_s: float) -> dict[str, float]:
    """Busy share of each lane that has actions, between ``start_s`` and ``end_s``."""
    used = {plan.lane_of[action.kind] for action in plan.actions}
    busy = {lane.name: 0.0 for lane in plan.lanes if lane.name in used}
    for span in spans:
        busy[span.lane] += max(0.0, min(span.end_s, end_s) - max(span.start_s, start_s))
    room = {lane.name: lane.capacity * (end_s - start_s) for lane in plan.lanes}
    return {lane: seconds / room[lane] if room[lane] else 0.0 for lane, seconds in busy.items()}


def exposed_and_hidden_s(
    plan: StepPlan, spans: Sequence[Span], start_s: float, end_s: float
) -> tuple[dict[str, float], dict[str, float]]:
    """For each kind off the compute lane, a step's seconds without and beside compute.

    Time in which several actions of the kind run counts once.
    """
    starts = [start for start in _step_starts(plan, spans) if start_s <= start < end_s]
    count = max(1, len(starts))
    compute = plan.lane_of.get(plan.external[0], "")
    covered = _union((s.start_s, s.end_s) for s in spans if s.lane == compute)
    kinds = dict.fromkeys(action.kind for action in plan.actions if plan.lane_of[action.kind] != compute)
    exposed, hidden = {}, {}
    for kind in kinds:
        mine = _union((s.start_s, s.end_s) for s in spans if s.action.kind == kind)
        mine = [(max(a, start_s), min(b, end_s)) for a, b in mine if a < end_s and b > start_s]
        total = sum(b - a for a, b in mine)
        beside = _shared(mine, covered)
        hidden[kind] = beside / count
        exposed[kind] = max(0.0, total - beside) / count
    return exposed, hidden


def _union(intervals: Iterable[Interval]) -> list[Interval]:
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def _shared(left: Sequence[Interval], right: Sequence[Interval]) -> float:
    """Length of the intersection of two sorted lists of disjoint intervals."""
    total, i, j = 0.0, 0, 0
    while i < len(left) and j < len(right):
        total += max(0.0, min(left[i][1], right[j][1]) - max(left[i][0], right[j][0]))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return total


def peak_slots(plan: StepPlan, spans: Iterable[Span]) -> tuple[dict[str, int], dict[str, int]]:
    """Most slots, and most bytes in slots, held at once in each staging direction.

    A bucket holds a slot from the start of its first filling action to the end of its last freeing one.
    """
    spans = list(spans)
    slots, sizes = {}, {}
    for staging in plan.staging:
        held = _holds(plan, spans, staging.filled_by, staging.freed_by)
        # At the same instant a slot is freed before it is taken again.
        events = sorted(
            (time, sign, bucket) for bucket, *ends in held for sign, time in zip((1, -1), ends, strict=True)
        )
        count = most = size = most_bytes = 0
        for _, sign, bucket in events:
            count += sign
            size += sign * (plan.bucket_bytes[bucket] if plan.bucket_bytes else 0)
            most, most_bytes = max(most, count), max(most_bytes, size)
        slots[staging.name], sizes[staging.name] = most, most_bytes
    return slots, sizes


def _holds(plan: StepPlan, spans: list[Span], filled_by: str, freed_by: str) -> list[tuple[int, float, float]]:
    """(bucket, taken at, left at) for every use of a slot."""
    waved = plan.parts.get(filled_by) == plan.parts.get(freed_by) == "backward"
    taken: dict[tuple[int, int, int], float] = {}
    left: dict[tuple[int, int, int], float] = {}
    for span in spans:
        bucket = span.action.bucket
        if bucket is None or span.action.kind not in (filled_by, freed_by):
            continue
        key = (span.step, span.action.backward if waved else 0, bucket)
        if span.action.kind == filled_by:
            taken[key] = min(span.start_s, taken.get(key, span.start_s))
        if span.action.kind == freed_by:
            left[key] = max(span.end_s, left.get(key, span.end_s))
    return [(key[2], taken[key], left[key]) for key in taken if key in left]


def critical_path(plan: StepPlan, spans: Sequence[Span]) -> tuple[Action, ...]:
    """The cycle of actions that sets the steady period: each begins when the one before it has ended.

    Walked back from the first forward of the last step, each time to the action that released by an edge, else
    to the one that freed the lane, until an action comes again in an earlier step. Without such a cycle, the
    whole way back from what ended last.
    """
    back = _walk_back(plan, spans)
    seen: dict[Action, int] = {}
    for place, span in enumerate(back):
        first = seen.setdefault(span.action, place)
        if first < place:
            cycle = [other.action for other in reversed(back[first:place])]
            start = cycle.index(min(cycle, key=plan.priority))
            return tuple(cycle[start:] + cycle[:start])
    return tuple(span.action for span in reversed(back))


def _walk_back(plan: StepPlan, spans: Sequence[Span]) -> list[Span]:
    """Spans from the last step's first forward (or from the very last span) to the beginning."""
    place = {span: order for order, span in enumerate(spans)}
    ended: dict[float, list[Span]] = {}
    for span in spans:
        ended.setdefault(span.end_s, []).append(span)
    sources: dict[int, list[tuple[int, int, int]]] = {}
    for before, after, backward, lag in plan.links:
        sources.setdefault(after, []).append((before, backward, lag))
    starts = _step_starts(plan, spans)
    if len(starts) > 1:
        last = [s for s in spans if s.action.kind in plan.external and s.start_s == starts[-1]]
        current: Span | None = max(last, key=lambda span: span.step)
    else:
        current = max(spans, key=lambda span: (span.end_s, place[span]), default=None)
    back = []
    while current is not None:
        back.append(current)
        earlier = [s for s in ended.get(current.start_s, ()) if place[s] < place[current]]
        current = _releaser(plan, current, earlier, sources)
    return back


def _releaser(
    plan: StepPlan, span: Span, candidates: list[Span], sources: dict[int, list[tuple[int, int, int]]]
) -> Span | None:
    """Which of ``candidates``, all ended when ``span`` began, let it begin."""
    index, parts = plan.index, plan.parts
    waits = set(sources.get(index[span.action.template()], ()))
    for other in reversed(candidates):
        waved = parts[span.action.kind] == parts[other.action.kind] == "backward"
        lag = span.step - other.step
        backward = span.action.backward - other.action.backward if waved and not lag else 0
        if (index[other.action.template()], backward, lag) in waits:
            return other
    for other in reversed(candidates):
        if other.lane == span.lane:
            return other
    return candidates[-1] if candidates else None
