"""Live steps: backwards, external actions, and what is ready."""

from __future__ import annotations

import pytest

from tests.scheduler.virtual_log import Stage, as_log
from zoff_async.errors import ScheduleError
from zoff_async.scheduler import Action, Edge, Kind, Lane, Layout, Span, StepPlan, in_backward, overlap

LAYOUT = Layout(chunks=(1, 1), slots=2)
EXTERNAL = frozenset({"fwd", "bwd"})
NO_TIME = dict.fromkeys(("fwd", "bwd", "d2h", "acc", "norm", "adam", "h2d"), 0)


def outside(plan, **options):
    return Stage(plan, NO_TIME, external=EXTERNAL, **options)


def test_hooks_complete_what_autograd_does():
    stage = outside(overlap(LAYOUT))

    async def scene():
        step = stage.executor.open(stage.plan)
        await stage.executor.wait_idle()
        assert stage.started == []
        step.complete(Action("bwd", 0))
        await stage.executor.wait_idle()
        assert stage.ended == ["d2h:0@0", "acc:0@0"]
        step.complete(Action("bwd", 1))
        step.close()
        await step.wait_done()

    stage.play(scene)

    assert stage.ended == [
        f"{name}@0" for name in ("d2h:0", "acc:0", "d2h:1", "acc:1", "norm", "adam:1.0", "adam:0.0", "h2d:1", "h2d:0")
    ]


def test_hooks_may_fire_in_another_order_than_the_plans():
    stage = outside(overlap(LAYOUT))

    async def scene():
        step = stage.executor.open(stage.plan)
        step.complete(Action("bwd", 1))
        await stage.executor.wait_idle()
        assert stage.ended == ["d2h:1@0", "acc:1@0"]
        assert step.is_done(Action("fwd", 1))
        assert not step.is_done(Action("fwd", 0))
        assert not step.is_done(Action("bwd", 0))

    stage.play(scene)


def test_a_completed_backward_implies_its_forward_and_no_other():
    stage = outside(overlap(LAYOUT))

    async def scene():
        step = stage.executor.open(stage.plan)
        step.complete(Action("bwd", 0))
        assert step.is_done(Action("fwd", 0))
        step.complete(Action("fwd", 0))  # late, and harmless
        step.complete(Action("fwd", 1))
        assert not step.is_done(Action("bwd", 1))

    stage.play(scene)


def test_the_next_forward_is_ready_when_its_own_weights_have_arrived():
    ready = []
    stage = outside(overlap(LAYOUT), on_ready=lambda step, action: ready.append(f"{action}@{step.index}"))
    stage.seconds = {**NO_TIME, "h2d": 1}

    async def scene():
        first = stage.executor.open(stage.plan)
        assert ready == ["fwd:1@0", "fwd:0@0", "bwd:0@0", "bwd:1@0"]  # nobody else holds autograd
        for bucket in (0, 1):
            first.complete(Action("bwd", bucket))
        first.close()
        second = stage.executor.open(stage.plan)
        assert ready[4:] == ["bwd:0@1", "bwd:1@1"]
        assert not second.is_ready(Action("fwd", 1))
        await first.wait_done()
        assert ready[6:] == ["fwd:1@1", "fwd:0@1"]
        assert second.is_ready(Action("fwd", 0))

    stage.play(scene)


def test_an_external_action_that_has_happened_is_not_reported_ready():
    ready = []
    stage = outside(overlap(LAYOUT), on_ready=lambda step, action: ready.append(f"{action}@{step.index}"))

    async def scene():
        first = stage.executor.open(stage.plan)
        for bucket in (0, 1):
            first.complete(Action("bwd", bucket))
        first.close()
        second = stage.executor.open(stage.plan)
        second.complete(Action("bwd", 1))  # nobody had waited for its weights
        await first.wait_done()

    stage.play(scene)

    assert ready[4:] == ["bwd:0@1", "bwd:1@1", "fwd:0@1"]


def test_measured_times_of_external_actions_become_spans():
    stage = outside(overlap(LAYOUT))

    async def scene():
        step = stage.executor.open(stage.plan)
        step.complete(Action("fwd", 1), 1.0, 2.5)
        step.complete(Action("bwd", 1))

    stage.play(scene)

    assert stage.spans[0] == Span(Action("fwd", 1), "compute", 0, 1.0, 2.5, 0)
    assert [str(span.action) for span in stage.spans] == ["fwd:1", "d2h:1", "acc:1"]


def test_gradients_accumulate_backward_after_backward():
    stage = outside(overlap(LAYOUT))

    async def scene():
        step = stage.executor.open(stage.plan)
        for wave in range(3):
            assert (step.backward() if wave else 0) == wave
            for bucket in (1, 0):
                step.complete(Action("bwd", bucket, backward=wave))
        step.close()
        await step.wait_done()

    stage.play(scene)

    for bucket in (0, 1):
        sums = [name for name in stage.ended if name.startswith(f"acc:{bucket}")]
        assert sums == [f"acc:{bucket}@0", f"acc:{bucket}#1@0", f"acc:{bucket}#2@0"]
    assert stage.ended.index("norm@0") == 12


def test_the_close_part_waits_for_every_backward():
    stage = outside(overlap(LAYOUT))

    async def scene():
        step = stage.executor.open(stage.plan)
        step.backward()
        for bucket in (0, 1):
            step.complete(Action("bwd", bucket, backward=1))
        step.close()
        await stage.executor.wait_until(lambda: not stage.executor.lane_busy("d2h"))
        assert not step.is_ready(Action("norm"))
        for bucket in (0, 1):
            step.complete(Action("bwd", bucket))
        await step.wait_done()

    stage.play(scene)

    assert "norm@0" in stage.ended


