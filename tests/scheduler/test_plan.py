"""Step plans: what is in them, and how they are asked."""

from __future__ import annotations

import pytest

from zoff_async.errors import PlanError
from zoff_async.scheduler import Action, Edge, Lane, Layout, in_backward, overlap

LAYOUT = Layout(chunks=(2, 1), slots=2, workers=3)


def test_a_plan_is_a_value():
    assert overlap(LAYOUT) == overlap(LAYOUT)
    assert hash(overlap(LAYOUT)) == hash(overlap(LAYOUT))
    assert overlap(LAYOUT) != in_backward(LAYOUT)
    assert repr(overlap(LAYOUT)) == "<StepPlan 'overlap': 14 actions, 34 edges>"


def test_a_plan_cannot_be_changed():
    with pytest.raises(AttributeError):
        overlap(LAYOUT).name = "mine"  # type: ignore[misc]


def test_kinds_know_their_lanes_and_parts():
    plan = overlap(LAYOUT)

    assert plan.lane_of["adam"] == plan.lane_of["acc"] == "cpu"
    assert plan.parts == {
        "fwd": "backward",
        "bwd": "backward",
        "d2h": "backward",
        "acc": "backward",
        "norm": "close",
        "adam": "close",
        "h2d": "close",
    }
    assert plan.exact
    assert Lane("cpu", 3) in plan.lanes


def test_the_place_in_the_plan_is_the_priority():
    plan = overlap(LAYOUT)

    assert plan.priority(Action("adam", 1, 0)) < plan.priority(Action("adam", 0, 0))
    assert plan.priority(Action("fwd", 1, lag=1)) == 0


def test_neighbours_come_as_edges_with_their_rules():
    plan = overlap(LAYOUT)

    assert plan.predecessors("h2d:0") == (
        Edge(Action("adam", 0, 0), Action("h2d", 0), "update"),
        Edge(Action("adam", 0, 1), Action("h2d", 0), "update"),
    )
    assert [(str(edge), edge.rule) for edge in plan.successors(Action("h2d", 1))] == [
        ("h2d:1 -> fwd:1@+1", "weights-before-forward"),
        ("h2d:1 -> adam:1.0@+1", "slot-reuse"),
    ]
    assert [str(edge) for edge in plan.predecessors("fwd:1")] == [
        "bwd:1 -> fwd:1#1",
        "bwd:1 -> fwd:1@+1",
        "h2d:1 -> fwd:1@+1",
    ]


def test_an_action_that_is_not_there_is_named_with_those_that_are():
    with pytest.raises(PlanError) as caught:
        overlap(LAYOUT).predecessors("h2d:7")
    assert str(caught.value) == "h2d:7 is not in plan 'overlap'; its h2d actions are h2d:1 h2d:0"

    with pytest.raises(PlanError) as caught:
        overlap(LAYOUT).successors("copy:1")
    assert str(caught.value) == ("copy:1 is not in plan 'overlap'; its kinds are fwd, bwd, d2h, acc, norm, adam, h2d")


def test_a_short_name_stands_for_everything_below_it():
    plan = overlap(LAYOUT)

    assert plan.matching("adam:0") == (Action("adam", 0, 0), Action("adam", 0, 1))
    assert plan.matching(["norm", Action("h2d")]) == (Action("norm"), Action("h2d", 1), Action("h2d", 0))
    assert plan.matching("fwd@+1") == (Action("fwd", 1, lag=1), Action("fwd", 0, lag=1))


def test_a_lane_can_be_given_another_capacity():
    assert Lane("d2h", 2) in overlap(LAYOUT).with_capacity("d2h", 2).lanes

    with pytest.raises(PlanError) as caught:
        overlap(LAYOUT).with_capacity("gpu", 2)
    assert str(caught.value) == "plan 'overlap' has no lane 'gpu'; its lanes are compute, d2h, cpu, h2d, net"

    with pytest.raises(ValueError, match="capacity is 0: a lane needs at least 1"):
        overlap(LAYOUT).with_capacity("d2h", 0)
