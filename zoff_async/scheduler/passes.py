"""Lowering passes: each takes a plan and gives one with more actions or edges, and does one thing.

A policy starts from ``compute`` (what autograd does anyway) and adds copies, sums, the norm, the update,
the uploads and the edges that keep slots, stores and weights from being overwritten while they are read.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise

from zoff_async.scheduler.action import Action, Edge, Kind, Lane, Staging
from zoff_async.scheduler.layout import Layout
from zoff_async.scheduler.plan import StepPlan

NORM = Action("norm")


def compute(layout: Layout, name: str) -> StepPlan:
    """Forward and backward of every bucket in program order: what autograd does without this package."""
    fwd = [Action("fwd", bucket) for bucket in layout.forward_order]
    bwd = [Action("bwd", bucket) for bucket in layout.backward_order]
    actions = (*fwd, *bwd)
    edges = [Edge(before, after, "program-order") for before, after in pairwise(actions)]
    if layout.backwards != 1:
        edges.append(Edge(bwd[-1], fwd[0].later(backward=1), "program-order"))
    edges.append(Edge(bwd[-1], fwd[0].later(lag=1), "program-order"))
    return StepPlan(
        name=name,
        actions=actions,
        edges=tuple(edges),
        kinds=(Kind("fwd", "compute", "backward"), Kind("bwd", "compute", "backward")),
        lanes=(Lane("compute"), Lane("d2h"), Lane("cpu", layout.workers), Lane("h2d"), Lane("net")),
        clip=layout.clip,
        backwards=layout.backwards,
        bucket_bytes=layout.bucket_bytes,
    )


def gradient_copies(plan: StepPlan, layout: Layout) -> StepPlan:
    """Each bucket's gradients go to the host as soon as its backward has produced them."""
    order = layout.backward_order
    return _grown(
        plan,
        Kind("d2h", "d2h", "backward"),
        [Action("d2h", bucket) for bucket in order],
        [Edge(Action("bwd", bucket), Action("d2h", bucket), "gradient") for bucket in order],
    )


def accumulation(plan: StepPlan, layout: Layout) -> StepPlan:
    """Copied gradients are checked, squared and added to the host's store, backward after backward."""
    actions = [Action("acc", bucket) for bucket in layout.backward_order]
    edges = [Edge(Action("d2h", action.bucket), action, "gradient") for action in actions]
    if plan.backwards != 1:
        edges += [Edge(action, action.later(backward=1), "accumulate-in-order") for action in actions]
    return _grown(plan, Kind("acc", "cpu", "backward"), actions, edges)


def norm(plan: StepPlan, layout: Layout, rule: str) -> StepPlan:
    """The global norm, the clip factor and the decision to skip come after every bucket's squares."""
    edges = [Edge(Action("acc", bucket), NORM, rule) for bucket in layout.backward_order]
    return _grown(plan, Kind("norm", "cpu", "close"), [NORM], edges)


def update(plan: StepPlan, layout: Layout, order: Sequence[int], part: str = "close") -> StepPlan:
    """Adam over the chunks of each bucket; a chunk's steps follow one another."""
    actions = [Action("adam", bucket, chunk) for bucket in order for chunk in range(layout.chunks[bucket])]
    edges = [Edge(action, action.later(lag=1), "state-order") for action in actions]
    return _grown(plan, Kind("adam", "cpu", part), actions, edges)


def norm_barrier(plan: StepPlan, *, lag: int = 0) -> StepPlan:
    """No chunk is updated before the norm is known; ``lag=1``: the norm of the step before."""
    adam = _of_kind(plan, "adam")
    return _linked(plan, [Edge(NORM, action.later(lag=lag), "norm-barrier") for action in adam])


def update_after_gradient(plan: StepPlan) -> StepPlan:
    """A chunk is updated as soon as its own bucket's gradient is complete, whatever the norm will be."""
    adam = _of_kind(plan, "adam")
    return _linked(plan, [Edge(Action("acc", action.bucket), action, "gradient") for action in adam])


def uploads(plan: StepPlan, order: Sequence[int]) -> StepPlan:
    """Updated buckets go back to the device, and the next forward waits for each bucket's own upload."""
    edges = [Edge(action, Action("h2d", action.bucket), "update") for action in _of_kind(plan, "adam")]
    edges += [Edge(Action("h2d", bucket), Action("fwd", bucket, lag=1), "weights-before-forward") for bucket in order]
    return _grown(plan, Kind("h2d", "h2d", "close"), [Action("h2d", bucket) for bucket in order], edges)


