"""What is certain to be done before what, by any chain of edges."""

from __future__ import annotations

from tests.scheduler.virtual_log import edges
from zoff_async.scheduler import Action, Edge, Kind, Lane, Layout, StepPlan, overlap
from zoff_async.scheduler.reach import Reach, topological_order


def names(plan, bits):
    return {str(action) for i, action in enumerate(plan.actions) if bits >> i & 1}


def reach_of(plan):
    return Reach(plan, topological_order(plan))


def test_the_order_keeps_every_edge_and_the_plans_priority_among_free_ones():
    plan = overlap(Layout(chunks=(1, 1)))
    order = [str(plan.actions[i]) for i in topological_order(plan)]

    assert order == [str(action) for action in plan.actions]
    last_first = topological_order(plan, lambda i: (-i,))
    place = {i: n for n, i in enumerate(last_first)}
    inside = [link for link in plan.links if not link.backward and not link.lag]
    assert inside
    assert all(place[link.before] < place[link.after] for link in inside)
    assert last_first != sorted(last_first)


def test_what_hangs_on_a_cycle_is_missing_from_the_order():
    a, b, c = Action("a"), Action("b"), Action("c")
    kinds = tuple(Kind(name, "cpu", "close") for name in "abc")
    plan = StepPlan("ring", (a, b, c), (Edge(b, c, "r"), Edge(c, b, "r")), kinds, (Lane("cpu"),))

    assert topological_order(plan) == [0]


def test_within_a_step_predecessors_are_found_through_chains():
    plan = overlap(Layout(chunks=(1, 1), slots=1))

    assert names(plan, reach_of(plan).now[plan.index[Action("acc", 0)]]) == {
        "fwd:1",
        "fwd:0",
        "bwd:0",
        "d2h:0",
        "acc:0",
    }


def test_of_the_step_before_everything_is_done_before_its_weights_are_read():
    plan = overlap(Layout(chunks=(1, 1), slots=1))

    done = names(plan, reach_of(plan).next_step[plan.index[Action("fwd", 1)]])
    assert {"norm", "adam:1.0", "h2d:1"} <= done
    assert "h2d:0" not in done


def test_of_the_backward_before_a_copy_waits_for_its_slot_only():
    plan = overlap(Layout(chunks=(1, 1), slots=2))
    assert "acc:0 -> d2h:0#1" in edges(plan, "slot-reuse")

    done = names(plan, reach_of(plan).next_backward[plan.index[Action("d2h", 0)]])
    assert "acc:0" in done
    assert "acc:1" not in done
