"""The plan's edges between spans, with backwards and steps told apart."""

from __future__ import annotations

from tests.trace.hand import recorded, span, timeline
from zoff_async.scheduler import KindCost, Layout, delayed, in_backward, overlap, simulate
from zoff_async.trace import Timeline
from zoff_async.trace.edges import Edges


def arrows_into(found: Timeline, text: str, step: int) -> list[str]:
    (target,) = [s for s in found.spans if str(s.action) == text and s.step == step]
    return sorted(f"{before.action}@{before.step} {rule}" for before, _, rule in Edges(found).before(target))


def test_edges_within_a_step_and_from_the_step_before():
    found = timeline()

    assert arrows_into(found, "norm", 1) == ["acc:0@1 norm-barrier", "acc:1@1 norm-barrier"]
    assert arrows_into(found, "fwd:1", 1) == ["bwd:1@0 program-order", "h2d:1@0 weights-before-forward"]
    assert arrows_into(found, "adam:1.0", 1) == [
        "adam:1.0@0 state-order",
        "h2d:1@0 slot-reuse",
        "norm@1 norm-barrier",
    ]


def test_an_end_that_was_not_recorded_gives_no_arrow():
    found = timeline()
    later = recorded(*(s for s in found.spans if s.step > 1), of=found.plans[1])

    assert arrows_into(later, "fwd:1", 2) == []


def test_every_backward_feeds_what_lives_once_and_each_its_own():
    plan = overlap(Layout(chunks=(1, 1), backwards=None))
    found = Timeline.of(simulate(plan, KindCost({}, 1.0), steps=2, backwards=3))

    assert arrows_into(found, "norm", 0) == sorted(
        f"acc:{bucket}{wave}@0 norm-barrier" for bucket in (0, 1) for wave in ("", "#1", "#2")
    )
    assert arrows_into(found, "acc:0#2", 0) == ["acc:0#1@0 accumulate-in-order", "d2h:0#2@0 gradient"]
    assert "adam:0.0@0 gradient-store" in arrows_into(found, "acc:0", 1)
    assert "adam:0.0@0 gradient-store" not in arrows_into(found, "acc:0#1", 1)


def test_a_change_of_plan_keeps_the_older_steps_edges_into_the_younger():
    warm, stale = overlap(Layout(chunks=(1,))), delayed(Layout(chunks=(1,), backwards=None))
    found = recorded(
        span("h2d:0", "h2d", 0, 1, step=0),
        span("norm", "cpu", 0, 1, step=0),
        span("fwd:0", "compute", 1, 2, step=1),
        span("adam:0.0", "cpu", 1, 2, step=1),
    )
    found = Timeline(found.spans, {0: warm, 1: stale})

    assert arrows_into(found, "fwd:0", 1) == ["h2d:0@0 weights-before-forward"]
    # Its norm-barrier is an edge of a stale plan into the step after, and the step before was not stale.
    assert arrows_into(found, "adam:0.0", 1) == ["h2d:0@0 slot-reuse"]


def test_declared_backwards_are_waited_for_by_adam():
    plan = in_backward(Layout(chunks=(1,), backwards=2))
    found = Timeline.of(simulate(plan, KindCost({}, 1.0), steps=1))

    assert arrows_into(found, "adam:0.0", 0) == ["acc:0#1@0 gradient", "acc:0@0 gradient"]


def test_arrows_of_a_simulation_never_point_backwards():
    for policy in ("serial", "overlap", "in_backward", "delayed"):
        found = list(Edges(timeline(policy)).arrows())

        assert found
        assert all(before.end_s <= after.start_s for before, after, _ in found)


def test_an_edge_out_of_the_closing_part_holds_for_the_last_backward():
    plan = in_backward(Layout(chunks=(1, 1), backwards=2, slots=2)).add("probe", after="adam:0", before="acc:1")
    found = Timeline.of(simulate(plan, KindCost({}, 1.0), steps=1))

    assert "probe@0 user" not in arrows_into(found, "acc:1", 0)
    assert any(arrow.startswith("probe@0") for arrow in arrows_into(found, "acc:1#1", 0))
