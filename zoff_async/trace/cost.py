"""What a measured step costs, as models that a simulation can be run with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from zoff_async.scheduler import Action, Layout, MeasuredCost, Span, StepPlan
from zoff_async.trace.timeline import Pieces


class Cost(Protocol):
    """Seconds of an action (the scheduler's cost model)."""

    def seconds(self, action: Action) -> float: ...


class StepCost:
    """Medians of what was measured, action by action; what was never seen costs nothing.

    Args:
        spans: Of the steady steps.
    """

    def __init__(self, spans: Sequence[Span]) -> None:
        self._kinds = {span.action.kind for span in spans}
        self._measured = MeasuredCost(spans)

    def seconds(self, action: Action) -> float:
        return self._measured.seconds(action) if action.kind in self._kinds else 0.0


class Scaled:
    """Another cost, with some kinds faster: ``factors`` multiply their seconds."""

    def __init__(self, cost: Cost, factors: Mapping[str, float]) -> None:
        self._cost = cost
        self._factors = dict(factors)

    def seconds(self, action: Action) -> float:
        return self._cost.seconds(action) * self._factors.get(action.kind, 1.0)


class Regrouped:
    """The cost of the same parameters in other buckets and chunks.

    The parameters stand in a row, bucket after bucket. Each kind's seconds are spread over the parameters of
    the buckets that were measured, and added up again over those of the new ones; what an action costs
    however small it is, is not known from equal buckets and left out.

    Args:
        cost: Of the measured buckets.
        old: Their sizes.
        new: The sizes asked for; the same parameters in total.
    """

    def __init__(self, cost: Cost, old: Pieces, new: Pieces) -> None:
        self._cost = cost
        self._old = old
        self._new = new
        self._memory: dict[tuple[str, int, int, int], float] = {}

    def seconds(self, action: Action) -> float:
        if action.bucket is None:
            return self._cost.seconds(action)
        first = sum(self._new.bucket_numel[: action.bucket])
        if action.chunk is not None:
            first += action.chunk * self._new.chunk_numel
        numel = self._new.numel(action)
        key = (action.kind, first, numel, action.backward)
        if key not in self._memory:
            self._memory[key] = self._between(action, first, first + numel)
        return self._memory[key]

    def _between(self, action: Action, first: int, last: int) -> float:
        total_s, at = 0.0, 0
        for bucket, numel in enumerate(self._old.bucket_numel):
            overlap = min(last, at + numel) - max(first, at)
            if overlap > 0:
                total_s += self._bucket_s(action, bucket) * overlap / numel
            at += numel
        return total_s

    def _bucket_s(self, action: Action, bucket: int) -> float:
        if action.chunk is None:
            return self._cost.seconds(Action(action.kind, bucket, None, action.backward))
        chunks = -(-self._old.bucket_numel[bucket] // self._old.chunk_numel)
        return sum(self._cost.seconds(Action(action.kind, bucket, chunk)) for chunk in range(chunks))


def layout_of(plan: StepPlan, backwards: int) -> Layout:
    """The layout that ``plan`` was made from, as far as its actions tell: for building another policy's plan."""
    chunks: dict[int, int] = {}
    for action in plan.actions:
        if action.bucket is not None:
            chunks[action.bucket] = max(chunks.get(action.bucket, 1), (action.chunk or 0) + 1)
    count = len(chunks)
    return Layout(
        chunks=tuple(chunks[bucket] for bucket in range(count)),
        slots=min((staging.slots for staging in plan.staging), default=1),
        workers=next((lane.capacity for lane in plan.lanes if lane.name == "cpu"), 1),
        clip=plan.clip,
        backwards=backwards,
        backward_order=_order(plan, "bwd", count),
        forward_order=_order(plan, "fwd", count),
        bucket_bytes=plan.bucket_bytes,
    )


def _order(plan: StepPlan, kind: str, count: int) -> tuple[int, ...]:
    found = tuple(action.bucket for action in plan.actions if action.kind == kind and action.bucket is not None)
    return found if sorted(found) == list(range(count)) else ()
