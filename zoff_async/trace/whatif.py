"""Levers: the measured step simulated again with one thing changed.

A prediction is the measured step less what the simulation says the lever saves: everything the simulation
does not know (hand-overs, the caller's own code) is taken to stay as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from zoff_async.errors import PlanError
from zoff_async.scheduler import POLICIES, Simulation, StepPlan, simulate
from zoff_async.trace.cost import Cost, Regrouped, Scaled, StepCost, layout_of
from zoff_async.trace.limits import limited, without_gate_limit
from zoff_async.trace.timeline import Fact, Pieces, Timeline

#: Actions that one simulation may run: a large plan is simulated over fewer steps.
_MOST_ACTIONS = 20_000

#: Kinds that a lever "twice as fast" speaks of: what it says, and what there is to buy or to change.
FASTER = {
    "d2h": ("D2H twice as fast", "d2h"),
    "h2d": ("H2D twice as fast", "h2d"),
    "adam": ("Adam twice as fast", "host"),
    "compute": ("compute twice as fast", "compute"),
}


@dataclass(frozen=True)
class Lever:
    """What one change would make of the step.

    ``group`` says what kind of change it is (``host``, ``d2h``, ``h2d``, ``compute``, ``policy``, ``buckets``,
    ``model``); ``step_s`` is the predicted step, ``saved`` the share of the measured step that it saves
    (negative if the step gets longer). ``exact`` is False where the update would use stale gradients.
    """

    name: str
    group: str
    step_s: float
    saved: float
    exact: bool = True


@dataclass(frozen=True)
class Measured:
    """A measured step, ready to be simulated again."""

    plan: StepPlan  # the policy's own
    facts: Mapping[str, Fact]  # what limits it besides, see ``limits``
    cost: Cost
    backwards: int
    pieces: Pieces | None
    step_s: float

    def simulate(
        self, plan: StepPlan | None = None, cost: Cost | None = None, facts: Mapping[str, Fact] | None = None
    ) -> Simulation:
        """The steady step of ``plan`` (default: as it was) under the run's limits."""
        limits = self.facts if facts is None else facts
        plan = limited(self.plan if plan is None else plan, limits)
        steps = max(3, min(6, _MOST_ACTIONS // max(1, len(plan.actions))))
        return simulate(plan, cost or self.cost, steps=steps, backwards=self.backwards)


def measured_step(timeline: Timeline, steps: tuple[int, ...], step_s: float) -> Measured:
    """The steady ``steps`` of ``timeline`` as costs and a plan.

    Raises:
        ValueError: if the timeline does not know the plan of the newest of them.
    """
    plan = timeline.plans.get(steps[-1])
    if plan is None:
        raise ValueError(f"the timeline holds no plan for step {steps[-1]}: without one nothing can be simulated")
    spans = [span for span in timeline.spans if span.step in set(steps)]
    backwards = max((span.action.backward for span in spans), default=0) + 1
    return Measured(plan, timeline.facts, StepCost(spans), backwards, timeline.pieces, step_s)


@dataclass(frozen=True)
class _Change:
    """One thing that is different: plan, costs or limits."""

    name: str
    group: str
    plan: StepPlan
    cost: Cost
    facts: Mapping[str, Fact]


def levers(measured: Measured, base: Simulation) -> tuple[Lever, ...]:
    """Everything that is tried, the best first. ``base`` is the simulation of the step as it was."""
    found = []
    for change in _changes(measured):
        simulated = measured.simulate(change.plan, change.cost, change.facts)
        saved_s = base.period_s - simulated.period_s
        step_s = max(simulated.period_s, measured.step_s - saved_s)
        exact = change.plan.exact or not base.plan.exact
        found.append(Lever(change.name, change.group, step_s, 1.0 - step_s / measured.step_s, exact))
    return tuple(sorted(found, key=lambda lever: -lever.saved))


def _changes(measured: Measured) -> Iterator[_Change]:
    plan, cost, facts = measured.plan, measured.cost, measured.facts
    yield from _faster(measured)
    capacity = {lane.name: lane.capacity for lane in plan.lanes}.get("cpu", 1)
    yield _Change("twice the workers", "host", plan.with_capacity("cpu", 2 * capacity), cost, facts)
    if facts.get("gated") is False:
        yield _Change("`model=`", "model", plan, cost, without_gate_limit(facts))
    yield from _policies(measured)
    yield from _bucket_sizes(measured)


def _faster(measured: Measured) -> Iterator[_Change]:
    plan = measured.plan
    kinds = {action.kind for action in plan.actions}
    for kind, (name, group) in FASTER.items():
        halved = dict.fromkeys(plan.external if kind == "compute" else (kind,), 0.5)
        if kinds & set(halved):
            yield _Change(name, group, plan, Scaled(measured.cost, halved), measured.facts)


def _policies(measured: Measured) -> Iterator[_Change]:
    """Every other policy of the same layout; edits and nodes of the user's own are not in it."""
    layout = layout_of(measured.plan, measured.backwards)
    for name, build in POLICIES.items():
        if name in (measured.plan.name, "serial"):
            continue  # serial is never faster: it is the oracle
        try:
            plan = build(layout)
        except PlanError:
            continue  # it cannot do what this run does, clipping for one
        if plan.stale:
            plan = build(replace(layout, backwards=None))  # a stale step closes at step(), as the runtime has it
        yield _Change(f"`{name}`", "policy", plan, measured.cost, measured.facts)


def _bucket_sizes(measured: Measured) -> Iterator[_Change]:
    old, plan = measured.pieces, measured.plan
    build = POLICIES.get(plan.name)
    if old is None or build is None or not _covers(plan, old):
        return
    backwards = None if plan.stale else measured.backwards
    bytes_each = sum(plan.bucket_bytes) / max(1, sum(old.bucket_numel))
    for name, sizes in (
        ("buckets twice as large", _merged(old.bucket_numel)),
        ("buckets half as large", _split(old.bucket_numel)),
    ):
        if len(sizes) == len(old.bucket_numel):
            continue
        new = Pieces(sizes, old.chunk_numel)
        layout = replace(
            layout_of(plan, measured.backwards),
            backwards=backwards,
            chunks=tuple(-(-numel // new.chunk_numel) for numel in sizes),
            backward_order=(),
            forward_order=(),
            bucket_bytes=tuple(round(numel * bytes_each) for numel in sizes) if plan.bucket_bytes else (),
        )
        yield _Change(name, "buckets", build(layout), Regrouped(measured.cost, old, new), measured.facts)


def _covers(plan: StepPlan, pieces: Pieces) -> bool:
    buckets = {action.bucket for action in plan.actions if action.bucket is not None}
    return buckets == set(range(len(pieces.bucket_numel))) and all(numel > 0 for numel in pieces.bucket_numel)


def _merged(sizes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sum(sizes[i : i + 2]) for i in range(0, len(sizes), 2))


def _split(sizes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(part for numel in sizes for part in (numel - numel // 2, numel // 2) if part)
