"""What held a run back that its plan does not say, as edges: the device's memory, and a caller without gates.

A hook of backward waits while more gradients are on the device than its memory is meant for. Without
``model=`` no gate stands before a weight, so ``step()`` returns only when every upload is done. A simulation
without these would promise what the runtime cannot keep.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from zoff_async.scheduler import Action, Edge, StepPlan
from zoff_async.scheduler.reach import topological_order
from zoff_async.trace.timeline import Fact, Timeline

#: Backward of a bucket waited until an earlier one had left the device.
ROOM = "room"
#: The next forward waited for all uploads, since ``step()`` did.
UNGATED = "step-waits-for-uploads"


def limited(plan: StepPlan, facts: Mapping[str, Fact]) -> StepPlan:
    """The plan with an edge for each limit that ``facts`` tell of (``held_buckets``, ``gated``)."""
    held = facts.get("held_buckets")
    plan = _with_room(plan, int(held)) if isinstance(held, int) and not isinstance(held, bool) else plan
    return _ungated(plan) if facts.get("gated") is False else plan


def lived(timeline: Timeline) -> Timeline:
    """The timeline with plans as they were really lived: with these edges."""
    changed: dict[int, StepPlan] = {}
    for plan in timeline.plans.values():
        if id(plan) not in changed:
            changed[id(plan)] = limited(plan, timeline.facts)
    return replace(timeline, plans={step: changed[id(plan)] for step, plan in timeline.plans.items()})


def without_gate_limit(facts: Mapping[str, Fact]) -> dict[str, Fact]:
    """The facts of the same run with ``model=``."""
    return {**facts, "gated": True}


def _with_room(plan: StepPlan, held: int) -> StepPlan:
    """``held`` buckets may be on the device: the hook behind bucket k waits until bucket k - held has left."""
    order = [action.bucket for action in plan.actions if action.kind == "bwd"]
    copies = {action.bucket for action in plan.actions if action.kind == "d2h"}
    edges = [
        Edge(Action("d2h", order[place]), Action("bwd", order[place + held + 1]), ROOM)
        for place in range(len(order) - held - 1)
        if order[place] in copies
    ]
    wider = replace(plan, edges=(*plan.edges, *edges))
    # Where copies wait for the whole backward, a hook never waits for one: none is under way.
    can_run = len(topological_order(wider)) == len(wider.actions)
    return wider if edges and can_run else plan


def _ungated(plan: StepPlan) -> StepPlan:
    first = next((action for action in plan.actions if action.kind == "fwd"), None)
    uploads = [action for action in plan.actions if action.kind == "h2d"]
    if first is None or not uploads:
        return plan
    edges = (Edge(upload, first.later(lag=1), UNGATED) for upload in uploads)
    return replace(plan, edges=(*plan.edges, *edges))
