"""Failures: nothing new starts, everything that ran is awaited, and the exception is what the caller sees."""

from __future__ import annotations

import asyncio
import logging

import pytest

from tests.scheduler.virtual_log import Stage
from zoff_async.errors import ScheduleError
from zoff_async.scheduler import (
    POLICIES,
    Action,
    Edge,
    ExecutorStatistics,
    Kind,
    Lane,
    Layout,
    StepPlan,
    overlap,
    run_virtual,
)

LAYOUT = Layout(chunks=(2, 1), slots=2, workers=2, backwards=1)
SECONDS = {"fwd": 1, "bwd": 1, "d2h": 1, "acc": 0.5, "norm": 0.25, "adam": 3, "h2d": 1}


def flat(count, capacity=4):
    jobs = tuple(Action("job", i) for i in range(count))
    return StepPlan("flat", jobs, (), (Kind("job", "cpu", "open"),), (Lane("cpu", capacity),))


CASES = [(name, str(action)) for name, policy in POLICIES.items() for action in policy(LAYOUT).actions]


@pytest.mark.parametrize(("name", "action"), CASES)
def test_a_failure_in_any_action_stops_everything_and_is_what_the_caller_sees(name, action):
    plan = POLICIES[name](LAYOUT)
    stage = Stage(plan, SECONDS)
    boom = RuntimeError("the copy engine is on fire")
    stage.faults[f"{action}@1"] = boom
    executor = stage.executor

    async def scene():
        with pytest.raises(RuntimeError) as caught:
            for _ in range(4):
                await stage.step()
            await executor.wait_idle()
        assert caught.value is boom
        assert executor.failure is boom
        assert stage.told == [(boom, 1)]
        assert executor.live == ()
        assert executor.statistics().running_actions == executor.statistics().ready_actions == 0

        at_failure = list(stage.started)
        await asyncio.sleep(100)
        assert stage.started == at_failure
        over = {*stage.ended, *stage.cancelled, f"{action}@1"}
        assert set(at_failure) == over  # whatever began has ended, failed, or was cancelled and awaited

        with pytest.raises(ScheduleError, match=r"^an action has failed: call reset\(\) before the next step$"):
            executor.open(plan)
        executor.reset()
        stage.faults.clear()
        again = await stage.step()
        await again.wait_done()
        assert executor.failure is None

    stage.play(scene)

    ran = [name for name in stage.ended if name.endswith(f"@{executor.statistics().steps_opened - 1}")]
    assert len(ran) == len(plan.actions)


def test_the_failure_is_told_when_running_actions_have_been_cleaned_up():
    """A cancelled copy takes two seconds to let go of its buffers."""
    cleaned = []

    async def handler(action, step):
        if action.bucket == 0:
            await asyncio.sleep(1)
            raise ValueError("first")
        try:
            await asyncio.sleep(10)
        except asyncio.CancelledError:
            await asyncio.sleep(2)
            cleaned.append((str(action), asyncio.get_running_loop().time()))
            raise

    stage = Stage(flat(3), handlers={"job": handler})

    async def scene():
        step = await stage.step()
        with pytest.raises(ValueError, match=r"^first$"):
            await step.wait_done()
        assert asyncio.get_running_loop().time() == 3
        assert sorted(cleaned) == [("job:1", 3), ("job:2", 3)]

    stage.play(scene)


def test_an_action_whose_turn_was_next_does_not_begin():
    """Both have a task when the first one fails in its first line."""
    begun = []

    async def handler(action, step):
        begun.append(str(action))
        raise ValueError(str(action))

    stage = Stage(flat(2), handlers={"job": handler})

    async def scene():
        step = await stage.step()
        with pytest.raises(ValueError, match=r"^job:0$"):
            await step.wait_done()
        assert stage.executor.statistics().running_actions == 0

    stage.play(scene)

    assert begun == ["job:0"]


def test_a_failure_ends_the_other_live_step_too():
    stage = Stage(flat(2), {"job": 4})
    stage.faults["job:0@0"] = boom = OSError("gone")

    async def scene():
        await stage.step()
        await asyncio.sleep(1)
        younger = await stage.step()
        with pytest.raises(OSError) as caught:
            await younger.wait_done()
        assert caught.value is boom

    stage.play(scene)

    assert sorted(stage.cancelled) == ["job:0@1", "job:1@0", "job:1@1"]


def test_the_first_of_several_failures_is_told_and_the_others_are_logged(caplog):
    async def handler(action, step):
        try:
            await asyncio.sleep(1 + action.bucket)
        finally:
            raise ValueError(f"job {action.bucket}")

    stage = Stage(flat(2), handlers={"job": handler})

    async def scene():
        step = await stage.step()
        with pytest.raises(ValueError, match=r"^job 0$"):
            await step.wait_done()

    with caplog.at_level(logging.WARNING, logger="zoff_async.scheduler"):
        stage.play(scene)

    assert [record.getMessage() for record in caplog.records] == ["job:1 of step 0 failed after a first failure"]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3), MemoryError()])
def test_exceptions_that_would_end_a_loop_are_failures_like_any_other(error):
    stage = Stage(flat(2))
    stage.faults["job:1@0"] = error

    async def scene():
        await stage.step()
        with pytest.raises(type(error)) as caught:
            await stage.executor.wait_idle()
        assert caught.value is error

    stage.play(scene)


