"""Every LR scheduler of torch drives this optimizer as it drives AdamW."""

from __future__ import annotations

import inspect
import math

import pytest
import torch
from torch.optim import lr_scheduler as schedulers
from torch.optim.swa_utils import SWALR, AveragedModel

from tests.contract.loops import EXACT, GATED, LATE, PLAIN, SMALL, loss_of, mlp, same_with_torch
from zoff_async import OffloadAdamW

#: How each class is built; the numbers make its curve bend within ten steps.
BUILD = {
    "LambdaLR": lambda o: schedulers.LambdaLR(o, lambda step: 1 / (1 + step)),
    "MultiplicativeLR": lambda o: schedulers.MultiplicativeLR(o, lambda step: 0.9),
    "StepLR": lambda o: schedulers.StepLR(o, 3, 0.5),
    "MultiStepLR": lambda o: schedulers.MultiStepLR(o, [2, 5], 0.3),
    "ConstantLR": lambda o: schedulers.ConstantLR(o, 0.5, 4),
    "LinearLR": lambda o: schedulers.LinearLR(o, 0.1, 1.0, 6),
    "ExponentialLR": lambda o: schedulers.ExponentialLR(o, 0.8),
    "PolynomialLR": lambda o: schedulers.PolynomialLR(o, 8, 2.0),
    "CosineAnnealingLR": lambda o: schedulers.CosineAnnealingLR(o, 6, 1e-5),
    "CosineAnnealingWarmRestarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 3, 2),
    "CyclicLR": lambda o: schedulers.CyclicLR(o, 1e-4, 1e-2, step_size_up=3, cycle_momentum=True),
    "OneCycleLR": lambda o: schedulers.OneCycleLR(o, 1e-2, total_steps=10, cycle_momentum=True),
    "ReduceLROnPlateau": lambda o: schedulers.ReduceLROnPlateau(o, factor=0.3, patience=1),
    "SequentialLR": lambda o: schedulers.SequentialLR(
        o, [schedulers.LinearLR(o, 0.1, 1.0, 3), schedulers.CosineAnnealingLR(o, 5)], [3]
    ),
    "ChainedScheduler": lambda o: schedulers.ChainedScheduler(
        [schedulers.ConstantLR(o, 0.5, 2), schedulers.ExponentialLR(o, 0.9)]
    ),
    "SWALR": lambda o: SWALR(o, 1e-4, anneal_epochs=4),
}


def test_no_scheduler_of_torch_is_forgotten():
    classes = {
        name
        for name, value in vars(schedulers).items()
        if inspect.isclass(value)
        and value.__module__ == schedulers.__name__
        and issubclass(value, schedulers.LRScheduler)
        and not name.startswith("_")
    }
    assert classes - {"LRScheduler"} - BUILD.keys() == set()


def scheduled(name, steps=10):
    def loop(model, make):
        optimizer = make([{"params": model[0].parameters(), "lr": 3e-3}, {"params": model[2:].parameters()}], lr=1e-2)
        scheduler, log = BUILD[name](optimizer), []
        for step in range(steps):
            loss = loss_of(model, step)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if name == "ReduceLROnPlateau":
                scheduler.step(1.0)  # never better: it reduces
            else:
                scheduler.step() if step < steps - 1 else None
            log.append([(float(group["lr"]), group["betas"]) for group in optimizer.param_groups])
        assert name == "SWALR" or len({str(entry) for entry in log}) > 1  # it does change something
        return optimizer, log

    return loop


@pytest.mark.parametrize("name", BUILD)
def test_a_scheduler_gives_the_same_curve_and_weights(name):
    """Warnings are errors here: "lr_scheduler.step() before optimizer.step()" would fail it."""
    same_with_torch(scheduled(name), PLAIN)


@pytest.mark.parametrize("setup", EXACT, ids=lambda setup: setup.name)
def test_momentum_is_cycled_under_every_policy(setup):
    same_with_torch(scheduled("OneCycleLR"), setup)


def test_a_schedulers_state_is_saved_and_resumed():
    """Saved after four steps, loaded into fresh objects: the curve goes on."""

    def run(break_at):
        model = mlp()
        optimizer = OffloadAdamW(model.parameters(), lr=1e-2, config=SMALL)
        scheduler = BUILD["OneCycleLR"](optimizer)
        rates = []
        for step in range(8):
            if step == break_at:
                saved = optimizer.state_dict(), scheduler.state_dict(), model.state_dict()
                optimizer.close()
                model = mlp()
                model.load_state_dict(saved[2])
                optimizer = OffloadAdamW(model.parameters(), lr=1e-2, config=SMALL)
                scheduler = BUILD["OneCycleLR"](optimizer)
                optimizer.load_state_dict(saved[0])
                scheduler.load_state_dict(saved[1])
            loss_of(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            rates.append((optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["betas"]))
        optimizer.close()
        return rates, [parameter.detach().clone() for parameter in model.parameters()]

    (rates, found), (expected_rates, expected) = run(4), run(None)
    assert rates == expected_rates
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("setup", [PLAIN, GATED, LATE], ids=lambda setup: setup.name)
def test_weight_averages_of_torch_see_the_newest_weights(setup):
    """``AveragedModel`` right after ``step()``, with SWALR: an average over the updates in order."""

    def loop(model, make):
        optimizer = make(model.parameters(), lr=1e-2)
        averaged, scheduler = AveragedModel(model), SWALR(optimizer, 1e-3, anneal_epochs=3)
        for step in range(6):
            loss_of(model, step).backward()
            optimizer.step()
            averaged.update_parameters(model)
            optimizer.zero_grad()
            scheduler.step()
        return optimizer, [parameter.detach().clone() for parameter in averaged.module.parameters()]

    same_with_torch(loop, setup)


def test_a_scheduler_that_rebuilds_its_groups_lr_as_a_tensor():
    """With a tensor learning rate schedulers fill it in place; the value at ``step()`` counts."""

    def loop(model, make):
        optimizer = make(model.parameters(), lr=torch.tensor(1e-2))
        scheduler, log = schedulers.CosineAnnealingLR(optimizer, 5), []
        for step in range(6):
            loss_of(model, step).backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            log.append(float(optimizer.param_groups[0]["lr"]))
        return optimizer, log

    same_with_torch(loop)


def test_a_warm_up_from_zero_moves_nothing_at_first():
    model = mlp()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with OffloadAdamW(model.parameters(), lr=1e-2, config=SMALL) as optimizer:
        schedulers.LambdaLR(optimizer, lambda step: min(1.0, step / 10))
        loss_of(model).backward()
        optimizer.step()
        optimizer.synchronize()
        assert all(torch.equal(a, b.detach()) for a, b in zip(before, model.parameters(), strict=True))
        assert math.isfinite(optimizer.statistics().last_grad_norm)
        assert optimizer.statistics().steps == 1
