"""The plans' edges between spans: what each action waited for, across backwards and steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple, TypeAlias

from zoff_async.scheduler import Action, Span, StepPlan
from zoff_async.trace.timeline import Timeline

#: What an action waits for, by its name in the plan: (before, backward, lag, rule).
Incoming: TypeAlias = "Mapping[Action, list[tuple[Action, int, int, str]]]"


class Arrow(NamedTuple):
    """``after`` began once ``before`` was done, because of ``rule``."""

    before: Span
    after: Span
    rule: str


class Edges:
    """Looks up what spans waited for.

    An edge into the next step is the older step's; one from the backward part to the parts that live once
    holds for every backward; one from the close part back into a backward holds for the last.
    """

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._plans = timeline.plans
        self._spans = {(span.step, span.action): span for span in timeline.spans}
        self._backwards: dict[int, int] = {}
        for span in timeline.spans:
            self._backwards[span.step] = max(self._backwards.get(span.step, 1), span.action.backward + 1)
        self._incoming: dict[int, Incoming] = {}

    def arrows(self) -> Iterator[Arrow]:
        """Every edge that has both its ends in the timeline, in the order of ``after``."""
        for span in self._timeline.spans:
            yield from self.before(span)

    def before(self, span: Span) -> Iterator[Arrow]:
        """The edges into ``span``."""
        name = span.action.template()
        plan = self._plans.get(span.step)
        if plan is not None:
            for before, backward, lag, rule in self._edges(plan).get(name, ()):
                if not lag:
                    yield from self._within(plan, span, before, backward, rule)
        older = self._plans.get(span.step - 1)
        if older is not None and not span.action.backward:
            for before, _, lag, rule in self._edges(older).get(name, ()):
                if lag:
                    yield from self._every(older, span.step - 1, before, span, rule)

    def _within(self, plan: StepPlan, span: Span, before: Action, backward: int, rule: str) -> Iterator[Arrow]:
        parts, number = plan.parts, span.action.backward
        waves = parts[before.kind] == "backward"
        if backward:
            if number:
                yield from self._one(span.step, before.later(backward=number - 1), span, rule)
        elif waves and parts[span.action.kind] == "backward":
            yield from self._one(span.step, before.later(backward=number), span, rule)
        elif waves:
            yield from self._every(plan, span.step, before, span, rule)
        elif parts[before.kind] == "open" or number == (plan.backwards or 1) - 1:
            yield from self._one(span.step, before, span, rule)

    def _every(self, plan: StepPlan, step: int, before: Action, after: Span, rule: str) -> Iterator[Arrow]:
        count = self._backwards.get(step, 1) if plan.parts[before.kind] == "backward" else 1
        for number in range(count):
            yield from self._one(step, before.later(backward=number), after, rule)

    def _one(self, step: int, before: Action, after: Span, rule: str) -> Iterator[Arrow]:
        span = self._spans.get((step, before))
        if span is not None:
            yield Arrow(span, after, rule)

    def _edges(self, plan: StepPlan) -> Incoming:
        found = self._incoming.get(id(plan))
        if found is None:
            grouped: dict[Action, list[tuple[Action, int, int, str]]] = {}
            for before, after, rule in plan.edges:
                grouped.setdefault(after.template(), []).append((before, after.backward, after.lag, rule))
            found = self._incoming[id(plan)] = grouped
        return found
