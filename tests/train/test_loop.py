"""The loop: what it feeds, in which order it asks, and the schedule."""

from __future__ import annotations

import pytest
import torch
from torch.optim import SGD

from zoff_async.train.loop import run_steps, schedule_for, warmup_then_cosine
from zoff_async.train.model import GPTConfig, build_model
from zoff_async.train.settings import TrainSettings, settings_from
from zoff_async.train.text import load_text

CONFIG = GPTConfig(layers=1, heads=1, width=8, context=8)


def model_and_settings(**options: object) -> tuple[torch.nn.Module, TrainSettings]:
    model = build_model(CONFIG, seed=0, dtype=torch.float32, device=torch.device("cpu"))
    return model, settings_from({"context": 8, "batch": 2, "steps": 4, **options})


class Recorder:
    """An update that changes nothing and writes down when it is asked for."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.log: list[str] = []
        self.gradients: list[torch.Tensor] = []
        self._model = model

    def after_backward(self) -> None:
        self.log.append("backward")

    def step(self) -> None:
        self.log.append("step")
        self.gradients.append(self._model.token.weight.grad.clone())
        self._model.zero_grad()


def test_a_step_has_as_many_backwards_as_it_accumulates():
    model, settings = model_and_settings(accumulate=3)
    update = Recorder(model)

    losses = list(run_steps(model, update, load_text(None), settings, first=0, last=2))

    assert update.log == ["backward", "backward", "backward", "step"] * 2
    assert [loss.shape for loss in losses] == [(), ()]
    assert not losses[0].requires_grad


def test_accumulated_parts_are_averaged():
    """One step of two parts has the mean loss and the mean gradient of both."""
    model, settings = model_and_settings(accumulate=2)
    text, update = load_text(None), Recorder(model)
    (loss,) = run_steps(model, update, text, settings, first=0, last=1)

    parts = [model.loss(*text.batch(batch=2, context=8, seed=0, step=0, part=part)) for part in (0, 1)]
    mean = (parts[0] + parts[1]) / 2
    mean.backward()

    torch.testing.assert_close(loss, mean.detach())
    torch.testing.assert_close(update.gradients[0], model.token.weight.grad)


def test_a_later_part_of_a_run_reads_what_the_whole_run_reads_there():
    model, settings = model_and_settings()
    text, update = load_text(None), Recorder(model)

    whole = list(run_steps(model, update, text, settings, first=0, last=4))
    later = list(run_steps(model, update, text, settings, first=2, last=4))

    assert torch.equal(torch.stack(whole[2:]), torch.stack(later))
    assert not torch.equal(whole[2], whole[3])


def test_the_learning_rate_goes_up_in_a_line_and_down_along_a_cosine():
    factor = warmup_then_cosine(steps=8, warmup=3)

    assert [factor(step) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]
    assert factor(8) == pytest.approx(0.1)
    assert factor(5) == pytest.approx(0.1 + 0.9 * 0.5 * (1 + 0.309017), rel=1e-6)
    assert all(factor(step) > factor(step + 1) for step in range(3, 8))
    assert factor(99) == pytest.approx(0.1)


def test_a_run_that_is_all_warmup_has_a_schedule():
    assert warmup_then_cosine(steps=2, warmup=5)(1) == pytest.approx(2 / 6)


def test_the_schedule_sets_the_rate_of_every_group():
    weights = [torch.zeros(1, requires_grad=True) for _ in range(2)]
    optimizer = SGD([{"params": [weights[0]]}, {"params": [weights[1]], "lr": 2.0}], lr=1.0)
    schedule = schedule_for(optimizer, settings_from({"steps": 8, "warmup": 1}))

    rates = []
    for _ in range(2):
        rates.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        schedule.step()

    assert rates == [[0.5, 1.0], [1.0, 2.0]]