def test_the_next_step_waits_for_every_backward_of_this_one():
    """A copy slot is passed on from the last backward, whichever that is."""
    stage = outside(overlap(Layout(chunks=(1,), slots=1)))
    stage.seconds = {**NO_TIME, "acc": 1}

    async def scene():
        step = stage.executor.open(stage.plan)
        step.backward()
        step.complete(Action("bwd", 0))
        step.complete(Action("bwd", 0, backward=1))
        step.close()
        following = stage.executor.open(stage.plan)
        following.complete(Action("bwd", 0))
        await step.wait_done()

    stage.play(scene)

    assert stage.ended.index("d2h:0@1") > stage.ended.index("acc:0#1@0")


def test_copies_of_the_last_of_two_backwards_may_wait_for_adam():
    """An edge from the close part into the backward part is for the last declared backward."""
    adam, copy = Action("adam"), Action("copy")
    plan = StepPlan(
        "mine",
        (copy, adam),
        (Edge(adam, copy, "mine"),),
        (Kind("copy", "d2h", "backward"), Kind("adam", "cpu", "close")),
        (Lane("d2h", 2), Lane("cpu")),
        closes="last_backward",
        backwards=2,
    )
    stage = Stage(plan, {"adam": 2, "copy": 1})
    stage.play(lambda: stage.step(backwards=2))

    assert as_log(stage.spans) == [("copy", 0, 1), ("adam", 0, 2), ("copy#1", 2, 3)]


def test_what_opens_with_the_step_holds_every_backward():
    first, copy = Action("first"), Action("copy")
    plan = StepPlan(
        "mine",
        (copy, first),
        (Edge(first, copy, "mine"),),
        (Kind("copy", "d2h", "backward"), Kind("first", "cpu", "open")),
        (Lane("d2h", 5), Lane("cpu")),
    )
    stage = Stage(plan)

    async def scene():
        step = stage.executor.open(plan)
        step.backward()
        assert not step.is_ready(Action("copy", backward=1))
        await stage.executor.wait_idle()
        step.backward()
        assert step.is_ready(Action("copy", backward=2))
        step.close()
        await step.wait_done()

    stage.play(scene)

    assert stage.ended == ["first@0", "copy@0", "copy#1@0", "copy#2@0"]


def test_a_step_may_close_while_its_last_backward_runs():
    stage = outside(in_backward(LAYOUT))

    async def scene():
        step = stage.executor.open(stage.plan)
        step.close()
        step.complete(Action("bwd", 0))
        await stage.executor.wait_until(lambda: "h2d:0@0" in stage.ended)
        assert not step.finished
        step.complete(Action("bwd", 1))
        await step.wait_done()

    stage.play(scene)


@pytest.mark.parametrize(
    ("scene", "message"),
    [
        (
            lambda step: step.complete(Action("adam", 0, 0)),
            "adam:0.0 is run by the executor: only external actions are completed from outside",
        ),
        (lambda step: step.complete(Action("bwd", 7)), "bwd:7 is not in plan 'overlap' of step 0"),
        (
            lambda step: step.complete(Action("bwd", 0, backward=1)),
            "bwd:0#1: step 0 has begun 1 backward(s), counted from 0",
        ),
        (
            lambda step: step.is_ready(Action("norm", backward=1)),
            "norm#1: step 0 has begun 1 backward(s), counted from 0",
        ),
        (lambda step: (step.close(), step.close()), "step 0 is closed already"),
        (
            lambda step: (step.close(), step.backward()),
            "step 0 is closed: a backward after it belongs to the next step",
        ),
    ],
)
def test_what_a_step_cannot_do_is_refused(scene, message):
    stage = outside(overlap(LAYOUT))

    async def main():
        with pytest.raises(ScheduleError) as caught:
            scene(stage.executor.open(stage.plan))
        assert str(caught.value) == message

    stage.play(main)


def test_hooks_that_come_after_a_discard_do_nothing():
    """All that was missing of the step was the hook."""
    fwd, job = Action("fwd"), Action("job")
    kinds = (Kind("fwd", "compute", "backward"), Kind("job", "cpu", "open"))
    stage = outside(StepPlan("mine", (fwd, job), (), kinds, (Lane("compute"), Lane("cpu"))))

    async def scene():
        step = await stage.step()
        await stage.executor.wait_until(lambda: step.is_done(job))
        await stage.executor.discard(step)
        step.complete(fwd)
        assert not step.is_done(fwd)
        assert not step.finished

    stage.play(scene)


def test_an_undeclared_backward_is_refused():
    stage = outside(in_backward(LAYOUT))

    async def scene():
        step = stage.executor.open(stage.plan)
        with pytest.raises(ScheduleError) as caught:
            step.backward()
        assert str(caught.value) == (
            "backward 2 began in step 0, but plan 'in_backward' declares 1 a step; declare as many as there are, "
            "or use a policy that needs no count"
        )

    stage.play(scene)


def test_a_step_tells_what_it_is():
    stage = outside(overlap(LAYOUT))

    async def scene():
        step = stage.executor.open(stage.plan)
        assert repr(step) == "<LiveStep 0 of plan 'overlap': open, 8 actions to go>"
        step.close()
        assert repr(step) == "<LiveStep 0 of plan 'overlap': closed, 13 actions to go>"

    stage.play(scene)
