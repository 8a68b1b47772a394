"""What each kind of action did: seconds beside compute and without it, bytes, parameters, bandwidth."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from zoff_async.scheduler import Span
from zoff_async.trace.intervals import Interval, difference, intersection, length_s, union
from zoff_async.trace.steps import Window
from zoff_async.trace.timeline import Timeline


@dataclass(frozen=True)
class KindUse:
    """One kind of action, a step.

    ``work_s`` adds its actions' durations up; ``hidden_s`` and ``exposed_s`` count time once, with and without
    something on the compute lane. Rates are over ``work_s``: what one copy, or one worker, reaches.
    """

    kind: str
    lane: str
    count: float
    work_s: float
    hidden_s: float
    exposed_s: float
    bytes: float
    numel: float

    @property
    def bytes_per_s(self) -> float | None:
        """Bandwidth while it ran; None where no bytes are known."""
        return self.bytes / self.work_s if self.bytes and self.work_s else None

    @property
    def numel_per_s(self) -> float | None:
        """Parameters a second while it ran, of one worker; None where none are known."""
        return self.numel / self.work_s if self.numel and self.work_s else None


def kind_uses(timeline: Timeline, windows: Sequence[Window]) -> tuple[KindUse, ...]:
    """Every kind in the timeline, in the order of the newest plan, over the given steps."""
    inside = union((window.start_s, window.end_s) for window in windows)
    compute = compute_time(timeline)
    steps = {window.step for window in windows}
    plan = timeline.plans.get(windows[-1].step)
    by_kind: dict[str, list[Span]] = {kind.name: [] for kind in plan.kinds} if plan is not None else {}
    for span in timeline.spans:
        by_kind.setdefault(span.action.kind, []).append(span)
    found = []
    for kind, spans in by_kind.items():
        if not spans:
            continue
        time = intersection(union((s.start_s, s.end_s) for s in spans), inside)
        own = [span for span in spans if span.step in steps]
        found.append(
            KindUse(
                kind=kind,
                lane=spans[0].lane,
                count=len(own) / len(windows),
                work_s=sum(span.end_s - span.start_s for span in own) / len(windows),
                hidden_s=length_s(intersection(time, compute)) / len(windows),
                exposed_s=length_s(difference(time, compute)) / len(windows),
                bytes=sum(span.bytes for span in own) / len(windows),
                numel=sum(timeline.numel(span.action) for span in own) / len(windows),
            )
        )
    return tuple(found)


def compute_time(timeline: Timeline) -> list[Interval]:
    """When something ran on the compute lane."""
    return union((span.start_s, span.end_s) for span in timeline.spans if span.lane == "compute")


def exposed_time(timeline: Timeline, spans: Iterable[Span]) -> list[Interval]:
    """The parts of ``spans`` in which nothing ran on the compute lane."""
    return difference(union((span.start_s, span.end_s) for span in spans), compute_time(timeline))
