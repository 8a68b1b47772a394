"""The delayed policy equals a loop written by hand that applies the gradient of step t-1 at step t, bit for bit.

The loop by hand uses the serial optimizer: it keeps each step's gradients, with the learning rate of their step, and
hands them to the optimizer one step later.
"""

from __future__ import annotations

import gc
import threading
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zoff_async as zoff
from tests.runtime.scenes import (
    EARLY,
    LATE,
    Beside,
    Outcome,
    Stage,
    assert_same_bits,
    at_stage,
    odd_loss,
    set_lr,
    train,
    within,
)
from zoff_async.cpu_ops import Pool
from zoff_async.step import Step


class ByHand:
    """A delayed run written out: gradients are computed now and applied one step later."""

    def __init__(self, stage: Stage) -> None:
        self.stage = at_stage(stage.oracle(), policy="serial", accumulate=1, warmup=0)
        self.model = self.stage.model()
        self.optimizer = self.stage.optimizer(self.model)
        self.pending: list[Tensor | None] | None = None
        self.pending_lr: list[float] = []

    def step(self, number: int, *, accumulate: int, delayed: bool = True) -> None:
        set_lr(self.optimizer, number)
        named = [p for p in self.model.parameters() if p.requires_grad]
        taken: list[Tensor | None] = [None] * len(named)
        for micro in range(accumulate):
            loss = odd_loss(self.model, number * accumulate + micro)
            for i, gradient in enumerate(torch.autograd.grad(loss, named, allow_unused=True)):
                if gradient is not None:
                    taken[i] = gradient if taken[i] is None else taken[i] + gradient
        rates = [group["lr"] for group in self.optimizer.param_groups]
        self.apply()
        self.pending, self.pending_lr = taken, rates
        if not delayed:
            self.apply()

    def apply(self) -> None:
        """Apply what is pending, with the learning rate of its own step."""
        if self.pending is None:
            return
        now = [group["lr"] for group in self.optimizer.param_groups]
        for group, rate in zip(self.optimizer.param_groups, self.pending_lr, strict=True):
            group["lr"] = rate
        named = [p for p in self.model.parameters() if p.requires_grad]
        for parameter, gradient in zip(named, self.pending, strict=True):
            parameter.grad = gradient
        self.optimizer.step()
        self.optimizer.zero_grad()
        for group, rate in zip(self.optimizer.param_groups, now, strict=True):
            group["lr"] = rate
        self.pending = None

    def outcome(self) -> Outcome:
        outcome = Outcome.of(self.model, self.optimizer)
        self.optimizer.close()
        return outcome


def by_hand(stage: Stage, *, flush_after: tuple[int, ...] = ()) -> Outcome:
    hand = ByHand(stage)
    for number in range(stage.steps):
        hand.step(number, accumulate=stage.accumulate, delayed=number >= stage.warmup)
        if number in flush_after:
            hand.apply()
    hand.apply()
    return hand.outcome()


def delayed_run(stage: Stage, *, flush_after: tuple[int, ...] = (), flush: str = "synchronize") -> Outcome:
    model = stage.model()
    optimizer = stage.optimizer(model)
    done = 0
    for number in (*flush_after, stage.steps - 1):
        train(model, optimizer, range(done, number + 1), stage)
        done = number + 1
        getattr(optimizer, flush)()
    outcome = Outcome.of(model, optimizer)
    optimizer.close()
    return outcome


