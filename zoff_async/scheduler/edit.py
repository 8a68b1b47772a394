"""Edits of a plan: take an overlap away, put a node in, drop a rule. Each gives a new, checked plan."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import groupby, pairwise

from zoff_async.errors import PlanError
from zoff_async.scheduler.action import Action, Edge, Kind
from zoff_async.scheduler.plan import Actions, NodeRun, StepPlan
from zoff_async.scheduler.reach import Reach, topological_order
from zoff_async.scheduler.validate import validate


def without(plan: StepPlan, rule: str) -> StepPlan:
    """See ``StepPlan.without``."""
    rules = list(dict.fromkeys(edge.rule for edge in plan.edges))
    if rule not in rules:
        raise PlanError(f"no edge of plan {plan.name!r} has rule {rule!r}; its rules are {', '.join(rules)}")
    smaller = replace(plan, edges=tuple(edge for edge in plan.edges if edge.rule != rule))
    validate(smaller)
    return smaller


def add(
    plan: StepPlan,
    action: Action | str,
    *,
    after: Actions,
    before: Actions,
    run: NodeRun | None,
    lane: str,
    part: str | None,
) -> StepPlan:
    """See ``StepPlan.add``."""
    node = Action.parse(action) if isinstance(action, str) else action
    if node in plan.index:
        raise PlanError(f"{node} is in plan {plan.name!r} already; give the node a name of its own")
    sources, targets = plan.matching(after), plan.matching(before)
    if not sources and not targets:
        raise PlanError(f"{node} hangs on nothing: give after= or before=, with actions of plan {plan.name!r}")
    for source in sources:
        if source.backward or source.lag:
            raise PlanError(f"after={source}: a node waits for actions of its own backward and step only")
    kind = Kind(node.kind, lane, part or _part(plan, node, sources, targets))
    known = {existing.name: existing for existing in plan.kinds}
    if known.setdefault(node.kind, kind) != kind:
        old = known[node.kind]
        raise PlanError(
            f"{node} would run on lane {lane!r} in part {kind.part!r}, but kind {node.kind!r} runs on lane "
            f"{old.lane!r} in part {old.part!r}; use a kind of its own"
        )
    edges = [Edge(source, node, "node") for source in sources]
    edges += [Edge(node, target, "node") for target in targets]
    edges.append(Edge(node, node.later(lag=1), "node-order"))
    if kind.part == "backward" and plan.backwards != 1:
        edges.append(Edge(node, node.later(backward=1), "node-order"))
    place = min((plan.index[t] for t in targets if t in plan.index), default=len(plan.actions))
    grown = replace(
        plan,
        actions=(*plan.actions[:place], node, *plan.actions[place:]),
        edges=(*plan.edges, *edges),
        kinds=tuple(known.values()),
        node_runs=plan.node_runs if run is None else (*plan.node_runs, (node, run)),
    )
    validate(grown)
    return grown


def _part(plan: StepPlan, node: Action, sources: Iterable[Action], targets: Iterable[Action]) -> str:
    """The latest part that its targets allow: a node that no backward waits for runs once, at the close."""
    if node.kind in plan.parts:
        return plan.parts[node.kind]
    held = {plan.parts[target.kind] for target in targets if not target.lag}
    if "open" in held:
        return "open"
    waits = {plan.parts[source.kind] for source in sources}
    return "backward" if "backward" in held and "close" not in waits else "close"


def serialize(plan: StepPlan, kind_a: str, kind_b: str) -> StepPlan:
    """See ``StepPlan.serialize``."""
    for kind in (kind_a, kind_b):
        if not any(action.kind == kind for action in plan.actions):
            known = dict.fromkeys(action.kind for action in plan.actions)
            raise PlanError(f"plan {plan.name!r} has no {kind!r} to serialize; its kinds are {', '.join(known)}")
    if kind_a == kind_b:
        raise PlanError(f"serialize({kind_a!r}, {kind_b!r}): two different kinds are needed")
    rule = f"serialize:{kind_a}-{kind_b}"
    order = topological_order(plan, lambda i: (int(plan.actions[i].kind == kind_b), i))
    reach = Reach(plan, order)
    runs = [
        list(run)
        for _, run in groupby(
            (i for i in order if plan.actions[i].kind in (kind_a, kind_b)), lambda i: plan.actions[i].kind
        )
    ]
    edges = []
    for earlier, later in pairwise(runs):
        edges += _barrier(plan, earlier, later, reach.now, rule)
    both_wave = plan.parts[kind_a] == plan.parts[kind_b] == "backward"
    for earlier, later in _wraps(plan, runs):
        if both_wave and plan.backwards != 1 and plan.actions[later[0]].kind not in plan.external:
            edges += _barrier(plan, earlier, later, reach.next_backward, rule, backward=1)
        edges += _barrier(plan, earlier, _held(plan, later), reach.next_step, rule, lag=1)
    tighter = replace(plan, edges=(*plan.edges, *edges))
    validate(tighter)
    return tighter


def _wraps(plan: StepPlan, runs: list[list[int]]) -> list[tuple[list[int], list[int]]]:
    """The runs of one step, and those of the next, that nothing separates yet."""
    if plan.actions[runs[0][0]].kind != plan.actions[runs[-1][0]].kind:
        return [(runs[-1], runs[0])]
    return [(runs[-1], runs[1]), (runs[-2], runs[0])]


def _held(plan: StepPlan, run: list[int]) -> list[int]:
    """What can be made to wait: autograd is held at its first kind only."""
    kind, entry = plan.actions[run[0]].kind, plan.external[0]
    if kind == entry or kind not in plan.external:
        return run
    return [i for i, action in enumerate(plan.actions) if action.kind == entry]


def _barrier(
    plan: StepPlan,
    before: list[int],
    after: list[int],
    certain: list[int],
    rule: str,
    backward: int = 0,
    lag: int = 0,
) -> list[Edge]:
    """Edges from each of ``before`` to each of ``after``, except where the plan already sees to it."""
    actions = plan.actions
    return [
        Edge(actions[i], actions[j].later(backward=backward, lag=lag), rule)
        for j in after
        for i in before
        if not certain[j] >> i & 1
    ]
