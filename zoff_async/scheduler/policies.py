"""Policies: which overlaps a step allows. Each is a pure function from a layout to a checked plan.

All share one data path a bucket, forward -> backward -> d2h -> acc -> adam -> h2d -> next forward, and
differ in what waits for what. On the cpu lane ``acc`` goes before ``norm`` before ``adam``: an ``acc`` is
short and frees a copy slot, so putting it behind a queue of Adam chunks would stall the copies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TypeAlias

from zoff_async.errors import PlanError
from zoff_async.scheduler import passes
from zoff_async.scheduler.layout import Layout
from zoff_async.scheduler.plan import StepPlan
from zoff_async.scheduler.validate import validate

Policy: TypeAlias = Callable[[Layout], StepPlan]


def serial(layout: Layout) -> StepPlan:
    """Everything in order, nothing overlaps: the oracle that every exact policy equals bit for bit.

    Any number of backwards. Between two backwards of one step autograd cannot be held, so the copies of
    one backward may still run in the next forward.
    """
    plan = _copied(replace(layout, backwards=None), "serial", freed_by="acc")
    order = layout.forward_order
    plan = passes.norm(plan, layout, "norm-barrier")
    plan = passes.norm_barrier(passes.update(plan, layout, order))
    plan = passes.uploads(plan, order)
    plan = passes.gradient_store(passes.upload_slots(plan, layout, order))
    return _checked(passes.one_after_another(plan, layout))


def overlap(layout: Layout) -> StepPlan:
    """Copies during backward; after the norm, Adam and uploads in the order in which the next forward reads.

    Any number of backwards; clipping and loss scaling work.
    """
    plan = _copied(replace(layout, backwards=None), "overlap", freed_by="acc")
    order = layout.forward_order
    plan = passes.norm(plan, layout, "norm-barrier")
    plan = passes.norm_barrier(passes.update(plan, layout, order))
    plan = passes.uploads(plan, order)
    return _checked(passes.gradient_store(passes.upload_slots(plan, layout, order)))


def in_backward(layout: Layout) -> StepPlan:
    """Adam right behind each bucket's last gradient, inside backward; exact, but it cannot clip.

    With one backward a step there is no gradient store: Adam reads the copy slot. Adam and uploads go in
    the order in which gradients arrive, for a slot is passed on in that order; where every bucket has a slot
    of its own, in the order in which the next forward needs them.

    Raises:
        PlanError: if ``layout.clip`` is set.
    """
    if layout.clip:
        raise PlanError(
            "policy 'in_backward' cannot clip: it updates the first buckets before the last gradients exist, "
            "and with them the global norm; use policy='overlap', or drop max_norm and the loss scaler"
        )
    layout = replace(layout, backwards=layout.backwards or 1)
    stored = layout.backwards != 1
    order = layout.forward_order if layout.slots >= layout.buckets else layout.backward_order
    plan = passes.accumulation(passes.gradient_copies(passes.compute(layout, "in_backward"), layout), layout)
    plan = passes.update_after_gradient(passes.update(plan, layout, order))
    plan = passes.uploads(plan, order)
    plan = passes.uploads_after_backward(plan, order)
    plan = passes.norm(plan, layout, "norm-report")
    plan = passes.copy_slots(plan, layout, freed_by="acc" if stored else "adam")
    plan = passes.upload_slots(plan, layout, order)
    if stored:
        plan = passes.gradient_store(plan)
    return _checked(replace(plan, closes="last_backward"))


def delayed(layout: Layout) -> StepPlan:
    """Adam applies the gradient of the step before, beside this step's forward and backward; stale by one.

    The gradient, its norm and its decision to skip travel together. Uploads have a slot for every bucket,
    since each waits for this step's backward to finish with the old weights. Adam goes in the order in which
    the next gradients arrive, since it makes room for them; uploads in the order of the next forward. With a
    declared number of backwards, uploads begin while the last one is still running.
    """
    order = layout.backward_order
    plan = _copied(layout, "delayed", freed_by="acc")
    plan = passes.norm(plan, layout, "norm-barrier")
    plan = passes.norm_barrier(passes.update(plan, layout, order, part="open"), lag=1)
    plan = passes.gradient_store(plan, lag=0)
    plan = passes.uploads_after_backward(passes.uploads(plan, layout.forward_order), layout.forward_order)
    plan = passes.upload_slots(plan, replace(layout, slots=layout.buckets), order)
    return _checked(replace(plan, stale=1, closes="step" if layout.backwards is None else "last_backward"))


def delayed_flush(layout: Layout) -> StepPlan:
    """The end of a delayed run: apply the pending gradient and upload, with no forward or backward.

    Open and close it behind a delayed step and wait until it is done; it has no edges into a next step.
    """
    plan = StepPlan(
        name="delayed_flush",
        actions=(),
        edges=(),
        kinds=(),
        lanes=passes.compute(layout, "").lanes,
        clip=layout.clip,
        stale=1,
        bucket_bytes=layout.bucket_bytes,
    )
    order = layout.forward_order
    plan = passes.uploads(passes.update(plan, layout, order, part="open"), order)
    inside = tuple(edge for edge in plan.edges if not edge.after.lag)
    return _checked(replace(plan, edges=inside))


def _copied(layout: Layout, name: str, *, freed_by: str) -> StepPlan:
    """What most policies share: backward, copies, sums, and copy slots."""
    plan = passes.gradient_copies(passes.compute(layout, name), layout)
    return passes.copy_slots(passes.accumulation(plan, layout), layout, freed_by)


def _checked(plan: StepPlan) -> StepPlan:
    validate(plan)
    return plan


#: What a policy's name stands for.
POLICIES: Mapping[str, Policy] = MappingProxyType(
    {"serial": serial, "overlap": overlap, "in_backward": in_backward, "delayed": delayed}
)


def policy(name_or_function: str | Policy) -> Policy:
    """The policy of that name; a function is taken as it is.

    Raises:
        ValueError: if the name is unknown, or belongs to a policy that is not there yet.
        TypeError: if it is neither a name nor a function.
    """
    if callable(name_or_function):
        return name_or_function
    if not isinstance(name_or_function, str):
        raise TypeError(f"policy is {name_or_function!r}: expected a name or a function from a layout to a plan")
    known = ", ".join(POLICIES)
    if name_or_function == "speculative":
        raise ValueError(f"policy 'speculative' is not there yet; use one of {known}")
    if name_or_function not in POLICIES:
        raise ValueError(f"policy {name_or_function!r} is unknown; use one of {known}, or your own function")
    return POLICIES[name_or_function]
