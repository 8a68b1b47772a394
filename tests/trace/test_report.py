"""The whole report of steps worked out by hand, and of runs that lack something."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from tests.trace.hand import PERIOD_S, late, plan, recorded, span, texts, timeline
from tests.trace.test_critical import BY_HAND
from zoff_async.scheduler import KindCost, Layout, delayed, overlap, simulate
from zoff_async.trace import Timeline, Wait


def test_the_report_of_the_step_worked_out_by_hand():
    report = timeline(steps=5).report()

    assert report.steps == (1, 2, 3)
    assert (report.step_s, report.ideal_s, report.bound_s) == (PERIOD_S, PERIOD_S, 7.5)
    assert report.bound_lane == "cpu"
    assert (report.over_ideal, report.over_bound) == (1.0, PERIOD_S / 7.5)
    assert texts(report.critical_path) == BY_HAND
    assert report.path_s == {
        "adam": 5, "h2d": 2, "fwd": 1, "bwd": 1, "d2h": 4, "acc": 0.5, "norm": 0.5
    }  # fmt: skip
    assert report.verdict.startswith("order-bound: the busiest lane (cpu) works 54 % of the step")


def test_ideal_and_bound_do_not_know_of_overhead_and_the_step_does():
    slow = late(
        timeline(steps=5, seconds={"fwd": 1, "bwd": 1, "d2h": 1, "acc": 1, "norm": 1, "adam": 1, "h2d": 1}), 0.25
    )
    report = slow.report()

    assert report.step_s > report.ideal_s
    assert report.path_s["hand-over"] > 0
    assert (
        report.ideal_s
        == timeline(steps=5, seconds=dict.fromkeys(("fwd", "bwd", "d2h", "acc", "norm", "adam", "h2d"), 1))
        .report()
        .step_s
    )


def test_a_policy_without_slack_is_told_by_the_lane_that_is_full():
    cost = KindCost({"fwd": 0.1, "bwd": 0.1, "d2h": 0.1, "acc": 0.01, "norm": 0.01, "adam": 1.0, "h2d": 0.1})
    source = Timeline.of(simulate(delayed(Layout(chunks=(1,) * 8)), cost, steps=6))

    report = source.report()

    assert report.bound_lane == "cpu"
    assert report.over_bound == pytest.approx(1.0, abs=0.02)
    assert report.verdict.startswith("host-bound: Adam fills 9")
    assert "twice the workers would save" in report.verdict


def test_a_run_without_gates_is_measured_against_what_gates_would_allow():
    source = replace(timeline(steps=5), facts={"gated": False})

    assert source.report().ideal_s == PERIOD_S
    assert "`model=`" in [lever.name for lever in source.report().levers]


def test_waits_are_told_a_step():
    waits = tuple(Wait("weights", 0, 12.0 + 14 * step, 12.5 + 14 * step) for step in range(3))

    assert replace(timeline(steps=5), waits=waits).report().waits_s == {"weights": 0.5}


def test_several_backwards_a_step_are_reported_as_they_ran():
    two = overlap(Layout(chunks=(1, 1), backwards=None))
    source = Timeline.of(simulate(two, KindCost({}, 1.0), steps=5, backwards=3))
    report = source.report()

    assert report.ideal_s == report.step_s
    assert {kind.kind: kind.count for kind in report.kinds}["d2h"] == 6


def test_a_run_without_compute_spans_has_a_report_too():
    kept = tuple(s for s in timeline(steps=5).spans if s.lane != "compute")
    report = recorded(*kept, of=plan()).report()

    assert report.step_s == PERIOD_S
    assert {kind.kind: kind.hidden_s for kind in report.kinds}["d2h"] == 0


def test_an_edited_plan_with_a_node_of_the_users_own_is_reported():
    edited = plan().add("ema", after="adam", lane="cpu")
    source = Timeline.of(simulate(edited, KindCost({"ema": 2.0}, 1.0), steps=5))

    assert "ema" in [kind.kind for kind in source.report().kinds]


def test_everything_in_it_is_plain_and_survives_json():
    report = timeline(steps=5).report()
    plain = json.loads(json.dumps(report.asdict(), allow_nan=False))

    assert plain["critical_path"][1]["action"] == "h2d:0"
    assert plain["over_bound"] == pytest.approx(PERIOD_S / 7.5)
    assert {kind["kind"]: kind["bytes_per_s"] for kind in plain["kinds"]}["d2h"] == 200


def test_one_step_is_not_enough():
    with pytest.raises(ValueError) as caught:
        recorded(span("fwd:0", "compute", 0, 1), of=plan()).report()

    assert "record at least two in a row" in str(caught.value)
