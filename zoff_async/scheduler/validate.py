"""The rules that every plan keeps, and the message that shows where one does not.

First the form (lanes, parts, edges, cycles), then the data: nothing is read before it exists, nothing is
overwritten while it is read. A data rule holds if any chain of edges enforces it, not just one edge.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from zoff_async.errors import PlanError
from zoff_async.scheduler.action import Action, Staging
from zoff_async.scheduler.plan import PARTS, Link, StepPlan
from zoff_async.scheduler.reach import Reach, inside, topological_order


def validate(plan: StepPlan) -> None:
    """Check every rule.

    Raises:
        PlanError: at the first rule that is broken; the message shows the plan around and marks the place.
    """
    _check_form(plan)
    links = plan.links
    _check_edges(plan, links)
    order = topological_order(plan)
    if len(order) < len(plan.actions):
        raise PlanError(_cycle_message(plan, links, set(order)))
    reach = Reach(plan, order)
    _check_data(plan, reach)
    for staging in plan.staging:
        _check_slots(plan, reach, staging)


# Form


def _check_form(plan: StepPlan) -> None:
    lanes = [lane.name for lane in plan.lanes]
    for kind in plan.kinds:
        if kind.lane not in lanes:
            raise PlanError(
                f"kind {kind.name!r} runs on lane {kind.lane!r}, which plan {plan.name!r} does not have; "
                f"its lanes are {', '.join(lanes)}"
            )
        if kind.part not in PARTS:
            raise PlanError(f"kind {kind.name!r} is in part {kind.part!r}; parts are {', '.join(PARTS)}")
    for action in plan.actions:
        if action.kind not in plan.lane_of:
            raise PlanError(
                f"{action} is of kind {action.kind!r}, which has no lane; add a Kind with its lane and part"
                f"{around(plan, action)}"
            )
        if action.backward or action.lag:
            raise PlanError(
                f"{action} is listed with a backward or a step of its own: a plan is a template, so list "
                f"{action.template()} and put the rest on edges{around(plan, action)}"
            )
    if len(plan.index) < len(plan.actions):
        twice = next(a for i, a in enumerate(plan.actions) if plan.index[a] != i)
        raise PlanError(f"{twice} is listed twice{around(plan, twice)}")
    if plan.closes not in ("step", "last_backward"):
        raise PlanError(f"closes is {plan.closes!r}; a step closes at 'step' or at the 'last_backward'")
    if plan.closes == "last_backward" and plan.backwards is None:
        raise PlanError("closes is 'last_backward', but backwards is None: declare how many backwards a step has")


def _check_edges(plan: StepPlan, links: tuple[Link, ...]) -> None:
    parts = [PARTS.index(plan.parts[action.kind]) for action in plan.actions]
    external = [action.kind in plan.external for action in plan.actions]
    early_close = plan.closes == "last_backward"
    for position, (before, after, backward, lag) in enumerate(links):
        if backward or lag:
            if backward + lag > 1:
                raise _edge_error(plan, position, "reaches further than the next backward or the next step")
            if backward and not parts[before] == parts[after] == 1:
                raise _edge_error(plan, position, "goes into the next backward, but not between two of its actions")
        elif parts[before] > parts[after] and not (parts[before] == 2 and parts[after] == 1 and early_close):
            raise _edge_error(
                plan, position, f"waits for the {PARTS[parts[before]]} part, which comes to life after it"
            )
        if external[after] and not external[before]:
            entry = plan.external[0]
            if not lag or plan.actions[after].kind != entry:
                raise _edge_error(
                    plan,
                    position,
                    f"would hold back autograd, which runs {' and '.join(plan.external)} by itself; "
                    f"only {entry} of the next step ({entry}:...@+1) can be held",
                )


def _edge_error(plan: StepPlan, position: int, why: str) -> PlanError:
    edge = plan.edges[position]
    return PlanError(f"edge {edge} (rule {edge.rule}) {why}{around(plan, edge.after.template())}")


def _cycle_message(plan: StepPlan, links: tuple[Link, ...], sorted_out: set[int]) -> str:
    """Walk against the edges among what hangs on the cycle until an action comes again."""
    stuck = [link for link in inside(links) if link.before not in sorted_out]
    source = {link.after: link.before for link in reversed(stuck)}
    start = min(i for i in source if i not in sorted_out)
    seen = [start]
    while source[seen[-1]] not in seen:
        seen.append(source[seen[-1]])
    ring = seen[seen.index(source[seen[-1]]) :][::-1]
    first = ring.index(min(ring))
    ring = ring[first:] + ring[:first]
    names = [str(plan.actions[i]) for i in (*ring, ring[0])]
    rules = {
        (link.before, link.after): edge.rule
        for link, edge in zip(links, plan.edges, strict=True)
        if not link.backward and not link.lag
    }
    steps = [rules[pair] for pair in zip(ring, (*ring[1:], ring[0]), strict=True)]
    return (
        f"these actions wait for each other: {' -> '.join(names)} (rules {', '.join(dict.fromkeys(steps))}); "
        f"take one of the edges away{around(plan, plan.actions[ring[0]])}"
    )


# Data


class Need(NamedTuple):
    """``kind`` may start only when ``before`` of its own bucket is done (``every``: of all buckets)."""

    kind: str
    before: str
    harm: str
    every: bool = False
    across: str = "step"  # "step": within it; "next step", "next backward": from the one before


def _needs(plan: StepPlan) -> Iterator[Need]:
    """What the data asks for, whatever the policy."""
    applied = "next step" if plan.stale else "step"
    yield Need("d2h", "bwd", "it would copy a gradient that does not exist yet")
    yield Need("acc", "d2h", "it would add a gradient that has not arrived yet")
    yield Need("adam", "acc", "it would apply a gradient that is not complete yet", across=applied)
    if plan.clip:
        yield Need("adam", "norm", "it would apply a gradient before its clip factor is known", True, applied)
    yield Need("norm", "acc", "the norm would miss its squares", every=True)
    yield Need("h2d", "adam", "it would upload weights that are not updated yet")
    yield Need("h2d", "bwd", "it would overwrite weights that backward still reads")
    yield Need("fwd", "h2d", "it would read weights that are still on their way", across="next step")
    yield Need("adam", "adam", "two updates would write the same moments", across="next step")
    if any(staging.freed_by == "acc" for staging in plan.staging):
        overwritten = "step" if plan.stale else "next step"
        yield Need("acc", "adam", "it would overwrite a gradient that Adam still reads", across=overwritten)
    if plan.backwards != 1:
        yield Need("acc", "acc", "two backwards would add to the same gradient at once", across="next backward")


def _check_data(plan: StepPlan, reach: Reach) -> None:
    members: dict[str, dict[int | None, list[int]]] = {}
    for i, action in enumerate(plan.actions):
        members.setdefault(action.kind, {}).setdefault(action.bucket, []).append(i)
    repeats = any(kind in members for kind in plan.external)  # otherwise a plan that stands alone, once
    for need in _needs(plan):
        if need.kind not in members or need.before not in members or (need.across != "step" and not repeats):
            continue
        certain = _certain(reach, need.across)
        own_chunk = need.kind == need.before
        wanted = _masks(members[need.before])
        everything = sum(wanted.values())
        for bucket, positions in members[need.kind].items():
            mask = everything if need.every else wanted.get(bucket)
            if mask is None:
                action = plan.actions[positions[0]]
                raise PlanError(
                    f"{action} needs {need.before}:{bucket}, which is not in the plan: {need.harm}"
                    f"{around(plan, action)}"
                )
            for i in positions:
                asked = 1 << i if own_chunk else mask
                if asked & certain[i] != asked:
                    raise _data_error(plan, need, i, asked & ~certain[i])


def _certain(reach: Reach, across: str) -> list[int]:
    if across == "step":
        return reach.now
    return reach.next_step if across == "next step" else reach.next_backward


def _masks(positions: Mapping[int | None, list[int]]) -> dict[int | None, int]:
    return {bucket: sum(1 << i for i in found) for bucket, found in positions.items()}


def _data_error(plan: StepPlan, need: Need, i: int, missing: int) -> PlanError:
    action = plan.actions[i]
    before = plan.actions[(missing & -missing).bit_length() - 1]
    earlier = {"step": "", "next step": " of the step before", "next backward": " of the backward before"}
    return PlanError(
        f"{action} may start before {before}{earlier[need.across]} is done: {need.harm}{around(plan, action)}"
    )


def _check_slots(plan: StepPlan, reach: Reach, staging: Staging) -> None:
    """In the order of filling, the k-th bucket may take a slot when the (k - slots)-th has left it."""
    filling, freeing = _by_bucket(plan, staging.filled_by), _by_bucket(plan, staging.freed_by)
    order = list(filling)
    slots = min(staging.slots, len(order))
    for position, bucket in enumerate(order):
        earlier = order[position - slots]
        if position >= slots:
            scopes = ["step"]
        else:
            scopes = ["next step"]
            if plan.backwards != 1 and plan.parts[staging.filled_by] == "backward":
                scopes.append("next backward")
        mask = sum(1 << i for i in freeing.get(earlier, ()))
        for scope in scopes:
            certain = _certain(reach, scope)
            for i in filling[bucket]:
                if mask & certain[i] != mask:
                    raise _slot_error(plan, staging, i, mask & ~certain[i], scope)


def _slot_error(plan: StepPlan, staging: Staging, i: int, missing: int, scope: str) -> PlanError:
    action = plan.actions[i]
    reader = plan.actions[(missing & -missing).bit_length() - 1]
    earlier = {"step": "", "next step": " of the step before", "next backward": " of the backward before"}[scope]
    return PlanError(
        f"{action} may overwrite a {staging.name} slot that {reader}{earlier} still reads: there are "
        f"{staging.slots} slots, filled by {staging.filled_by} and freed by {staging.freed_by}; "
        f"keep the edges of rule slot-reuse{around(plan, action)}"
    )


def _by_bucket(plan: StepPlan, kind: str) -> dict[int | None, list[int]]:
    found: dict[int | None, list[int]] = {}
    for i, action in enumerate(plan.actions):
        if action.kind == kind:
            found.setdefault(action.bucket, []).append(i)
    return found


# The place


def around(plan: StepPlan, action: Action, reach: int = 6) -> str:
    """A line with the plan's actions around ``action``, which is marked ``>>adam:3.0<<``."""
    place = plan.actions.index(action)
    first, last = max(0, place - reach), min(len(plan.actions), place + reach + 1)
    shown = [f">>{a}<<" if a == action else str(a) for a in plan.actions[first:last]]
    dots = ["..."] if first else [], ["..."] if last < len(plan.actions) else []
    return "\n  " + " ".join([*dots[0], *shown, *dots[1]])
