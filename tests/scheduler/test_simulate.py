"""Simulations: figures that can be worked out by hand, and what large models cost."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import pytest

from tests.scheduler.virtual_log import as_log
from zoff_async.scheduler import (
    POLICIES,
    KindCost,
    Layout,
    MeasuredCost,
    delayed,
    delayed_flush,
    in_backward,
    overlap,
    serial,
    simulate,
)

THREE = Layout(chunks=(1, 1, 1), slots=2, bucket_bytes=(10, 20, 30))
COST = KindCost({"fwd": 1, "bwd": 2, "d2h": 1, "adam": 3, "h2d": 1})


def test_serial_takes_the_sum_of_everything():
    found = simulate(serial(THREE), COST)

    assert found.period_s == 3 * (1 + 2 + 1 + 3 + 1)
    assert found.resource_bound_s == 9
    assert found.utilisation == {"compute": 9 / 24, "d2h": 3 / 24, "cpu": 9 / 24, "h2d": 3 / 24}
    assert found.exposed_s == {"d2h": 3, "acc": 0, "norm": 0, "adam": 9, "h2d": 3}
    assert found.hidden_s == {"d2h": 0, "acc": 0, "norm": 0, "adam": 0, "h2d": 0}
    assert found.peak_slots == {"d2h": 1, "h2d": 1}
    assert found.peak_slot_bytes == {"d2h": 30, "h2d": 30}
    assert " ".join(map(str, found.critical_path)) == (
        "fwd:2 fwd:1 fwd:0 bwd:0 bwd:1 bwd:2 d2h:0 acc:0 d2h:1 acc:1 d2h:2 acc:2 norm "
        "adam:2.0 h2d:2 adam:1.0 h2d:1 adam:0.0 h2d:0"
    )


def test_overlap_hides_copies_and_waits_for_the_last_weights():
    """After backward: one copy, three updates, one upload, and the last forward before backward can begin."""
    found = simulate(overlap(THREE), COST)

    assert found.period_s == 6 + 1 + 9 + 1 + 1
    assert found.exposed_s == {"d2h": 1, "acc": 0, "norm": 0, "adam": 7, "h2d": 3}
    assert found.hidden_s == {"d2h": 2, "acc": 0, "norm": 0, "adam": 2, "h2d": 0}
    assert " ".join(map(str, found.critical_path)) == (
        "fwd:0 bwd:0 bwd:1 bwd:2 d2h:2 acc:2 norm adam:2.0 adam:1.0 adam:0.0 h2d:0"
    )


def test_the_critical_path_lasts_a_period():
    for policy in POLICIES.values():
        found = simulate(policy(THREE), COST, steps=8)
        assert sum(COST.seconds(action) for action in found.critical_path) == found.period_s


def test_a_declared_number_of_backwards_is_the_plans():
    found = simulate(in_backward(replace(THREE, backwards=3)), COST, steps=2, backwards=7)

    assert sum(span.action.kind == "bwd" for span in found.spans) == 2 * 3 * 3
    assert found.resource_bound_s == 27


def test_undeclared_backwards_are_the_callers():
    found = simulate(overlap(THREE), COST, steps=4, backwards=3)

    assert sum(span.action.kind == "bwd" for span in found.spans) == 4 * 3 * 3
    assert found.period_s == (1 + 6) + 9 + 9 + 1 + 9 + 1


def test_one_step_is_its_own_period():
    found = simulate(overlap(THREE), COST, steps=1)

    assert found.period_s == found.total_s == 9 + 1 + 9 + 1


def test_a_flush_can_be_simulated():
    found = simulate(delayed_flush(THREE), COST, steps=1)

    assert found.total_s == 10
    assert " ".join(map(str, found.critical_path)) == "adam:2.0 adam:1.0 adam:0.0 h2d:0"


def test_two_runs_are_the_same():
    layout = Layout(chunks=(3, 1, 4, 1, 5), workers=3, slots=2)
    cost = KindCost({"fwd": 0.1, "bwd": 0.7, "d2h": 0.31, "acc": 0.01, "adam": 0.3, "h2d": 0.17})

    assert simulate(delayed(layout), cost) == simulate(delayed(layout), cost)


def test_a_run_simulated_with_its_own_times_gives_itself():
    first = simulate(overlap(THREE), COST)
    again = simulate(overlap(THREE), MeasuredCost(first.spans))

    assert as_log(again.spans) == as_log(first.spans)


def test_a_users_node_takes_time_and_is_not_called():
    async def run(action, step):
        raise AssertionError("a simulation runs nothing")

    plan = overlap(THREE).add("ema", after="adam", before="fwd@+1", run=run)

    assert simulate(plan, KindCost({"ema": 5, "fwd": 1})).period_s == 3 + 5


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_more_workers_shorten_the_update(workers):
    layout = Layout(chunks=(4, 4), workers=workers)

    assert simulate(overlap(layout), KindCost({"adam": 1})).period_s == 8 / workers


def test_it_prints_what_matters():
    assert simulate(overlap(THREE), COST).describe() == (
        "overlap: a step every 18 s, 2.00 x the resource bound of 9 s\n"
        "busy     compute 50%  d2h 17%  cpu 50%  h2d 17%\n"
        "exposed  d2h 1 s  acc 0 s  norm 0 s  adam 7 s  h2d 3 s\n"
        "hidden   d2h 2 s  acc 0 s  norm 0 s  adam 2 s  h2d 0 s\n"
        "slots    d2h 1 (30 bytes)  h2d 2 (50 bytes)\n"
        "critical fwd:0 bwd:0 bwd:1 bwd:2 d2h:2 acc:2 norm adam:2.0 adam:1.0 adam:0.0 h2d:0\n"
    )


@pytest.mark.parametrize(("steps", "backwards"), [(0, 1), (1, 0)])
def test_at_least_one_step_and_one_backward(steps, backwards):
    with pytest.raises(ValueError) as caught:
        simulate(overlap(THREE), COST, steps=steps, backwards=backwards)

    assert str(caught.value) == f"steps is {steps}, backwards {backwards}: both are at least 1"


async def test_it_runs_beside_a_running_loop():
    loop = asyncio.get_running_loop()

    assert simulate(overlap(THREE), COST).period_s == 18
    assert asyncio.get_running_loop() is loop
    await asyncio.sleep(0)


@pytest.mark.parametrize("name", POLICIES)
def test_three_steps_of_a_large_model_are_simulated_quickly(name):
    """400 buckets of 16 chunks are a model of 13 billion parameters."""
    plan = POLICIES[name](Layout(chunks=(16,) * 400, workers=8))
    cost = KindCost({"fwd": 0.01, "bwd": 0.02, "d2h": 0.03, "acc": 0.001, "adam": 0.01, "h2d": 0.03})
    start_s = time.process_time()
    found = simulate(plan, cost, steps=3)

    assert len(found.spans) == 3 * len(plan.actions)
    assert time.process_time() - start_s < 6  # 0.6 s on an idle core
