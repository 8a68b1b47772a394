"""Edits: overlaps taken away, nodes put in, rules dropped."""

from __future__ import annotations

import pytest

from tests.scheduler.virtual_log import edges, timed
from zoff_async.errors import PlanError
from zoff_async.scheduler import Action, Edge, Kind, Lane, Layout, StepPlan, delayed, in_backward, overlap

ROOMY = Layout(chunks=(1, 1, 1), slots=3)
TIGHT = Layout(chunks=(1, 1, 1), slots=1)
SECONDS = {"fwd": 1, "bwd": 1, "d2h": 1, "adam": 1, "h2d": 1}


def overlaps(log, kind_a, kind_b):
    """Pairs of actions of the two kinds that ran at the same time."""
    a = [line for line in log if line[0].startswith(kind_a)]
    b = [line for line in log if line[0].startswith(kind_b)]
    return [(x[0], y[0]) for x in a for y in b if x[1] < y[2] and y[1] < x[2]]


# serialize


def test_with_enough_slots_all_of_the_first_kind_goes_first():
    plan = overlap(ROOMY).serialize("adam", "h2d")

    assert edges(plan, "serialize:adam-h2d") == [
        "adam:1.0 -> h2d:2",
        "adam:0.0 -> h2d:2",
        "adam:2.0 -> h2d:1",
        "adam:0.0 -> h2d:1",
        "adam:2.0 -> h2d:0",
        "adam:1.0 -> h2d:0",
    ]
    assert [line for line in timed(plan, SECONDS) if line[0][:4] in ("adam", "h2d:")] == [
        ("adam:2.0", 7, 8),
        ("adam:1.0", 8, 9),
        ("adam:0.0", 9, 10),
        ("h2d:2", 10, 11),
        ("h2d:1", 11, 12),
        ("h2d:0", 12, 13),
    ]


def test_with_one_slot_the_two_kinds_alternate():
    plan = overlap(TIGHT).serialize("adam", "h2d")

    assert edges(plan, "serialize:adam-h2d") == []  # one slot serializes them already
    assert overlaps(timed(plan, SECONDS, steps=3), "adam", "h2d") == []


@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize("waves", [1, 2])
@pytest.mark.parametrize(("a", "b"), [("adam", "h2d"), ("h2d", "adam"), ("d2h", "acc"), ("bwd", "d2h"), ("fwd", "h2d")])
def test_no_action_of_one_kind_runs_beside_one_of_the_other(slots, waves, a, b):
    layout = Layout(chunks=(2, 1, 3), slots=slots, workers=2)
    log = timed(overlap(layout).serialize(a, b), {**SECONDS, "acc": 2}, steps=3, waves=waves)

    found = overlaps(log, a, b)
    if (a, b, waves) == ("bwd", "d2h", 2):  # a backward of the same step cannot be held
        found = [pair for pair in found if "#1" not in pair[0]]
    assert found == []


def test_the_overlap_was_there_before():
    layout = Layout(chunks=(2, 1, 3), slots=3, workers=2)
    log = timed(overlap(layout), {**SECONDS, "acc": 2}, steps=3)

    assert all(overlaps(log, a, b) for a, b in [("adam", "h2d"), ("d2h", "acc"), ("bwd", "d2h"), ("fwd", "h2d")])


def test_an_overlap_across_steps_is_taken_away_too():
    layout = Layout(chunks=(1, 1, 1), slots=2, backwards=1)
    slow = {**SECONDS, "d2h": 3}

    assert ("fwd:2@2", "d2h:1@1") in overlaps(timed(delayed(layout), slow, steps=4), "fwd", "d2h")
    plan = delayed(layout).serialize("fwd", "d2h")
    assert overlaps(timed(plan, slow, steps=4), "fwd", "d2h") == []


def test_serializing_inside_backward_alternates_as_slots_allow():
    plan = in_backward(Layout(chunks=(1, 1, 1), slots=2)).serialize("d2h", "adam")

    assert edges(plan, "serialize:d2h-adam") == ["d2h:1 -> adam:0.0", "d2h:2 -> adam:1.0"]
    assert overlaps(timed(plan, SECONDS, steps=3), "d2h", "adam") == []


def test_runs_that_begin_and_end_with_one_kind_are_kept_apart_across_steps():
    x0, y, x1 = Action("x", 0), Action("y", 0), Action("x", 1)
    kinds = (Kind("x", "cpu", "open"), Kind("y", "net", "open"))
    inside = (Edge(x0, y, "mine"), Edge(y, x1, "mine"))
    plan = StepPlan("mine", (x0, y, x1), inside, kinds, (Lane("cpu"), Lane("net", 9)))
    seconds = {"x": 1, "y": 1}

    assert overlaps(timed(plan, seconds, steps=3), "x", "y") != []
    apart = plan.serialize("x", "y")
    assert edges(apart, "serialize:x-y") == ["x:1 -> y:0@+1", "y:0 -> x:0@+1"]
    assert overlaps(timed(apart, {"x": 1, "y": 3}, steps=3), "x", "y") == []


@pytest.mark.parametrize(
    ("kinds", "message"),
    [
        (
            ("adam", "gpu"),
            "plan 'overlap' has no 'gpu' to serialize; its kinds are fwd, bwd, d2h, acc, norm, adam, h2d",
        ),
        (("adam", "adam"), "serialize('adam', 'adam'): two different kinds are needed"),
    ],
)
def test_serialize_refuses_kinds_that_make_no_sense(kinds, message):
    with pytest.raises(PlanError) as caught:
        overlap(ROOMY).serialize(*kinds)

    assert str(caught.value) == message


