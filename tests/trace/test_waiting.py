"""Busy shares, what lanes waited for, and slot waits, against hand-computed steps."""

from __future__ import annotations

import pytest

from tests.trace.hand import STEP_1, plan, recorded, span, timeline
from zoff_async.scheduler import KindCost, Layout, overlap, simulate
from zoff_async.trace import Timeline, Wait
from zoff_async.trace.causes import Causes
from zoff_async.trace.steps import Window, windows
from zoff_async.trace.waiting import lane_uses, slot_waits_s

STEP = [Window(1, *STEP_1)]


def uses(found: Timeline, shown=STEP):
    return {lane.lane: lane for lane in lane_uses(Causes(found), shown)}


def test_what_the_compute_lane_waited_for_in_the_hand_computed_step():
    compute = uses(timeline())["compute"]

    assert compute.busy == pytest.approx(4 / 14)
    assert compute.busy_s == pytest.approx(4)
    assert compute.waiting == pytest.approx(
        {"adam": 4 / 14, "d2h": 3 / 14, "h2d": 2 / 14, "norm": 0.5 / 14, "acc": 0.5 / 14}
    )


def test_what_the_other_lanes_waited_for_in_the_hand_computed_step():
    found = uses(timeline())

    assert found["d2h"].busy == pytest.approx(4 / 14)
    # 12 to 17: Adam until 14, h2d until 15, forward, backward. 21 to 26, and the next copy begins at 31 only, behind
    # bucket 0: acc, norm, then both buckets' Adam.
    assert found["d2h"].waiting == pytest.approx(
        {"adam": 6 / 14, "h2d": 1 / 14, "fwd": 1 / 14, "bwd": 1 / 14, "acc": 0.5 / 14, "norm": 0.5 / 14}
    )
    assert found["cpu"].busy == pytest.approx(7.5 / 14)
    assert found["h2d"].busy == pytest.approx(2 / 14)


@pytest.mark.parametrize("policy", ["serial", "overlap", "in_backward", "delayed"])
def test_busy_and_waiting_shares_of_a_lane_add_up_to_one(policy):
    found = timeline(policy, steps=6)

    for lane in lane_uses(Causes(found), windows(found)[1:-1]):
        assert lane.busy + sum(lane.waiting.values()) == pytest.approx(1.0), lane


def test_a_lane_with_two_workers_is_busy_by_halves():
    found = recorded(
        span("fwd:0", "compute", 0, 1),
        span("adam:0.0", "cpu", 0, 4),
        span("adam:0.1", "cpu", 0, 2),
        of=plan(chunks=(2,), bucket_bytes=(), workers=2),
    )
    cpu = uses(found, [Window(0, 0, 4)])["cpu"]

    assert (cpu.capacity, cpu.busy, cpu.busy_s) == (2, 0.75, 6.0)
    assert cpu.waiting == {"nothing to do": 0.25}


def test_time_between_release_and_beginning_is_hand_over_and_before_compute_the_callers():
    found = recorded(
        span("bwd:0", "compute", 0, 2),
        span("d2h:0", "d2h", 3, 4),
        span("fwd:0", "compute", 8, 9, step=1),
        of=plan(chunks=(1,), bucket_bytes=(200,)),
        waits=(Wait("step", None, 4.0, 6.0),),
    )
    shown = uses(found, [Window(0, 0, 10)])

    assert shown["d2h"].waiting == pytest.approx({"bwd": 0.2, "hand-over": 0.1, "nothing to do": 0.6})
    assert shown["compute"].waiting == pytest.approx({"caller": 0.4, "step()": 0.2, "nothing to do": 0.1})


def test_time_before_compute_in_which_a_weight_was_waited_for_is_hand_over():
    found = recorded(
        span("h2d:0", "h2d", 0, 2),
        span("fwd:0", "compute", 3, 4, step=1),
        span("bwd:0", "compute", -1, 0),
        of=plan(chunks=(1,), bucket_bytes=(200,)),
        waits=(Wait("weights", 0, 1.0, 3.0),),
    )

    assert uses(found, [Window(0, 0, 4)])["compute"].waiting == pytest.approx({"h2d": 0.5, "hand-over": 0.25})


def test_a_wait_for_room_on_the_device_is_a_wait_for_d2h():
    found = recorded(
        span("bwd:0", "compute", 0, 1),
        span("bwd:1", "compute", 3, 4),
        of=plan(),
        waits=(Wait("room", None, 1.0, 3.0),),
    )

    assert uses(found, [Window(0, 0, 4)])["compute"].waiting == {"d2h": 0.5}


def test_a_slot_wait_is_time_in_which_only_the_slot_was_missing():
    # One slot: d2h:1 is ready at 2 (its backward), its lane is free at 4, the slot at 7 when acc:0 has read it.
    found = recorded(
        span("bwd:0", "compute", 0, 1),
        span("bwd:1", "compute", 1, 2),
        span("d2h:0", "d2h", 1, 4),
        span("acc:0", "cpu", 4, 7),
        span("d2h:1", "d2h", 7.5, 8),
        of=plan(slots=1),
    )

    assert slot_waits_s(Causes(found), [Window(0, 0, 10)]) == {"d2h": 3.0}


def test_a_slot_wait_ends_where_the_action_began_whatever_another_clock_says():
    found = recorded(
        span("bwd:1", "compute", 1, 2),
        span("acc:0", "cpu", 4, 7.25),  # by the host's clock; by the device's the copy began at 7
        span("d2h:1", "d2h", 7, 8),
        of=plan(slots=1),
    )

    assert slot_waits_s(Causes(found), [Window(0, 0, 10)]) == {"d2h": 5.0}


def test_an_action_that_holds_no_worker_adds_no_waiting_of_its_own():
    found = recorded(
        span("acc:0", "cpu", 0, 2),
        span("acc:1", "cpu", 3, 4),
        span("ema", "cpu", 1, 3.5),  # beside the worker, in a row of its own
        of=plan().add("ema", after="adam"),
    )
    cpu = uses(found, [Window(0, 0, 4)])["cpu"]

    assert list(cpu.waiting) == ["acc"] or list(cpu.waiting) == ["hand-over"]
    assert "nothing to do" not in cpu.waiting


def test_chunks_of_one_bucket_wait_for_their_slot_together():
    plan_ = overlap(Layout(chunks=(2, 2), slots=1, workers=2))
    seconds = {"fwd": 1.0, "bwd": 1.0, "d2h": 1.0, "acc": 1.0, "norm": 1.0, "adam": 1.0, "h2d": 5.0}
    found = Timeline.of(simulate(plan_, KindCost(seconds), steps=4))

    # Both chunks of bucket 0 could begin behind those of bucket 1, and wait 5 s for that bucket's upload.
    assert slot_waits_s(Causes(found), windows(found)[1:2])["h2d"] == pytest.approx(5.0)


def test_there_are_no_slot_waits_where_slots_suffice():
    assert slot_waits_s(Causes(timeline()), STEP) == {}