def test_a_cancellation_that_nobody_asked_for_is_a_failure():
    """A task group would take the action for finished, and the step would wait for it for ever."""

    async def handler(action, step):
        pool_future = asyncio.get_running_loop().create_future()
        pool_future.cancel()
        await pool_future

    stage = Stage(flat(1), handlers={"job": handler})

    async def scene():
        step = await stage.step()
        with pytest.raises(ScheduleError) as caught:
            await step.wait_done()
        assert str(caught.value) == "job:0 of step 0 was cancelled, and nobody had asked for it"
        assert isinstance(caught.value.__cause__, asyncio.CancelledError)

    stage.play(scene)


def test_a_handler_that_fails_before_it_awaits_is_caught():
    def handler(action, step):
        raise LookupError(str(action))

    stage = Stage(flat(1), handlers={"job": handler})

    async def scene():
        step = await stage.step()
        with pytest.raises(LookupError, match="job:0"):
            await step.wait_done()

    stage.play(scene)


@pytest.mark.parametrize("callback", ["record", "on_ready", "bytes_of"])
def test_a_callback_that_fails_is_a_failure_of_its_action(callback):
    def broken(*_):
        raise ArithmeticError(callback)

    a, b = Action("a"), Action("b")
    kinds = (Kind("a", "cpu", "open"), Kind("b", "cpu", "open"))
    plan = StepPlan("mine", (a, b), (Edge(a, b, "mine"),), kinds, (Lane("cpu"),))
    stage = Stage(plan, external=frozenset({"b"}), **{callback: broken})

    async def scene():
        step = await stage.step()
        with pytest.raises(ArithmeticError, match=callback):
            await step.wait_done()

    stage.play(scene)


def test_a_broken_on_failure_is_logged_and_the_failure_still_told(caplog):
    stage = Stage(flat(1))
    stage.faults["job:0@0"] = ValueError("first")
    stage.executor._on_failure = lambda error, step: 1 / 0

    async def scene():
        step = await stage.step()
        with pytest.raises(ValueError, match=r"^first$"):
            await step.wait_done()

    with caplog.at_level(logging.ERROR, logger="zoff_async.scheduler"):
        stage.play(scene)

    assert "on_failure raised while it was told of a failure in step 0" in caplog.text


def test_every_waiter_is_told():
    stage = Stage(flat(1), {"job": 2})
    stage.faults["job:0@0"] = boom = ValueError("all")

    async def scene():
        executor = stage.executor
        step = await stage.step()
        waits = [step.wait_done(), executor.wait_idle(), executor.wait_until(lambda: False)]
        assert await asyncio.gather(*waits, return_exceptions=True) == [boom] * 3
        assert await asyncio.gather(executor.wait_room(), return_exceptions=True) == [boom]

    stage.play(scene)


def test_reset_waits_for_the_cleaning_up():
    async def handler(action, step):
        if action.bucket == 0:
            await asyncio.sleep(0.25)
            raise ValueError("first")
        try:
            await asyncio.sleep(10)
        except asyncio.CancelledError:
            await asyncio.sleep(1)
            raise

    stage = Stage(flat(2), handlers={"job": handler})

    async def scene():
        await stage.step()
        await asyncio.sleep(0.5)
        with pytest.raises(ScheduleError, match="still being cleaned up"):
            stage.executor.reset()
        with pytest.raises(ScheduleError, match="an action has failed"):
            stage.executor.open(stage.plan)
        with pytest.raises(ValueError, match=r"^first$"):
            await stage.executor.wait_idle()
        stage.executor.reset()

    stage.play(scene)


def test_hooks_that_come_after_a_failure_do_nothing():
    plan = overlap(LAYOUT)
    stage = Stage(plan, SECONDS, external=frozenset({"fwd", "bwd"}))
    stage.faults["d2h:0@0"] = ValueError("copy")

    async def scene():
        step = stage.executor.open(plan)
        step.complete(Action("bwd", 0))
        with pytest.raises(ValueError, match=r"^copy$"):
            await stage.executor.wait_idle()
        step.complete(Action("bwd", 1))
        await asyncio.sleep(100)

    stage.play(scene)

    assert stage.started == ["d2h:0@0"]


@pytest.mark.parametrize("step_fails", [False, True])
def test_close_returns_whatever_has_happened(step_fails):
    stage = Stage(flat(2), {"job": 2})
    if step_fails:
        stage.faults["job:0@0"] = ValueError("first")

    async def scene():
        await stage.step()
        await stage.executor.close()
        assert asyncio.get_running_loop().time() == (1 if step_fails else 2)

    stage.play(scene)


def test_a_cancelled_supervisor_takes_its_steps_along():
    stage = Stage(flat(2), {"job": 8})

    async def main():
        supervisor = asyncio.create_task(stage.executor.run())
        step = await stage.step()
        waiting = asyncio.create_task(step.wait_done())
        await asyncio.sleep(1)
        supervisor.cancel()
        with pytest.raises(asyncio.CancelledError):
            await supervisor
        with pytest.raises(ScheduleError, match=r"^the executor was stopped with the step in flight$"):
            await waiting
        assert len(asyncio.all_tasks()) == 1
        await stage.executor.close()

    run_virtual(main())

    assert sorted(stage.cancelled) == ["job:0@0", "job:1@0"]


def test_no_task_outlives_its_step():
    stage = Stage(flat(3), {"job": 2})
    stage.faults["job:2@0"] = ValueError("first")

    async def scene():
        before = asyncio.all_tasks()
        await stage.step()
        assert len(asyncio.all_tasks()) == len(before) + 1  # the step's own
        await asyncio.sleep(0.5)
        assert len(asyncio.all_tasks()) == len(before) + 4
        with pytest.raises(ValueError, match=r"^first$"):
            await stage.executor.wait_idle()
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == before
        assert stage.executor.statistics() == ExecutorStatistics(1, 0, 0, 0, 0)

    stage.play(scene)