def test_serialize_refuses_what_would_hold_autograd():
    with pytest.raises(PlanError) as caught:
        overlap(ROOMY).serialize("d2h", "bwd")

    assert str(caught.value).splitlines()[0] == (
        "edge d2h:0 -> bwd:1 (rule serialize:d2h-bwd) would hold back autograd, which runs fwd and bwd by itself; "
        "only fwd of the next step (fwd:...@+1) can be held"
    )


# add


def test_a_node_follows_what_it_is_put_behind():
    plan = overlap(ROOMY).add("ema", after="adam")

    assert plan.actions[-1] == Action("ema")
    assert plan.kinds[-1] == Kind("ema", "cpu", "close")
    assert edges(plan, "node") == ["adam:2.0 -> ema", "adam:1.0 -> ema", "adam:0.0 -> ema"]
    assert edges(plan, "node-order") == ["ema -> ema@+1"]


def test_a_node_stands_before_what_waits_for_it():
    plan = overlap(ROOMY).add(Action("ema", 1), after="adam:1.0", before=["h2d:1", "fwd:2@+1"])

    assert plan.actions.index(Action("ema", 1)) == plan.actions.index(Action("h2d", 1)) - 1
    assert edges(plan, "node") == ["adam:1.0 -> ema:1", "ema:1 -> h2d:1", "ema:1 -> fwd:2@+1"]


def test_a_node_that_a_backward_waits_for_lives_once_a_backward():
    plan = overlap(ROOMY).add("look:0", after="d2h:0", before="acc:0")

    assert plan.parts["look"] == "backward"
    assert edges(plan, "node-order") == ["look:0 -> look:0@+1", "look:0 -> look:0#1"]
    assert [line[0] for line in timed(plan, {"look": 1}, waves=2)] == ["look:0", "look:0#1"]


def test_a_node_behind_a_backward_runs_once_when_all_are_done():
    plan = overlap(ROOMY).add("statistics", after="acc")

    assert plan.parts["statistics"] == "close"
    assert [line[0] for line in timed(plan, {"statistics": 1}, waves=3)] == ["statistics"]


def test_a_node_before_an_open_part_opens_with_it():
    assert delayed(ROOMY).add("look", before="adam").parts["look"] == "open"


def test_the_part_can_be_given():
    assert overlap(ROOMY).add("look", after="acc:0", part="backward").parts["look"] == "backward"


def test_a_node_keeps_its_coroutine():
    async def run(action, step): ...

    plan = overlap(ROOMY).add("ema:0", after="adam:0", run=run).add("ema:1", after="adam:1")

    assert dict(plan.runs) == {Action("ema", 0): run}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"action": "norm", "after": "acc:0"}, "norm is in plan 'overlap' already; give the node a name of its own"),
        ({"action": "ema"}, "ema hangs on nothing: give after= or before=, with actions of plan 'overlap'"),
        (
            {"action": "ema", "after": "adam:9"},
            "adam:9 is not in plan 'overlap'; its adam actions are adam:2.0 adam:1.0 adam:0.0",
        ),
        (
            {"action": "ema", "after": ["norm", "updates"]},
            "updates is not in plan 'overlap'; its kinds are fwd, bwd, d2h, acc, norm, adam, h2d",
        ),
        (
            {"action": "ema", "after": "adam:0@+1"},
            "after=adam:0.0@+1: a node waits for actions of its own backward and step only",
        ),
        (
            {"action": "adam:9.0", "after": "norm", "lane": "h2d"},
            "adam:9.0 would run on lane 'h2d' in part 'close', but kind 'adam' runs on lane 'cpu' in part 'close'; "
            "use a kind of its own",
        ),
        (
            {"action": "ema", "after": "adam", "lane": "gpu"},
            "kind 'ema' runs on lane 'gpu', which plan 'overlap' does not have; "
            "its lanes are compute, d2h, cpu, h2d, net",
        ),
        (
            {"action": "ema", "after": "h2d:2", "before": "adam:2"},
            "these actions wait for each other: ema -> adam:2.0 -> h2d:2 -> ema (rules node, update); "
            "take one of the edges away\n"
            "  ... d2h:1 d2h:2 acc:0 acc:1 acc:2 norm >>ema<< adam:2.0 adam:1.0 adam:0.0 h2d:2 h2d:1 h2d:0",
        ),
    ],
)
def test_a_node_that_makes_no_sense_is_refused(arguments, message):
    with pytest.raises(PlanError) as caught:
        overlap(ROOMY).add(**arguments)

    assert str(caught.value) == message


# without


def test_a_rule_that_is_not_needed_can_be_dropped():
    plan = overlap(ROOMY).without("state-order")

    assert edges(plan, "state-order") == []
    assert len(plan.edges) == len(overlap(ROOMY).edges) - 3


def test_a_rule_that_is_needed_stays():
    with pytest.raises(PlanError) as caught:
        overlap(TIGHT).without("weights-before-forward")

    assert str(caught.value).splitlines()[0] == (
        "fwd:2 may start before h2d:2 of the step before is done: it would read weights that are still on their way"
    )


def test_a_rule_that_no_edge_has_is_named_with_those_that_exist():
    with pytest.raises(PlanError) as caught:
        overlap(TIGHT).without("slots")

    assert str(caught.value) == (
        "no edge of plan 'overlap' has rule 'slots'; its rules are program-order, gradient, accumulate-in-order, "
        "slot-reuse, norm-barrier, state-order, update, weights-before-forward, gradient-store"
    )


def test_an_edit_leaves_the_plan_it_came_from_alone():
    plan = overlap(ROOMY)
    text = str(plan)
    plan.add("ema", after="adam").serialize("adam", "h2d").without("state-order")

    assert str(plan) == text