def uploads_after_backward(plan: StepPlan, order: Sequence[int]) -> StepPlan:
    """A bucket's weights are replaced only when every backward of the step has finished with them."""
    edges = [Edge(Action("bwd", bucket), Action("h2d", bucket), "weights-in-use") for bucket in order]
    return _linked(plan, edges)


def gradient_store(plan: StepPlan, *, lag: int = 1) -> StepPlan:
    """A stored gradient is overwritten only after Adam has read it; ``lag=0``: Adam of the same step."""
    adam = _of_kind(plan, "adam")
    return _linked(plan, [Edge(a, Action("acc", a.bucket, lag=lag), "gradient-store") for a in adam])


def copy_slots(plan: StepPlan, layout: Layout, freed_by: str) -> StepPlan:
    """The k-th gradient copy waits until the slot of the (k - slots)-th has been read.

    Counted over backwards and steps; when Adam reads the slot (``freed_by="adam"``) there is one backward.
    """
    order, slots = layout.backward_order, min(layout.slots, layout.buckets)
    readers = _by_bucket(plan, freed_by)
    edges = []
    for position, bucket in enumerate(order):
        target, reader = Action("d2h", bucket), readers[order[position - slots]]
        if position >= slots:
            edges += [Edge(action, target, "slot-reuse") for action in reader]
            continue
        if plan.backwards != 1:
            edges += [Edge(action, target.later(backward=1), "slot-reuse") for action in reader]
        edges += [Edge(action, target.later(lag=1), "slot-reuse") for action in reader]
    return _staged(_linked(plan, edges), Staging("d2h", slots, "d2h", freed_by))


def upload_slots(plan: StepPlan, layout: Layout, order: Sequence[int]) -> StepPlan:
    """Adam writes into an upload slot only after the copy that read it before is done."""
    slots = min(layout.slots, layout.buckets)
    writers = _by_bucket(plan, "adam")
    edges = []
    for position, bucket in enumerate(order):
        upload, lag = Action("h2d", order[position - slots]), 0 if position >= slots else 1
        edges += [Edge(upload, action.later(lag=lag), "slot-reuse") for action in writers[bucket]]
    return _staged(_linked(plan, edges), Staging("h2d", slots, "adam", "h2d"))


def one_after_another(plan: StepPlan, layout: Layout) -> StepPlan:
    """The oracle's total order: behind backward everything runs alone, and the next forward waits for all."""
    order, forward = layout.backward_order, layout.forward_order
    line = [action for bucket in order for action in (Action("d2h", bucket), Action("acc", bucket))]
    line.append(NORM)
    # Upload right behind each bucket's chunks: one upload slot is then enough.
    chunks = _by_bucket(plan, "adam")
    for upload in _of_kind(plan, "h2d"):
        line += [*chunks[upload.bucket], upload]
    edges = [Edge(Action("bwd", bucket), line[0], "serial") for bucket in order]
    edges += [Edge(before, after, "serial") for before, after in pairwise(line)]
    if plan.backwards != 1:
        last_acc = line[2 * len(order) - 1]
        edges.append(Edge(last_acc, line[0].later(backward=1), "serial"))
    edges += [Edge(line[-1], Action("fwd", bucket, lag=1), "serial") for bucket in forward]
    return _linked(plan, edges)


def _of_kind(plan: StepPlan, kind: str) -> list[Action]:
    return [action for action in plan.actions if action.kind == kind]


def _by_bucket(plan: StepPlan, kind: str) -> dict[int | None, list[Action]]:
    found: dict[int | None, list[Action]] = {}
    for action in _of_kind(plan, kind):
        found.setdefault(action.bucket, []).append(action)
    return found


def _grown(plan: StepPlan, kind: Kind, actions: Iterable[Action], edges: Iterable[Edge]) -> StepPlan:
    return replace(plan, kinds=(*plan.kinds, kind), actions=(*plan.actions, *actions), edges=(*plan.edges, *edges))


def _linked(plan: StepPlan, edges: Iterable[Edge]) -> StepPlan:
    return replace(plan, edges=(*plan.edges, *edges))


def _staged(plan: StepPlan, staging: Staging) -> StepPlan:
    return replace(plan, staging=(*plan.staging, staging))