DELAYED = Stage(policy="delayed", bucket_bytes=200, chunk_numel=13)
CASES = {
    "plain": DELAYED,
    "one bucket": at_stage(DELAYED, bucket_bytes=1 << 30, chunk_numel=1 << 40),
    "a bucket each, one slot": at_stage(DELAYED, bucket_bytes=1, slots=1, kernel="numba", workers=2),
    "clipped": at_stage(DELAYED, max_norm=0.3, gated=True),
    "accumulated": at_stage(DELAYED, accumulate=3, event_loop="uvloop"),
    "accumulated and clipped": at_stage(DELAYED, accumulate=3, max_norm=0.3, faults=LATE, gated=True),
    "bf16": at_stage(DELAYED, dtype=torch.bfloat16, gated=True),
    "fp16 in two groups": at_stage(DELAYED, dtype=torch.float16, groups=2, rule=zoff.OffloadAdam),
    "late": at_stage(DELAYED, faults=LATE),
    "late and gated": at_stage(DELAYED, faults=LATE, gated=True, groups=2),
    "early": at_stage(DELAYED, faults=EARLY, gated=True, bucket_bytes=1),
    "warm-up": at_stage(DELAYED, warmup=4, gated=True),
    "late warm-up": at_stage(DELAYED, warmup=3, faults=LATE, slots=1, max_norm=0.3),
}


@pytest.mark.parametrize("name", CASES)
def test_it_equals_the_loop_by_hand(name):
    stage = CASES[name]

    assert_same_bits(delayed_run(stage), by_hand(stage))


@pytest.mark.parametrize("flush", ["synchronize", "state_dict"])
def test_a_flush_in_the_middle_applies_what_is_pending(flush):
    """And the step after it applies nothing, like the first one."""
    stage = at_stage(DELAYED, faults=LATE, gated=True, max_norm=0.3)

    got = delayed_run(stage, flush_after=(2, 3, 11), flush=flush)
    assert_same_bits(got, by_hand(stage, flush_after=(2, 3, 11)))


def test_flushing_twice_is_flushing_once():
    model = DELAYED.model()
    optimizer = DELAYED.optimizer(model)
    train(model, optimizer, range(3), DELAYED)
    optimizer.synchronize()
    first = Outcome.of(model, optimizer)
    closed = optimizer._runtime.executor.statistics().steps_opened
    optimizer.synchronize()
    optimizer.state_dict()
    assert_same_bits(Outcome.of(model, optimizer), first)
    assert optimizer._runtime.executor.statistics().steps_opened == closed
    optimizer.close()


def test_the_first_step_applies_nothing_and_closing_applies_the_last_gradient():
    model = DELAYED.model()
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = DELAYED.optimizer(model)
    train(model, optimizer, range(1), DELAYED)
    assert all(torch.equal(p, start[name]) for name, p in model.named_parameters())
    optimizer.close()

    wanted = by_hand(at_stage(DELAYED, steps=1))
    got = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    assert all(torch.equal(got[name], wanted.weights[name]) for name in got)


@pytest.mark.parametrize("warmup", [0, 3])
def test_a_resumed_run_equals_one_that_synchronized_there(warmup):
    """Saved after step 5 and continued by a new optimizer on a new model: no warm-up again, nothing lost."""
    stage = at_stage(DELAYED, steps=10, warmup=warmup)
    model = stage.model()
    optimizer = stage.optimizer(model)
    train(model, optimizer, range(6), stage)
    state, weights = optimizer.state_dict(), model.state_dict()
    resumed = stage.model()
    again = stage.optimizer(resumed)
    resumed.load_state_dict(weights)
    again.load_state_dict(state)
    optimizer.close()
    train(resumed, again, range(6, 10), stage)
    again.synchronize()

    assert_same_bits(Outcome.of(resumed, again), by_hand(stage, flush_after=(5,)))
    again.close()


def test_a_state_that_has_just_been_loaded_can_be_read_and_saved():
    """No update is pending after a load, so nothing is said of edits."""
    model = DELAYED.model()
    optimizer = DELAYED.optimizer(model)
    train(model, optimizer, range(3), DELAYED)
    state, weights = optimizer.state_dict(), {k: v.clone() for k, v in model.state_dict().items()}
    train(model, optimizer, range(3, 5), DELAYED)
    model.load_state_dict(weights)
    optimizer.load_state_dict(state)
    again = optimizer.state_dict()
    optimizer.synchronize()

    assert all(torch.equal(values["master"], again["state"][key]["master"]) for key, values in state["state"].items())
    optimizer.close()


