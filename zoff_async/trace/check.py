"""Does a timeline keep its plans: every edge, and no overlap on a lane of capacity one."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from zoff_async.scheduler import Span
from zoff_async.trace.edges import Edges
from zoff_async.trace.timeline import Timeline
from zoff_async.trace.tracks import capacities

#: More findings than this are counted, not told.
_MOST = 20


def check(timeline: Timeline, *, tolerance_s: float) -> list[str]:
    """See ``Timeline.check``.

    Times of an accelerator are told on the host's clock to within some ten microseconds: less than
    ``tolerance_s`` is no finding. An action without a bucket (the norm, nodes of the user's own) runs beside a
    lane's workers, so it may overlap.
    """
    found = [*_broken_edges(timeline, tolerance_s), *_overlaps(timeline, tolerance_s), *_odd_spans(timeline)]
    more = [f"... and {len(found) - _MOST} more"] if len(found) > _MOST else []
    return found[:_MOST] + more


def _broken_edges(timeline: Timeline, tolerance_s: float) -> Iterator[str]:
    for before, after, rule in Edges(timeline).arrows():
        plan = timeline.plans[before.step]
        if before.action.kind in plan.external and after.action.kind in plan.external:
            continue  # autograd runs both, in an order of its own: the plan only expects one
        early_s = before.end_s - after.start_s
        if early_s > tolerance_s:
            yield (
                f"{_named(after)} began {early_s * 1e6:,.0f} us before {_named(before)} had ended "
                f"(edge {before.action} -> {after.action}, rule {rule})"
            )


def _overlaps(timeline: Timeline, tolerance_s: float) -> Iterator[str]:
    by_lane: dict[str, list[Span]] = {}
    for span in timeline.spans:
        if span.action.bucket is not None:
            by_lane.setdefault(span.lane, []).append(span)
    for lane, capacity in capacities(timeline).items():
        if capacity != 1:
            continue
        ordered = sorted(by_lane.get(lane, ()), key=lambda span: (span.start_s, span.end_s))
        for first, second in pairwise(ordered):
            overlap_s = first.end_s - second.start_s
            if overlap_s > tolerance_s:
                beside = f"{overlap_s * 1e6:,.0f} us beside {_named(first)}"
                yield f"lane {lane} of capacity 1 ran {_named(second)} for {beside}"


def _odd_spans(timeline: Timeline) -> Iterator[str]:
    seen: set[tuple[int, str]] = set()
    for span in timeline.spans:
        if span.end_s < span.start_s:
            yield f"{_named(span)} ended before it began"
        key = (span.step, str(span.action))
        if key in seen:
            yield f"{_named(span)} was recorded twice"
        seen.add(key)
        plan = timeline.plans.get(span.step)
        if plan is not None and span.action.template() not in plan.index:
            yield f"{_named(span)} is not in plan {plan.name!r}"


def _named(span: Span) -> str:
    return f"{span.action} of step {span.step}"
