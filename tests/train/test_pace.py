"""Losses read late, and the time of steps."""

from __future__ import annotations

import pytest
import torch

from zoff_async.train import pace as pace_module
from zoff_async.train.pace import Losses, Pace


class Clock:
    """A perf_counter that a test moves by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        monkeypatch.setattr(pace_module.time, "perf_counter", lambda: self.now_s)

    def step(self, pace: Pace, seconds: float) -> None:
        self.now_s += seconds
        pace.tick()


class CountedLoss:
    """A loss that counts how often it is waited for."""

    reads = 0

    def item(self) -> float:
        CountedLoss.reads += 1
        return 1.5


def test_a_loss_is_waited_for_one_step_late(monkeypatch):
    monkeypatch.setattr(CountedLoss, "reads", 0)
    losses = Losses()

    losses.add(CountedLoss())
    assert CountedLoss.reads == 0
    losses.add(CountedLoss())
    assert CountedLoss.reads == 1
    assert losses.read() == [1.5, 1.5]
    assert losses.read() == [1.5, 1.5]


def test_losses_go_on_where_a_saved_run_stopped():
    losses = Losses([3.0, 2.0])
    losses.add(torch.tensor(1.0))

    assert losses.read() == [3.0, 2.0, 1.0]


def test_a_loss_that_is_no_number_stops_the_run():
    losses = Losses([3.0])
    losses.add(torch.tensor(float("nan")))

    with pytest.raises(FloatingPointError) as caught:
        losses.read()

    assert str(caught.value) == "the loss is nan at step 2: use a smaller --lr, more --warmup or --max-norm 1"


def test_the_first_step_is_not_part_of_the_pace(monkeypatch):
    clock = Clock(monkeypatch)
    pace = Pace(tokens_per_step=10)
    for seconds in (9.0, 1.0, 1.0, 3.0):
        clock.step(pace, seconds)

    assert pace.tokens_per_s == 30 / 5
    assert pace.step_ms == 1000


def test_a_run_of_one_step_has_a_pace():
    pace = Pace(tokens_per_step=10)
    pace.tick()

    assert pace.tokens_per_s > 0


def test_time_between_steps_can_be_left_out(monkeypatch):
    clock = Clock(monkeypatch)
    pace = Pace(tokens_per_step=10)
    clock.step(pace, 1.0)
    clock.now_s += 50.0  # a checkpoint is written
    pace.restart()
    clock.step(pace, 2.0)

    assert pace.tokens_per_s == 5