def test_the_model_may_be_loaded_after_a_flush():
    """Weights that are written after synchronize() are taken over, with a flush behind them."""
    model = DELAYED.model()
    optimizer = DELAYED.optimizer(model)
    train(model, optimizer, range(3), DELAYED)
    optimizer.synchronize()
    with torch.no_grad():
        model.first.weight.mul_(2)
    wanted = model.first.weight.detach().clone()
    optimizer.synchronize()
    optimizer.refresh()

    assert torch.equal(optimizer.master(model.first.weight), wanted)
    optimizer.close()


def test_weights_that_are_edited_with_an_update_pending_are_refused_by_name():
    """The edit cannot be told from the update that has not been uploaded: neither may be lost silently."""
    model = DELAYED.model()
    optimizer = DELAYED.optimizer(model)
    train(model, optimizer, range(3), DELAYED)
    with torch.no_grad():
        model.first.weight.mul_(2)
    odd_loss(model, 3).backward()
    with pytest.raises(zoff.StepError) as caught:
        optimizer.step()

    assert str(caught.value) == (
        "the weights of 'first.weight' were edited while a delayed update is pending: call "
        "optimizer.synchronize() before "
        "editing weights"
    )
    within(20, optimizer.close)


def test_zero_gradients_do_not_reach_the_update_that_is_pending(monkeypatch):
    """zero_grad(set_to_none=False) and a step with it, while Adam of the gradient before has not run yet."""
    go_on, submit, held = threading.Event(), Pool.submit, threading.Event()

    def slow(pool: Pool, work: Any, done: Any) -> None:
        waits = held.is_set()
        submit(pool, lambda: (waits and go_on.wait(20), work()), done)

    def zeroed_step(stage: Stage) -> Outcome:
        model = stage.model()
        optimizer = stage.optimizer(model)
        odd_loss(model, 0).backward()
        assert all(p.grad is None or p.grad.norm() >= 0 for p in model.parameters())  # all of it has landed
        held.set()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        stepping = Beside(optimizer.step)
        stepping.over.wait(0.3)
        go_on.set()
        stepping.result()
        optimizer.zero_grad()
        optimizer.synchronize()
        outcome = Outcome.of(model, optimizer)
        optimizer.close()
        return outcome

    wanted = zeroed_step_serially()
    monkeypatch.setattr(Pool, "submit", slow)

    assert_same_bits(zeroed_step(DELAYED), wanted)


def zeroed_step_serially() -> Outcome:
    model = DELAYED.model()
    optimizer = at_stage(DELAYED, policy="serial").optimizer(model)
    odd_loss(model, 0).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    optimizer.step()
    outcome = Outcome.of(model, optimizer)
    optimizer.close()
    return outcome


def test_a_gradient_that_is_skipped_is_skipped_with_its_own_step():
    """A NaN at step 1 leaves out that gradient alone, one step later."""
    outcomes = []
    for policy in ("serial", "delayed"):
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        optimizer = zoff.OffloadAdamW(model.named_parameters(), lr=0.1, policy=policy)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for step in range(5):
                if policy == "serial" and step == 1:
                    continue
                for parameter in model.parameters():
                    parameter.grad = torch.full_like(parameter, float("nan") if step == 1 else 1.0 + step)
                optimizer.step()
                optimizer.zero_grad()
            optimizer.synchronize()
        outcomes.append(Outcome.of(model, optimizer))
        statistics = optimizer.statistics()
        optimizer.close()

    assert [warning.category for warning in caught] == [zoff.NonFiniteGradientWarning]
    assert (statistics.steps, statistics.skipped_steps) == (4, 1)
    assert_same_bits(outcomes[1], outcomes[0])


def test_what_belongs_to_a_step_goes_when_the_step_is_over():
    """A long delayed run keeps the last steps only, not a chain back to the first."""
    stage = at_stage(DELAYED, steps=30)
    model = stage.model()
    optimizer = stage.optimizer(model)
    train(model, optimizer, range(30), stage)
    gc.collect()
    states = optimizer._runtime.states
    alive = sum(type(thing) is Step and thing.states is states for thing in gc.get_objects())
    optimizer.close()

    assert alive <= 6
