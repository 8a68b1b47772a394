"""Plans that a user has edited run for real: an overlap taken away, nodes of one's own, failures in them."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import zoff_async as zoff
from tests.runtime.scenes import (
    LATE,
    PATIENCE_S,
    Beside,
    Noted,
    Stage,
    assert_same_bits,
    at_stage,
    closing,
    odd_loss,
    play,
    wait_until,
    within,
)

SHORT = Stage(steps=6, bucket_bytes=200, chunk_numel=13)


def one_per_bucket(layout: zoff.Layout, base: Any, run: Any, *, before: str | None) -> zoff.StepPlan:
    """The base policy's plan with a node ``ema:b`` behind each upload (and before the next forward)."""
    plan = base(layout)
    for bucket in range(layout.buckets):
        after = f"h2d:{bucket}"
        plan = plan.add(f"ema:{bucket}", after=after, before=() if before is None else f"{before}:{bucket}@+1", run=run)
    return plan


@pytest.mark.parametrize(
    ("base", "kinds"),
    [
        (zoff.overlap, ("adam", "h2d")),
        (zoff.overlap, ("d2h", "acc")),
        (zoff.overlap, ("h2d", "d2h")),
        (zoff.in_backward, ("adam", "h2d")),
        (zoff.in_backward, ("acc", "adam")),
        (zoff.serial, ("adam", "h2d")),
    ],
)
def test_an_overlap_that_is_taken_away_changes_no_bit(base, kinds):
    stage = at_stage(SHORT, policy=lambda layout: base(layout).serialize(*kinds), faults=LATE, gated=True)

    assert_same_bits(play(stage), play(stage.oracle()))


