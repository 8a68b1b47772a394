"""Loops that reach into ``param_groups`` by hand: it counts as in torch, or it is refused by name."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.contract.loops import (
    ATOMIC,
    EXACT,
    GATED,
    PLAIN,
    SMALL,
    assert_equal,
    everything,
    loss_of,
    mlp,
    same_with_torch,
    weights,
)
from zoff_async import OffloadAdamW, StepError, ZoffError

every_setup = pytest.mark.parametrize("setup", EXACT, ids=lambda setup: setup.name)
atomic_setups = pytest.mark.parametrize("setup", ATOMIC, ids=lambda setup: setup.name)


def train(model, optimizer, steps, start=0):
    for step in range(start, start + steps):
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()


# --- param_groups -----------------------------------------------------------------------------------------------------


def move(optimizer):
    first, second = (group["params"] for group in optimizer.param_groups)
    second.append(first.pop())


def take_out(optimizer):
    del optimizer.param_groups[0]["params"][1]


def clear_and_build_anew(optimizer):
    groups = [dict(group) for group in optimizer.param_groups]
    optimizer.param_groups.clear()
    optimizer.add_param_group(groups[1])


@every_setup
@pytest.mark.parametrize("edit", [move, take_out, clear_and_build_anew], ids=lambda edit: edit.__name__)
def test_parameters_moved_or_taken_out_by_hand_are_refused_by_name(setup, edit):
    """torch would follow; here a parameter's group is settled when it is added, and a change is told."""
    model = mlp()
    groups = [{"params": model[0].parameters(), "lr": 1e-2}, {"params": model[2:].parameters(), "lr": 1e-4}]
    optimizer = setup.make(groups, model=model)
    train(model, optimizer, 2)
    edit(optimizer)
    with pytest.raises(StepError, match="add_param_group"):
        loss_of(model, 3).backward()
        optimizer.step()
    optimizer.close()


@atomic_setups
def test_a_parameter_put_into_a_group_by_hand_is_trained(setup):
    def loop(model, make):
        optimizer = make(list(model[0].parameters()), lr=1e-2)
        train(model, optimizer, 2)
        model.zero_grad()
        optimizer.param_groups[0]["params"].append(model[3].weight)
        train(model, optimizer, 2, start=2)
        return optimizer

    same_with_torch(loop, setup)


@pytest.mark.parametrize("name", ["amsgrad", "maximize"])
def test_options_switched_on_in_a_group_later_are_refused_by_name(name):
    model = mlp()
    with OffloadAdamW(model.parameters(), config=SMALL) as optimizer:
        train(model, optimizer, 1)
        before = weights(model)
        optimizer.param_groups[0][name] = True
        loss_of(model, 1).backward()
        with pytest.raises(ValueError, match=rf"{name}=True of param_groups\[0\] is not honoured"):
            optimizer.step()
        assert_equal(weights(model), before)


def test_a_learning_rate_that_became_nan_is_refused_by_name():
    """torch would write NaN into every weight."""
    model = mlp()
    with OffloadAdamW(model.parameters(), config=SMALL) as optimizer:
        train(model, optimizer, 1)
        before = everything(model, optimizer)
        optimizer.param_groups[0]["lr"] = float("nan")
        loss_of(model, 1).backward()
        with pytest.raises(ValueError, match=r"lr of param_groups\[0\] must be finite"):
            optimizer.step()
        assert_equal(everything(model, optimizer), before)


@atomic_setups
def test_a_parameter_frozen_between_backward_and_step_is_still_stepped(setup):
    """torch goes by the gradient, not by ``requires_grad``."""

    def loop(model, make):
        optimizer = make(model.parameters(), lr=1e-2)
        loss_of(model).backward()
        model[0].requires_grad_(False)
        optimizer.step()
        optimizer.zero_grad()
        model[0].requires_grad_(True)
        train(model, optimizer, 1, start=1)
        return optimizer

    same_with_torch(loop, setup)


@pytest.mark.parametrize("setup", [PLAIN, GATED], ids=lambda setup: setup.name)
def test_a_gradient_set_by_hand_on_a_frozen_parameter_counts_or_is_refused(setup):
    """Zeroth-order methods train without autograd; torch steps whatever has a gradient."""
    model, reference = mlp(), mlp()
    expected = torch.optim.AdamW(reference.parameters(), lr=1e-2, foreach=False)
    for each in (model, reference):
        each[0].requires_grad_(False)
    optimizer = setup.make(model.parameters(), model=model, lr=1e-2)
    for each in (model, reference):
        loss_of(each).backward()
        each[0].weight.grad = torch.ones(11, 6)
    expected.step()
    try:
        optimizer.step()
        optimizer.synchronize()
    except (ZoffError, ValueError) as error:
        assert "requires_grad" in str(error)  # noqa: PT017 - refusing by name is as good
    else:
        torch.testing.assert_close(weights(model), weights(reference), rtol=1e-5, atol=1e-6)
    optimizer.close()


# --- state ------------------------------------------------------------------------------------------------------------


def test_state_reads_as_a_plain_mapping():
    model = mlp()
    with OffloadAdamW(model.parameters(), config=SMALL) as optimizer:
        train(model, optimizer, 2)
        assert len(optimizer.state) == 6
        assert model[0].weight in optimizer.state
        assert nn.Parameter(torch.zeros(1)) not in optimizer.state
        assert float(optimizer.state[model[0].weight]["step"]) == 2.0
        assert optimizer.state.get(nn.Parameter(torch.zeros(1))) is None
        assert optimizer.state[nn.Parameter(torch.zeros(1))] == {}
        assert {id(p) for p in optimizer.state} == {id(p) for p in model.parameters()}
        assert isinstance(optimizer.state, dict)
        assert set(optimizer.state[model[0].weight]) == {"step", "exp_avg", "exp_avg_sq", "master"}


@pytest.mark.parametrize("setup", [PLAIN, GATED], ids=lambda setup: setup.name)
@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
def test_training_under_anomaly_detection(setup):
    def loop(model, make):
        optimizer = make(model.parameters(), lr=1e-2)
        for step in range(3):
            with torch.autograd.set_detect_anomaly(True, check_nan=False):
                for part in range(2):
                    loss_of(model, 10 * step + part).backward()
            optimizer.step()
            optimizer.zero_grad()
        return optimizer

    same_with_torch(loop, setup)
