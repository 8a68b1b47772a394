"""Who waits for what, in words."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from tests.scheduler.virtual_log import Stage
from zoff_async.errors import DeadlockError
from zoff_async.scheduler import Action, Edge, KindCost, Layout, delayed, in_backward, overlap, run_virtual, simulate
from zoff_async.scheduler.story import waiting

LAYOUT = Layout(chunks=(1, 1), slots=1)
EXTERNAL = frozenset({"fwd", "bwd"})


def test_each_action_names_what_it_waits_for():
    stage = Stage(overlap(LAYOUT), external=EXTERNAL)

    async def scene():
        step = stage.executor.open(stage.plan)
        step.complete(Action("bwd", 0))
        await asyncio.sleep(0.1)
        return stage.executor.waiting()

    assert stage.play(scene) == [
        "step 0 waits for its close()",
        "fwd:1@step0 waits for its complete() from outside",
        "bwd:1@step0 waits for its complete() from outside",
        "d2h:0@step0 is running, or ready on lane d2h",
        "d2h:1@step0 waits for bwd:1@step0, acc:0@step0",
        "acc:0@step0 waits for d2h:0@step0",
        "acc:1@step0 waits for d2h:1@step0",
    ]


def test_waits_for_the_step_before_are_named_too():
    stage = Stage(overlap(LAYOUT), external=EXTERNAL)

    async def scene():
        first = stage.executor.open(stage.plan)
        first.close()
        stage.executor.open(stage.plan)
        return [line for line in stage.executor.waiting() if line.startswith(("fwd:1@step1", "d2h:0@step1"))]

    assert stage.play(scene) == [
        "fwd:1@step1 waits for h2d:1@step0",
        "d2h:0@step1 waits for acc:1@step0, bwd:0@step1",
    ]


def test_waits_between_backwards_are_named_too():
    stage = Stage(in_backward(Layout(chunks=(1, 1), slots=1, backwards=2)), external=EXTERNAL)

    async def scene():
        step = stage.executor.open(stage.plan)
        step.backward()
        step.close()
        lines = stage.executor.waiting()
        return [line for line in lines if line.startswith(("adam:0", "d2h:0#1", "acc:1#1"))]

    assert stage.play(scene) == [
        "adam:0.0@step0 waits for acc:0@step0, acc:0#1@step0",
        "d2h:0#1@step0 waits for acc:1@step0, bwd:0#1@step0",
        "acc:1#1@step0 waits for acc:1@step0, d2h:1#1@step0",
    ]


def test_what_opens_with_the_step_is_named_by_every_backward():
    stage = Stage(delayed(LAYOUT), external=EXTERNAL)

    async def scene():
        step = stage.executor.open(stage.plan)
        step.backward()
        return [line for line in waiting([step]) if line.startswith("acc:0")]

    assert stage.play(scene) == [
        "acc:0@step0 waits for d2h:0@step0, adam:0.0@step0",
        "acc:0#1@step0 waits for acc:0@step0, adam:0.0@step0, d2h:0#1@step0",
    ]


def test_many_blockers_are_counted():
    stage = Stage(overlap(Layout(chunks=(1,) * 9, slots=9)), external=EXTERNAL)

    async def scene():
        stage.executor.open(stage.plan).close()
        return [line for line in stage.executor.waiting() if line.startswith("norm")]

    assert stage.play(scene) == ["norm@step0 waits for acc:0@step0, acc:1@step0, acc:2@step0, acc:3@step0 and 5 more"]


def test_a_deadlock_tells_the_story():
    """Nobody completes the backward of this step."""
    stage = Stage(overlap(Layout(chunks=(1,))), external=EXTERNAL)

    async def main():
        supervisor = asyncio.create_task(stage.executor.run(), name="executor")
        await asyncio.sleep(0)
        step = await stage.step()
        await step.wait_done()
        await supervisor

    with pytest.raises(DeadlockError) as caught:
        run_virtual(main(), waiting=stage.executor.waiting)
    assert str(caught.value) == (
        "nothing can move any more at 0 s, and no timer is armed\n"
        "  fwd:0@step0 waits for its complete() from outside\n"
        "  bwd:0@step0 waits for its complete() from outside\n"
        "  d2h:0@step0 waits for bwd:0@step0\n"
        "  acc:0@step0 waits for d2h:0@step0\n"
        "  norm@step0 waits for acc:0@step0\n"
        "  adam:0.0@step0 waits for norm@step0\n"
        "  h2d:0@step0 waits for adam:0.0@step0\n"
        "  tasks that wait: executor, main, step0"
    )


def test_a_plan_that_stands_still_is_told_by_the_simulator():
    """Nobody has checked this plan: the norm waits for the update, and the update for the norm."""
    plan = overlap(Layout(chunks=(1,)))
    plan = replace(plan, edges=(*plan.edges, Edge(Action("adam", 0, 0), Action("norm"), "mine")))

    with pytest.raises(DeadlockError) as caught:
        simulate(plan, KindCost({}, other_s=1))
    assert str(caught.value).splitlines()[:4] == [
        "nothing can move any more at 4 s, and no timer is armed",
        "  norm@step0 waits for adam:0.0@step0",
        "  adam:0.0@step0 waits for norm@step0",
        "  h2d:0@step0 waits for adam:0.0@step0",
    ]
