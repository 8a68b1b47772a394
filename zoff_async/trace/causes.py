"""Why an action began when it did: the walk back over what it waited for.

An action waits for its predecessors in the plan and for a place on its lane. The one of them that ended last
released it; between that end and its own beginning lies the hand-over (the event loop, a queue, another
thread), or on the compute lane the caller's own code.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from zoff_async.scheduler import Span
from zoff_async.trace.edges import Edges
from zoff_async.trace.intervals import Interval, union
from zoff_async.trace.timeline import Timeline
from zoff_async.trace.tracks import Track, tracks

#: The rule of a release that is no edge of the plan: the lane had no room before ...
LANE = "lane"
#: ... or the step was still open: its closing part came to life when the caller was done with backward.
CLOSE = "step-closes"


class Release(NamedTuple):
    """What let an action begin, and by which rule of the plan (or ``lane``)."""

    span: Span
    rule: str


class Causes:
    """Answers for one timeline; built once, since it looks at every span."""

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        self.tracks: list[Track] = tracks(timeline)
        self.edges = Edges(timeline)
        #: When the thread that trains was inside ``step()``; when it stood still until a weight was there, and
        #: until a gradient had left the device.
        self.inside_step = _time(timeline, "step")
        self.waiting_for_weights = _time(timeline, "weights")
        self.waiting_for_room = _time(timeline, "room")
        self._last_compute = self._last_external()
        self._place = {span: place for place, span in enumerate(timeline.spans)}
        self.row_before: dict[Span, Span] = {}
        for track in self.tracks:
            for before, after in zip(track.spans, track.spans[1:], strict=False):
                self.row_before[after] = before

    def release(self, span: Span) -> Release | None:
        """What ended last of all that ``span`` waited for; None where nothing of it was recorded."""
        last: Release | None = None
        for before, _, rule in self.edges.before(span):
            if self._earlier(before, span) and (last is None or self._ended_later(before, last.span)):
                last = Release(before, rule)
        closing = self._closing(span)
        if closing is not None and (last is None or self._ended_later(closing, last.span)):
            last = Release(closing, CLOSE)
        row = self.row_before.get(span)
        if row is not None and self._earlier(row, span) and (last is None or row.end_s > last.span.end_s):
            return Release(row, LANE)
        return last

    def _closing(self, span: Span) -> Span | None:
        """For an action of the closing part: the last of what had to happen before the step could close."""
        plan = self.timeline.plans.get(span.step)
        if plan is None or plan.closes != "step" or plan.parts.get(span.action.kind) != "close":
            return None
        last = self._last_compute.get(span.step)
        return last if last is not None and self._earlier(last, span) else None

    def _last_external(self) -> dict[int, Span]:
        """By step, the forward or backward that ended last."""
        last: dict[int, Span] = {}
        for span in self.timeline.spans:
            plan = self.timeline.plans.get(span.step)
            if plan is not None and span.action.kind in plan.external:
                known = last.get(span.step)
                if known is None or span.end_s >= known.end_s:
                    last[span.step] = span
        return last

    def _earlier(self, before: Span, span: Span) -> bool:
        """A strict order, so that no walk runs in a circle, whatever clocks say and however short actions are."""
        return (before.start_s, self._place[before]) < (span.start_s, self._place[span])

    def _ended_later(self, span: Span, other: Span) -> bool:
        """Of two that ended together the one recorded last: in a simulation, the one that released the rest."""
        return (span.end_s, self._place[span]) > (other.end_s, self._place[other])

    def walk(self, span: Span, until_s: float) -> Iterator[tuple[Span, Release | None]]:
        """From ``span`` back through what released it, until an action that began at ``until_s`` or before.

        That one is yielded too.
        """
        current: Span | None = span
        while current is not None:
            release = self.release(current)
            yield current, release
            if current.start_s <= until_s:
                return
            current = None if release is None else release.span


def _time(timeline: Timeline, what: str) -> list[Interval]:
    return union((wait.start_s, wait.end_s) for wait in timeline.waits if wait.what == what)
