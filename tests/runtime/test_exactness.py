"""Every exact policy equals the serial oracle bit for bit, whatever sizes, threads, loops and devices it runs with."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

import zoff_async as zoff
from tests.runtime.pairwise import pairwise
from tests.runtime.scenes import (
    EARLY,
    LATE,
    Outcome,
    Stage,
    assert_same_bits,
    at_stage,
    odd_loss,
    play,
    set_lr,
    train,
)

DIMENSIONS: dict[str, tuple[Any, ...]] = {
    "policy": ("overlap", "in_backward", "serial"),
    "faults": (None, LATE, EARLY),
    "gated": (False, True),
    "bucket_bytes": (1, 333, 1 << 30),
    "chunk_numel": (7, 1, 101, 1 << 40),
    "accumulate": (1, 3),
    "slots": (1, 4),
    "dtype": (torch.float32, torch.bfloat16, torch.float16),
    "max_norm": (None, 0.3),
    "workers": (1, 3),
    "kernel": ("numexpr", "numba"),
    "event_loop": ("asyncio", "uvloop"),
    "groups": (1, 2),
    "rule": (zoff.OffloadAdamW, zoff.OffloadAdam),
}


def _allowed(case: dict[str, Any]) -> bool:
    return case.get("policy") != "in_backward" or case.get("max_norm") is None


CASES = pairwise(DIMENSIONS, _allowed)


@cache
def oracle(stage: Stage) -> Outcome:
    return play(stage)


def _label(case: dict[str, Any]) -> str:
    faults = {None: "host", LATE: "late", EARLY: "early"}[case["faults"]]
    return f"{case['policy']}-{faults}-{case['bucket_bytes']}-{case['chunk_numel']}-x{case['accumulate']}"


@pytest.mark.parametrize("case", CASES, ids=[f"{i}-{_label(case)}" for i, case in enumerate(CASES)])
def test_twenty_steps_equal_the_serial_oracle(case):
    """Parameters, masters, moments, counts and norms; odd, tied, unused and alternating parameters among them."""
    stage = Stage(**case)

    assert_same_bits(play(stage), oracle(stage.oracle()))


def test_the_cases_hold_every_pair_of_values():
    """What the cases of the test above promise to cover."""
    for a in DIMENSIONS:
        for b in DIMENSIONS:
            if a < b:
                wanted = {(x, y) for x in DIMENSIONS[a] for y in DIMENSIONS[b] if _allowed({a: x, b: y})}
                assert wanted <= {(case[a], case[b]) for case in CASES}


def test_what_is_trained_moves_and_the_rest_does_not():
    """The oracle is no model that stands still: used parameters move each step, the unused ones never."""
    start = Stage().model()
    end = oracle(Stage())

    before = dict(start.named_parameters())
    assert torch.equal(end.weights["never"], before["never"])
    assert end.counts["never"] == 0
    assert end.counts["left.weight"] == end.counts["right.weight"] == 10
    assert end.counts["embed.weight"] == end.counts["scale"] == 20
    moved = [name for name in end.weights if not torch.equal(end.weights[name], before[name])]
    assert set(moved) == set(end.weights) - {"never", "empty"}


@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_run_that_is_saved_and_continued_by_other_policies_is_the_same_run(accumulate):
    """Five steps each under serial, overlap, in_backward and serial again, with other sizes and a new model each
    time.
    """
    whole = Stage(accumulate=accumulate)
    parts = [
        at_stage(whole, policy="overlap", bucket_bytes=200, chunk_numel=11, gated=True, faults=LATE),
        at_stage(whole, policy="in_backward", bucket_bytes=1, kernel="numba", event_loop="uvloop"),
        at_stage(whole, policy="serial", bucket_bytes=1 << 20, workers=2),
        at_stage(whole, policy="in_backward", bucket_bytes=77, slots=1, faults=EARLY),
    ]
    saved: Any = None
    for number, part in enumerate(parts):
        model = part.model()
        optimizer = part.optimizer(model)
        if saved is not None:
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
        train(model, optimizer, range(5 * number, 5 * number + 5), part)
        saved = model.state_dict(), optimizer.state_dict()
        outcome = Outcome.of(model, optimizer)
        optimizer.close()

    assert_same_bits(outcome, oracle(whole))


def test_a_state_is_a_snapshot_that_later_steps_do_not_change():
    """Saved in the middle of a run with the update in flight, loaded after it has gone on."""
    stage = Stage(policy="overlap", gated=True, bucket_bytes=1, faults=LATE)
    model = stage.model()
    optimizer = stage.optimizer(model)
    train(model, optimizer, range(10), stage)
    state = optimizer.state_dict()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    train(model, optimizer, range(10, 15), stage)
    optimizer.load_state_dict(state)
    model.load_state_dict(weights)
    train(model, optimizer, range(10, 20), stage)

    assert_same_bits(Outcome.of(model, optimizer), oracle(Stage()))
    optimizer.close()


@pytest.mark.parametrize("policy", ["overlap", "in_backward"])
def test_state_and_weights_are_whole_between_backward_and_step(policy):
    """A state that is read after backward has begun to fill the lanes is that of the last committed step.

    Or, where Adam runs inside backward, the read is refused.
    """
    stage = Stage(policy=policy, bucket_bytes=1, faults=LATE)
    model = stage.model()
    optimizer = stage.optimizer(model)
    train(model, optimizer, range(3), stage)
    before = Outcome.of(model, optimizer)
    odd_loss(model, 3).backward()
    try:
        counts = [float(values["step"]) for values in optimizer.state_dict()["state"].values()]
        got = Outcome.of(model, optimizer)
    except zoff.ZoffError:
        got = None
    optimizer.step()
    after = Outcome.of(model, optimizer)
    optimizer.close()

    if got is not None:
        assert list(got.counts.values()) == counts
        assert_same_bits(got, before if policy == "overlap" else after)


def test_gradients_may_stay_over_several_steps():
    """Without zero_grad the next backward adds to what is there, clipped as torch leaves it, under every policy."""
    outcomes = []
    for policy in ("serial", "overlap"):
        stage = Stage(policy=policy, bucket_bytes=1 if policy == "overlap" else None, max_norm=0.3)
        model = stage.model()
        optimizer = stage.optimizer(model)
        for step in range(6):
            odd_loss(model, step).backward()
            optimizer.step()
        outcomes.append(Outcome.of(model, optimizer))
        optimizer.close()

    assert_same_bits(outcomes[1], outcomes[0])


def test_a_slot_in_each_direction_is_enough_for_a_policy_that_asks_for_more():
    """Slots are the plan's: a policy that builds its plan for eight of them gets eight."""
    from dataclasses import replace

    def roomy(layout):
        return zoff.overlap(replace(layout, slots=8))

    stage = Stage(policy=roomy, bucket_bytes=1, slots=1, faults=LATE, steps=5)

    assert_same_bits(play(stage), play(stage.oracle()))


