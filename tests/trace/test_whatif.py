"""Levers against steps simulated by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.trace.hand import PERIOD_S, PIECES, SECONDS, plan, timeline
from zoff_async.scheduler import KindCost, simulate
from zoff_async.trace import Pieces, Timeline
from zoff_async.trace.steps import steady
from zoff_async.trace.whatif import levers, measured_step


def found_levers(source: Timeline, step_s: float = PERIOD_S):
    measured = measured_step(source, tuple(window.step for window in steady(source)), step_s)
    return {lever.name: lever for lever in levers(measured, measured.simulate())}


def test_a_measured_step_simulated_again_takes_as_long_as_it_did():
    source = timeline()
    measured = measured_step(source, (1, 2), PERIOD_S)

    assert measured.simulate().period_s == PERIOD_S


def test_levers_of_the_step_worked_out_by_hand():
    found = found_levers(timeline())

    # Adam 1.5 s a bucket: 3 s less. Two workers: both buckets' Adam at once, then each bucket's own chain: 2 s less.
    assert found["Adam twice as fast"].step_s == 11
    assert found["twice the workers"].step_s == 12
    # The chain of bucket 0 has two copies of 2 s and one upload of 1 s in it, and two actions of compute of 1 s.
    assert found["D2H twice as fast"].step_s == 12
    assert found["H2D twice as fast"].step_s == 13.5
    assert found["compute twice as fast"].step_s == 13
    assert found["Adam twice as fast"].saved == pytest.approx(3 / 14)


def test_the_best_lever_comes_first():
    source = timeline()
    measured = measured_step(source, (1, 2), PERIOD_S)
    saved = [lever.saved for lever in levers(measured, measured.simulate())]

    assert saved == sorted(saved, reverse=True)


def test_what_the_simulation_does_not_know_stays_as_it_is():
    # 2 s of every step are hand-overs: the prediction is 2 s longer, too.
    assert found_levers(timeline(), step_s=16.0)["Adam twice as fast"].step_s == 13


def test_every_other_policy_is_tried_but_the_oracle_and_a_stale_one_is_told_apart():
    found = found_levers(timeline())

    assert found["`in_backward`"].exact
    assert not found["`delayed`"].exact
    assert "`serial`" not in found
    assert "`overlap`" not in found


def test_a_stale_step_is_simulated_as_the_runtime_runs_it():
    """It closes with step(), so no upload begins before the whole backward has ended."""
    seconds = {**SECONDS, "bwd": 3.0, "adam": 0.1, "h2d": 2.0}
    period_s = simulate(plan(), KindCost(seconds)).period_s
    found = found_levers(timeline(seconds=seconds), step_s=period_s)
    closes_with_step = simulate(plan("delayed", backwards=None), KindCost(seconds)).period_s
    closes_in_backward = simulate(plan("delayed", backwards=1), KindCost(seconds)).period_s

    assert closes_in_backward < closes_with_step
    assert found["`delayed`"].step_s == pytest.approx(closes_with_step)


def test_a_policy_that_cannot_clip_is_no_lever_for_a_run_that_clips():
    source = Timeline.of(simulate(plan(clip=True), KindCost(SECONDS), steps=4), PIECES)

    assert "`in_backward`" not in found_levers(source)
    assert "`delayed`" in found_levers(source)


def test_without_gates_model_is_a_lever_and_every_prediction_keeps_that_limit():
    source = replace(timeline(), facts={"gated": False})
    found = found_levers(source, step_s=17.0)

    # step() returns when h2d:0 is done: fwd:1 begins 2 s later than with gates, and fwd:0 right behind it.
    assert found["`model=`"].group == "model"
    assert found["`model=`"].step_s < 17.0
    assert found["Adam twice as fast"].step_s == 14.0  # bucket after bucket 3 s less


def test_bucket_sizes_are_tried_where_sizes_are_known():
    assert {"buckets twice as large", "buckets half as large"} <= set(found_levers(timeline()))
    assert not any(lever.group == "buckets" for lever in found_levers(replace(timeline(), pieces=None)).values())
    other = replace(timeline(), pieces=Pieces((1, 2, 3), 300))  # of another layout
    assert not any(lever.group == "buckets" for lever in found_levers(other).values())


def test_one_bucket_of_all_parameters_is_a_serial_chain():
    found = found_levers(timeline())

    # forward 2, backward 2, d2h 4, acc 1, norm 0.5, one bucket's chunks of 300 parameters: Adam 3 + 3, h2d 2.
    assert found["buckets twice as large"].step_s == pytest.approx(2 + 2 + 4 + 1 + 0.5 + 6 + 2)


def test_a_timeline_without_a_plan_cannot_be_simulated():
    with pytest.raises(ValueError) as caught:
        measured_step(replace(timeline(), plans={}), (1, 2), PERIOD_S)

    assert str(caught.value) == ("the timeline holds no plan for step 2: without one nothing can be simulated")
