"""The sentence: what limits a step and what would help most."""

from __future__ import annotations

from zoff_async.trace.exposure import KindUse
from zoff_async.trace.verdict import best_two, verdict
from zoff_async.trace.waiting import LaneUse
from zoff_async.trace.whatif import Lever


def lane(name: str, busy: float, capacity: int = 1) -> LaneUse:
    return LaneUse(name, capacity, busy, busy, {})


def kind(name: str, lane: str, work_s: float) -> KindUse:
    return KindUse(name, lane, 1, work_s, 0, 0, 0, 0)


def sentence(*lanes: LaneUse, kinds: tuple[KindUse, ...] = (), levers: tuple[Lever, ...] = (), ideal_s: float = 1.0):
    bound = max(lanes, key=lambda use: use.busy).lane if lanes else "cpu"
    return verdict(lanes, kinds, levers, step_s=1.0, ideal_s=ideal_s, bound_lane=bound)


def test_a_full_host_lane_is_told_with_its_work_and_the_two_best_levers():
    levers = (
        Lever("twice the workers", "host", 0.62, 0.38),
        Lever("Adam twice as fast", "host", 0.63, 0.37),
        Lever("`delayed`", "policy", 0.91, 0.09, exact=False),
        Lever("D2H twice as fast", "d2h", 0.95, 0.05),
    )
    told = sentence(
        lane("cpu", 0.96, capacity=2),
        lane("compute", 0.4),
        kinds=(kind("adam", "cpu", 1.88), kind("acc", "cpu", 0.04)),
        levers=levers,
    )

    assert told == (
        "host-bound: Adam fills 94 % of the step; twice the workers would save 38 %, `delayed` (stale by one step) 9 %"
    )


def test_forward_and_backward_together_fill_a_compute_lane():
    told = sentence(lane("compute", 0.97), kinds=(kind("fwd", "compute", 0.32), kind("bwd", "compute", 0.65)))

    assert told == "compute-bound: forward and backward fill 97 % of the step; nothing tried would save more than 2 %"


def test_a_full_copy_lane_names_its_copies():
    told = sentence(lane("h2d", 0.8), kinds=(kind("h2d", "h2d", 0.8),))

    assert told.startswith("copy-bound: uploads fill 80 % of the step; ")


def test_no_full_lane_and_a_step_near_its_ideal_is_a_matter_of_order():
    told = sentence(lane("cpu", 0.5), ideal_s=0.95)

    assert told.startswith("order-bound: the busiest lane (cpu) works 50 % of the step, the lanes wait for each other")


def test_a_step_far_from_its_ideal_is_limited_by_overhead():
    told = sentence(lane("cpu", 0.5), ideal_s=0.5)

    assert told.startswith(
        "overhead-bound: the step takes 2.0 x its ideal time, and the busiest lane (cpu) works 50 % of the step"
    )


def test_nothing_at_all_is_told_too():
    assert sentence().startswith("no lane did anything; ")


def test_what_there_is_to_buy_comes_before_what_is_only_a_number():
    adam = Lever("Adam twice as fast", "host", 0.6, 0.4)
    workers = Lever("twice the workers", "host", 0.6, 0.4)

    assert best_two([adam, workers]) == [workers]


def test_a_lane_of_the_users_own_has_its_name():
    assert sentence(lane("disk", 0.9), kinds=(kind("save", "disk", 0.9),)).startswith("disk-bound: save fill")