def test_many_backwards_without_a_step_leave_no_trace():
    """Gradients that are looked at and thrown away, a hundred times, change nothing."""
    stage = Stage(policy="overlap", bucket_bytes=300, steps=4)
    model = stage.model()
    optimizer = stage.optimizer(model)
    train(model, optimizer, range(2), stage)
    for call in range(100):
        odd_loss(model, 500 + call).backward()
        optimizer.zero_grad()
    train(model, optimizer, range(2, 4), stage)

    assert_same_bits(Outcome.of(model, optimizer), play(stage.oracle()))
    optimizer.close()


def test_parameters_may_be_unfrozen_in_the_middle_of_a_run():
    """As torch: from its first gradient on a parameter is trained, with a count of its own."""
    outcomes = {}
    for policy in ("serial", "overlap", "in_backward"):
        stage = Stage(policy=policy, bucket_bytes=100)
        model = stage.model()
        optimizer = stage.optimizer(model)
        train(model, optimizer, range(3), stage)
        model.frozen.requires_grad_(True)
        for step in range(3, 6):
            set_lr(optimizer, step)
            odd_loss(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        outcomes[policy] = Outcome.of(model, optimizer)
        optimizer.close()

    assert outcomes["serial"].counts["frozen.weight"] == 3
    assert_same_bits(outcomes["overlap"], outcomes["serial"])
    assert_same_bits(outcomes["in_backward"], outcomes["serial"])