def test_serialized_kinds_never_run_side_by_side():
    """What the timeline says of adam and h2d under serialize("adam", "h2d")."""
    stage = at_stage(SHORT, policy=lambda layout: zoff.overlap(layout).serialize("adam", "h2d"), faults=LATE)
    model = stage.model()
    optimizer = stage.optimizer(model)
    with closing(optimizer):
        for step in range(4):
            odd_loss(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.synchronize()
        spans = optimizer.timeline.spans
        adam = [span for span in spans if span.action.kind == "adam" and span.end_s - span.start_s > 0]
        uploads = [span for span in spans if span.action.kind == "h2d"]
        assert len(adam) > 20
        assert len(uploads) > 10
        assert not [(a, u) for a in adam for u in uploads if a.start_s < u.end_s and u.start_s < a.end_s]


def test_without_a_rule_that_the_validator_can_spare_the_numbers_stay():
    """The slot-reuse edges of a plan with a slot for every bucket may go."""

    def roomy(layout: zoff.Layout) -> zoff.StepPlan:
        return zoff.overlap(replace(layout, slots=layout.buckets))

    stage = at_stage(SHORT, policy=roomy, slots=64)

    assert_same_bits(play(stage), play(stage.oracle()))


@pytest.mark.parametrize("base", [zoff.overlap, zoff.in_backward, zoff.delayed, zoff.serial])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("before", [None, "fwd"])
def test_an_ema_node_a_bucket_runs_once_a_step_and_changes_no_bit(base, gated, before):
    """It is called once a bucket and step, in order, with the step's context, whatever the policy."""
    ran: list[tuple[int, int]] = []

    async def ema(action: zoff.Action, step: Any) -> None:
        await asyncio.sleep(0)
        assert step.context is not None
        ran.append((action.bucket, step.index))

    stage = at_stage(SHORT, policy=lambda layout: one_per_bucket(layout, base, ema, before=before), gated=gated)
    within(PATIENCE_S, lambda: None)
    got = within(3 * PATIENCE_S, lambda: play(stage))

    assert_same_bits(got, play(at_stage(stage, policy=base, gated=False)))
    buckets = {bucket for bucket, _ in ran}
    assert len(ran) == len(set(ran))
    for bucket in buckets:
        steps = [index for b, index in ran if b == bucket]
        assert steps == sorted(steps)
        assert len(steps) >= SHORT.steps


@pytest.mark.parametrize("base", [zoff.overlap, zoff.in_backward])
@pytest.mark.parametrize("gated", [False, True])
def test_a_forward_waits_for_a_node_before_it(base, gated):
    """A node between an upload and the next forward is over when the forward reads, or when step() returns."""
    state = {"open": False}
    go_on = threading.Event()
    entered = threading.Event()

    async def slow(action: zoff.Action, step: Any) -> None:
        entered.set()
        await asyncio.get_running_loop().run_in_executor(None, go_on.wait, PATIENCE_S)
        state["open"] = True

    model = nn.Linear(4, 4)
    optimizer = zoff.OffloadAdamW(
        model.parameters(),
        model=model if gated else None,
        policy=lambda layout: base(layout).add("stat", after="h2d", before="fwd:0@+1", run=slow),
        config=zoff.OffloadConfig(event_loop="asyncio", workers=1),
    )
    with closing(optimizer):
        model(torch.ones(1, 4)).sum().backward()
        assert base is zoff.overlap or entered.wait(PATIENCE_S)
        stepping = Beside(optimizer.step)
        reading = Beside(lambda: (stepping.result(), model(torch.ones(1, 4)), state["open"])[2])
        assert entered.wait(PATIENCE_S)
        assert not reading.over.wait(0.1)
        go_on.set()

        assert reading.result()


def test_a_node_that_is_over_before_step_does_not_hold_the_next_forward():
    """Adam inside backward: the node has run when step() comes, and nobody waits for it any more."""
    over = threading.Event()

    async def quick(action: zoff.Action, step: Any) -> None:
        over.set()

    model = nn.Linear(4, 4)
    optimizer = zoff.OffloadAdamW(
        model.parameters(),
        model=model,
        policy=lambda layout: zoff.in_backward(layout).add("stat", after="h2d", before="fwd:0@+1", run=quick),
        config=zoff.OffloadConfig(event_loop="asyncio", workers=1),
    )
    with closing(optimizer):
        for _ in range(3):
            over.clear()
            within(PATIENCE_S, lambda: model(torch.ones(1, 4)).sum().backward())
            assert over.wait(PATIENCE_S)
            within(PATIENCE_S, optimizer.step)
            optimizer.zero_grad()
        within(PATIENCE_S, optimizer.synchronize)
        within(PATIENCE_S, lambda: model(torch.ones(1, 4)))


def test_a_node_inside_the_update_sees_the_bucket_that_was_just_updated():
    """A node between Adam and the upload of a bucket: the old weights are still in the model, the update is done."""
    seen: list[tuple[int, bool]] = []
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    weights = list(model.parameters())
    old: list[Any] = []

    async def look(action: zoff.Action, step: Any) -> None:
        parameter = weights[::-1][action.bucket]
        seen.append((action.bucket, torch.equal(parameter, old[::-1][action.bucket])))

    def policy(layout: zoff.Layout) -> zoff.StepPlan:
        plan = zoff.overlap(layout)
        for bucket in range(layout.buckets):
            plan = plan.add(f"look:{bucket}", after=f"adam:{bucket}", before=f"h2d:{bucket}", run=look)
        return plan

    optimizer = zoff.OffloadAdamW(
        model.parameters(), policy=policy, config=zoff.OffloadConfig(bucket_bytes=1, event_loop="asyncio")
    )
    with closing(optimizer):
        for _ in range(2):
            old = [w.detach().clone() for w in weights]
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            assert not any(torch.equal(w, o) for w, o in zip(weights, old, strict=True))

        assert sorted(seen) == [(0, True), (0, True), (1, True), (1, True)]


@pytest.mark.parametrize("place", ["before adam", "after h2d"])
def test_a_node_that_raises_is_told_as_itself(place):
    """Before the update it leaves the last step whole; behind the uploads it leaves nothing torn either."""
    error = ValueError("a node of the user's")
    fail = threading.Event()

    async def node(action: zoff.Action, step: Any) -> None:
        if fail.is_set():
            fail.clear()
            raise error

    def policy(layout: zoff.Layout) -> zoff.StepPlan:
        where = {"after": "norm", "before": "adam"} if place == "before adam" else {"after": "h2d"}
        return zoff.overlap(layout).add("stat", run=node, **where)

    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = zoff.OffloadAdamW(model.parameters(), policy=policy)
    with closing(optimizer):

        def step() -> None:
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        step()
        before = optimizer.master(model.weight)
        fail.set()
        with pytest.raises(ValueError) as caught:
            step()
            optimizer.synchronize()
        assert caught.value is error
        within(PATIENCE_S, optimizer.zero_grad)
        after = optimizer.master(model.weight)
        assert torch.equal(after, model.weight)
        assert torch.equal(after, before) == (place == "before adam")
        step()
        optimizer.synchronize()


def test_a_policy_that_returns_no_plan_is_refused():
    with pytest.raises(TypeError) as caught:
        zoff.OffloadAdamW(nn.Linear(2, 2).parameters(), policy=lambda layout: None)

    assert str(caught.value) == "policy must return a StepPlan, got NoneType"


def test_uploads_follow_the_order_in_which_the_forward_reads():
    """The module that is registered last is read first: from the second step on its bucket is uploaded first."""

    class Backwards(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.second, self.first = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)

        def forward(self, x: Any) -> Any:
            return self.second(torch.tanh(self.first(x)))

    model = Backwards()
    device = Noted()
    optimizer = zoff.OffloadAdamW(
        model.parameters(), model=model, config=zoff.OffloadConfig(bucket_bytes=1, workers=1, device=device)
    )
    with closing(optimizer):
        for _ in range(4):
            model(torch.ones(1, 4)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.synchronize()
        wait_until(lambda: device.enqueued_h2d == 8)
        last = max(span.step for span in optimizer.timeline.spans if span.action.kind == "h2d")
        uploads = [s.action.bucket for s in optimizer.timeline.spans if s.action.kind == "h2d" and s.step == last]
        assert uploads == [0, 1]  # bucket 0 holds what was registered last
