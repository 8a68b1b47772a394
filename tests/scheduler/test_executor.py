"""The executor: lanes, priorities, two live steps, and the ways to wait. Faults are in test_faults.py."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from tests.scheduler.virtual_log import Stage, as_log
from zoff_async.errors import ClosedError, ScheduleError
from zoff_async.scheduler import (
    Action,
    Edge,
    Executor,
    ExecutorStatistics,
    Kind,
    Lane,
    Layout,
    Span,
    StepPlan,
    delayed,
    in_backward,
    overlap,
    run_virtual,
)

LAYOUT = Layout(chunks=(2, 1), slots=2, workers=1)


def flat(count, capacity=1, lag=()):
    """A plan of ``count`` jobs of one kind on one lane, with no order among them."""
    jobs = tuple(Action("job", i) for i in range(count))
    edges = tuple(Edge(Action("job", a), Action("job", b, lag=1), "mine") for a, b in lag)
    return StepPlan("flat", jobs, edges, (Kind("job", "cpu", "open"),), (Lane("cpu", capacity),))


# Lanes and priorities


@pytest.mark.parametrize(
    ("capacity", "ahead", "expected"),
    [
        (1, {}, [("job:0", 0, 1), ("job:1", 1, 2), ("job:2", 2, 3)]),
        (2, {}, [("job:0", 0, 1), ("job:1", 0, 1), ("job:2", 1, 2)]),
        (1, {"cpu": 1}, [("job:0", 0, 1), ("job:1", 0, 1), ("job:2", 1, 2)]),
        (1, {"d2h": 5}, [("job:0", 0, 1), ("job:1", 1, 2), ("job:2", 2, 3)]),
    ],
)
def test_a_lane_runs_as_many_as_it_has_room_for(capacity, ahead, expected):
    stage = Stage(flat(3, capacity), ahead=ahead)
    stage.play(stage.step)

    assert as_log(stage.spans) == expected


def test_of_two_ready_actions_the_earlier_one_of_the_plan_starts_first():
    """Whatever arrives first: job 2 is ready at once, jobs 0 and 1 at the moment when the lane is free again."""
    a, b = Action("a"), Action("b")
    jobs = tuple(Action("job", i) for i in range(4))
    edges = (Edge(a, jobs[1], "mine"), Edge(b, jobs[0], "mine"))
    kinds = (Kind("job", "cpu", "open"), Kind("a", "net", "open"), Kind("b", "net", "open"))
    plan = StepPlan("mine", (*jobs, a, b), edges, kinds, (Lane("cpu"), Lane("net", 2)))
    stage = Stage(plan, {"a": 1, "b": 1, "job": 1})
    stage.play(stage.step)

    assert [name for name, *_ in as_log(stage.spans) if name[0] == "j"] == ["job:2", "job:0", "job:1", "job:3"]


def test_the_older_step_comes_first_on_a_lane():
    stage = Stage(flat(3))

    async def scene():
        await stage.step()
        await stage.step()

    stage.play(scene)

    assert stage.started == ["job:0@0", "job:1@0", "job:2@0", "job:0@1", "job:1@1", "job:2@1"]


def test_a_step_waits_for_the_step_before_edge_by_edge():
    stage = Stage(flat(2, capacity=4, lag=[(1, 0)]), {"job": 1})

    async def scene():
        first = await stage.step()
        second = await stage.step()
        assert not second.is_ready(Action("job", 0))
        await first.wait_done()
        assert second.is_ready(Action("job", 0))

    stage.play(scene)

    assert as_log(stage.spans) == [
        ("job:0", 0, 1),
        ("job:1", 0, 1),
        ("job:1@1", 0, 1),
        ("job:0@1", 1, 2),
    ]


def test_edges_into_another_plan_go_by_name():
    """The plan may change from step to step: warm-up ends, the order of reads is learnt."""
    first, second = overlap(LAYOUT), delayed(LAYOUT)
    stage = Stage(first)

    async def scene():
        await stage.step()
        stage.plan = second
        step = await stage.step()
        for bucket in (0, 1):
            assert not step.is_ready(Action("fwd", bucket))
        assert not step.is_ready(Action("adam", 0, 1))  # its moments are being written

    stage.play(scene)

    ended = {str(s.action): s.end_s for s in stage.spans if s.step == 0}
    for span in (s for s in stage.spans if s.step == 1):
        if span.action.kind == "fwd":
            assert span.start_s >= ended[f"h2d:{span.action.bucket}"]
        if span.action.kind == "adam":
            assert span.start_s >= ended[str(span.action)]


def test_an_edge_into_an_action_that_the_next_plan_lacks_is_void():
    stage = Stage(flat(2, lag=[(1, 1), (1, 0)]))

    async def scene():
        await stage.step()
        stage.plan = flat(1)
        await stage.step()

    stage.play(scene)

    assert stage.ended == ["job:0@0", "job:1@0", "job:0@1"]


def test_a_later_plan_may_give_a_lane_another_capacity():
    stage = Stage(flat(4, capacity=1))

    async def scene():
        await stage.step()
        await stage.executor.wait_idle()
        stage.plan = flat(4, capacity=4)
        await stage.step()

    stage.play(scene)

    assert [span.end_s for span in stage.spans] == [1, 2, 3, 4, 5, 5, 5, 5]


# Handlers, spans, names


def test_an_action_is_a_task_of_its_name():
    names = []

    async def handler(action, step):
        names.append(asyncio.current_task().get_name())

    plan = overlap(LAYOUT)
    stage = Stage(plan, handlers=dict.fromkeys(plan.lane_of, handler))
    stage.play(lambda: stage.step(backwards=2))

    assert names[0] == "fwd:1@step0"
    assert {"adam:0.1@step0", "d2h:1#1@step0"} <= set(names)


def test_a_handler_may_tell_the_true_times():
    async def handler(action, step):
        await asyncio.sleep(5)
        return 1.25, 1.5

    stage = Stage(flat(1), handlers={"job": handler}, bytes_of=lambda action: 64)
    stage.play(stage.step)

    assert stage.spans == [Span(Action("job", 0), "cpu", 0, 1.25, 1.5, 64)]


def test_a_plain_function_that_returns_an_awaitable_is_a_handler():
    stage = Stage(flat(1), handlers={"job": lambda action, step: asyncio.sleep(2)})
    stage.play(stage.step)

    assert as_log(stage.spans) == [("job:0", 0, 2)]


def test_without_a_recorder_no_clock_is_read():
    def clock():
        raise AssertionError("nobody wants the time")

    plan, done = flat(2), []

    async def handler(action, step):
        done.append(str(action))

    async def main():
        executor = Executor({"job": handler}, clock=clock)
        supervisor = asyncio.create_task(executor.run())
        await asyncio.sleep(0)
        executor.open(plan).close()
        await executor.wait_idle()
        await executor.close()
        await supervisor

    run_virtual(main())

    assert done == ["job:0", "job:1"]


def test_a_users_node_runs_its_own_coroutine_with_the_steps_context():
    seen = []

    async def run(action, step):
        seen.append((str(action), step.context, step.index))

    plan = overlap(LAYOUT).add("ema", after="adam", run=run)
    stage = Stage(plan)

    async def scene():
        stage.executor.open(plan, context="mine").close()
        await stage.executor.wait_idle()

    stage.play(scene)

    assert seen == [("ema", "mine", 0)]


def test_a_kind_without_a_handler_is_refused_when_the_step_opens():
    stage = Stage(flat(1), handlers={"copy": None})

    async def scene():
        with pytest.raises(ScheduleError) as caught:
            stage.executor.open(stage.plan)
        assert str(caught.value) == (
            "no handler for job:0 of plan 'flat': handlers know copy; give plan.add(..., run=coroutine function)"
        )

    stage.play(scene)


# Opening, waiting, closing


def test_two_steps_may_be_live_and_no_more():
    stage = Stage(flat(1, lag=[(0, 0)]))

    async def scene():
        executor = stage.executor
        await stage.step()
        await stage.step()
        assert [step.index for step in executor.live] == [0, 1]
        with pytest.raises(ScheduleError, match=r"^steps 0 and 1 are live: await wait_room\(\)$"):
            executor.open(stage.plan)
        await executor.wait_room()
        assert [step.index for step in executor.live] == [1]
        assert asyncio.get_running_loop().time() == 1

    stage.play(scene)


def test_a_step_opens_when_the_one_before_is_closed():
    stage = Stage(flat(1))

    async def scene():
        stage.executor.open(stage.plan)
        with pytest.raises(ScheduleError, match=r"^step 0 is still open: close it, or discard it$"):
            stage.executor.open(stage.plan)

    stage.play(scene)


def test_idle_means_that_no_closed_step_is_live_and_nothing_runs():
    plan = delayed(replace(LAYOUT, backwards=1))
    stage = Stage(plan, external=frozenset({"fwd", "bwd"}))

    async def scene():
        executor = stage.executor
        await executor.wait_idle()
        step = executor.open(plan)
        await executor.wait_idle()  # its update runs when it opens
        assert asyncio.get_running_loop().time() == 3
        assert not step.closed
        await executor.wait_idle()
        assert executor.live == (step,)
        assert executor.statistics() == ExecutorStatistics(1, 0, 1, 0, 0)

    stage.play(scene)


def test_a_lane_is_busy_while_something_runs_or_is_ready_on_it():
    stage = Stage(flat(2))

    async def scene():
        executor = stage.executor
        assert not executor.lane_busy("cpu")
        executor.open(stage.plan)
        assert executor.lane_busy("cpu")
        assert executor.statistics() == ExecutorStatistics(1, 0, 1, 0, 2)
        await asyncio.sleep(0.5)
        assert executor.statistics() == ExecutorStatistics(1, 0, 1, 1, 1)
        await asyncio.sleep(1)
        assert executor.lane_busy("cpu")
        await asyncio.sleep(1)
        assert not executor.lane_busy("cpu")
        assert not executor.lane_busy("gpu")

    stage.play(scene)


def test_a_step_is_waited_for():
    stage = Stage(flat(2))

    async def scene():
        step = await stage.step()
        await step.wait_done()
        assert step.finished
        assert asyncio.get_running_loop().time() == 2
        await step.wait_done()

    stage.play(scene)


def test_close_lets_what_runs_finish_and_refuses_more():
    stage = Stage(flat(3))

    async def scene():
        await stage.step()
        await stage.executor.close()
        with pytest.raises(ClosedError, match=r"^the executor is closed: it opens no more steps$"):
            stage.executor.open(stage.plan)
        await stage.executor.close()

    stage.play(scene)

    assert stage.ended == ["job:0@0", "job:1@0", "job:2@0"]


def test_close_drops_a_step_that_waits_for_somebody_outside():
    stage = Stage(overlap(LAYOUT), external=frozenset({"fwd", "bwd"}))

    async def scene():
        step = await stage.step()
        await stage.executor.close()
        with pytest.raises(ScheduleError, match=r"^step 0 was discarded$"):
            await step.wait_done()

    stage.play(scene)

    assert stage.started == []


def test_close_before_run_is_quiet():
    async def main():
        executor = Executor({})
        await executor.close()
        await executor.run()

    run_virtual(main())


def test_steps_may_be_opened_before_run_begins():
    stage = Stage(flat(2))

    async def main():
        stage.executor.open(stage.plan).close()
        supervisor = asyncio.create_task(stage.executor.run())
        await stage.executor.wait_idle()
        await stage.executor.close()
        await supervisor

    run_virtual(main())

    assert stage.ended == ["job:0@0", "job:1@0"]


def test_one_supervisor_is_enough():
    stage = Stage(flat(1))

    async def scene():
        with pytest.raises(ScheduleError, match=r"^the executor runs already: one supervisor is enough$"):
            await stage.executor.run()

    stage.play(scene)


def test_a_discarded_step_ends_and_leaves_the_other_alone():
    plan = flat(2, capacity=2)
    stage = Stage(plan, {"job": 4})

    async def scene():
        first = await stage.step()
        await asyncio.sleep(1)
        stage.plan = flat(3, capacity=3)
        second = stage.executor.open(stage.plan)
        await asyncio.sleep(1)
        with pytest.raises(ScheduleError, match=r"^step 0 has a younger step behind it: discard that first$"):
            await stage.executor.discard(first)
        await stage.executor.discard(second)
        assert stage.executor.live == (first,)
        assert stage.executor.statistics().running_actions == 2
        await stage.executor.discard(second)  # a second time does nothing
        await first.wait_done()
        stage.plan = plan
        third = await stage.step()
        await third.wait_done()

    stage.play(scene)

    assert stage.cancelled == ["job:0@1"]
    assert stage.ended == ["job:0@0", "job:1@0", "job:0@2", "job:1@2"]


@pytest.mark.parametrize("turns", [0, 1, 2])
def test_a_step_discarded_as_it_opens_frees_its_lanes(turns):
    """After one turn of the loop its tasks exist, and have not run a line yet."""
    stage = Stage(flat(3, capacity=2))

    async def scene():
        step = stage.executor.open(stage.plan)
        for _ in range(turns):
            await asyncio.sleep(0)
        await stage.executor.discard(step)
        assert stage.executor.statistics() == ExecutorStatistics(1, 0, 0, 0, 0)
        await (await stage.step()).wait_done()

    stage.play(scene)

    assert stage.ended == ["job:0@1", "job:1@1", "job:2@1"]


def test_a_plan_is_turned_into_integers_once():
    plan = overlap(LAYOUT)
    stage = Stage(plan)

    async def scene():
        first = await stage.step()
        second = await stage.step()
        assert first.program is second.program

    stage.play(scene)


def test_two_executors_share_a_loop():
    one, two = Stage(flat(2)), Stage(flat(2))

    async def scene():
        async def inner():
            await two.step()
            await two.executor.wait_idle()

        supervisor = asyncio.create_task(two.executor.run())
        await asyncio.sleep(0)
        await asyncio.gather(one.step(), inner())
        await two.executor.close()
        await supervisor

    one.play(scene)

    assert one.ended == two.ended == ["job:0@0", "job:1@0"]


async def test_it_runs_on_a_real_loop_too():
    """No virtual clock: every action yields to the loop, and the order is still the plan's."""
    plan, started = in_backward(LAYOUT), []

    async def handler(action, step):
        started.append(str(action))
        await asyncio.sleep(0)

    executor = Executor(dict.fromkeys(plan.lane_of, handler))
    supervisor = asyncio.create_task(executor.run())
    for _ in range(3):
        await executor.wait_room()
        executor.open(plan).close()
    await executor.wait_idle()
    await executor.close()
    await supervisor

    assert len(started) == 3 * len(plan.actions)
    assert executor.statistics() == ExecutorStatistics(3, 3, 0, 0, 0)
