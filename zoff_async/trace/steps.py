"""Where one step ends and the next begins, and which steps are steady.

A step lasts from its first forward to the first forward of the step after it, as in a simulation.
"""

from __future__ import annotations

from statistics import median
from typing import NamedTuple

from zoff_async.scheduler import Span
from zoff_async.trace.timeline import Timeline

#: A step this many times as long as the median holds something else as well (an evaluation, a checkpoint).
_ODD = 3.0


class Window(NamedTuple):
    """One whole step: from its own first forward to the next step's."""

    step: int
    start_s: float
    end_s: float

    @property
    def length_s(self) -> float:
        return self.end_s - self.start_s


def first_spans(timeline: Timeline) -> dict[int, Span]:
    """The span with which each step begins, by step.

    A forward where there are any; else the first span of what comes to life with a backward.
    """
    external = {kind for plan in timeline.plans.values() for kind in plan.external} or {"fwd", "bwd"}
    if not any(span.action.kind in external for span in timeline.spans):
        external = set()
    first: dict[int, Span] = {}
    for span in timeline.spans:
        if external and span.action.kind not in external:
            continue
        if not external and not _belongs_to_backward(timeline, span):
            continue
        known = first.get(span.step)
        # Of several that begin at once the one that ended last: the others are of no length.
        if known is None or (span.start_s, -span.end_s) < (known.start_s, -known.end_s):
            first[span.step] = span
    return dict(sorted(first.items()))


def _belongs_to_backward(timeline: Timeline, span: Span) -> bool:
    plan = timeline.plans.get(span.step)
    return plan is None or plan.parts.get(span.action.kind) == "backward"


def windows(timeline: Timeline) -> tuple[Window, ...]:
    """Every step whose successor has begun, in order."""
    first = first_spans(timeline)
    return tuple(
        Window(step, span.start_s, first[step + 1].start_s) for step, span in first.items() if step + 1 in first
    )


def steady(timeline: Timeline) -> tuple[Window, ...]:
    """The whole steps that are alike: of the newest one's plan, without the first one and odd ones.

    Host work of a step goes on in the next one, so a step whose predecessor was not recorded (or was the run's
    first, which pays for staging, compiled kernels and first touches of memory) shows too little of it.

    Raises:
        ValueError: if no step is whole.
    """
    whole = windows(timeline)
    if not whole:
        raise ValueError(
            f"the timeline holds {len(timeline.steps)} step(s) and none of them whole: a step ends where the next "
            "one begins, so record at least two in a row (OffloadConfig(trace_steps=...))"
        )
    plan = timeline.plans.get(whole[-1].step)
    alike = [window for window in whole if timeline.plans.get(window.step) == plan]
    known = set(timeline.steps)
    later = [window for window in alike if window.step - 1 in known] or alike
    usual_s = median(window.length_s for window in later)
    return tuple(window for window in later if window.length_s <= _ODD * usual_s)
