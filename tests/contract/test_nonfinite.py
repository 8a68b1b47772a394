"""A gradient with inf or NaN leaves everything as it was before the step, is counted and told once."""

from __future__ import annotations

import math
import time
import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.contract.loops import (
    ATOMIC,
    DELAYED,
    IN_BACKWARD,
    IN_BACKWARD_LATE,
    SMALL,
    assert_equal,
    assert_same_weights,
    everything,
    loss_of,
    mlp,
)
from zoff_async import (
    NonFiniteGradientError,
    NonFiniteGradientWarning,
    OffloadAdamW,
    TornStateError,
)
from zoff_async.device import EmulatedDevice

every_setup = pytest.mark.parametrize("setup", ATOMIC, ids=lambda setup: setup.name)
quiet = pytest.mark.filterwarnings("ignore::zoff_async.NonFiniteGradientWarning")

#: Where the fault is: in the layer whose bucket backward yields first, or last.
PLACES = {"first bucket": "3.bias", "last bucket": "0.weight"}


class Poisoning(nn.Module):
    """The model of `mlp`; while ``value`` is set, the gradient of one parameter holds it in one element."""

    def __init__(self, place: str, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.body = mlp(dtype)
        self.value: float | None = None
        dict(self.body.named_parameters())[PLACES[place]].register_hook(self.poison)

    def poison(self, gradient):
        if self.value is None:
            return gradient
        gradient = gradient.clone()
        gradient.view(-1)[1] = self.value
        return gradient

    def forward(self, x):
        return self.body(x)


@quiet
@every_setup
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_a_step_with_a_non_finite_gradient_is_skipped_whole(setup, place, value):
    """Weights, masters, moments and counts bit for bit as before; the steps after it are those of a run without it."""

    def run(poisoned):
        model = Poisoning(place)
        optimizer = setup.make(model.named_parameters(), model=model, lr=1e-2, max_norm=1.0)
        for step in range(5):
            if step == 2 and not poisoned:
                continue
            model.value = value if step == 2 else None
            before = everything(model, optimizer)
            loss_of(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 2:
                assert_equal(everything(model, optimizer), before)
        statistics = optimizer.statistics()
        assert (statistics.steps, statistics.skipped_steps) == (4, int(poisoned))
        return everything(model, optimizer)

    assert_equal(run(True), run(False))


@every_setup
@pytest.mark.parametrize("place", PLACES)
def test_it_is_told_once_with_the_first_bad_parameters_name(setup, place):
    model = Poisoning(place)
    optimizer = setup.make(model.named_parameters(), model=model, lr=1e-2)
    model.value = math.inf
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for step in range(3):
            loss_of(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.synchronize()
    assert [str(warning.message) for warning in told] == [
        f"the gradient of 'body.{PLACES[place]}' is not finite: the step was skipped and everything left as it was; "
        "further skipped steps are only counted, see statistics().skipped_steps"
    ]
    assert told[0].category is NonFiniteGradientWarning
    assert optimizer.statistics().skipped_steps == 3
    optimizer.close()


@quiet
def test_of_several_bad_parameters_the_first_in_parameter_order_is_named():
    model = mlp()
    with OffloadAdamW(model.named_parameters(), config=SMALL) as optimizer:
        loss_of(model).backward()
        for name in ("3.bias", "2.weight", "3.weight"):
            dict(model.named_parameters())[name].grad[0] = math.nan
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            optimizer.step()
            optimizer.synchronize()
        assert str(told[0].message).startswith("the gradient of '2.weight' is not finite")


@every_setup
@pytest.mark.parametrize("place", PLACES)
def test_it_raises_where_that_was_asked_for_and_nothing_has_moved(setup, place):
    model = Poisoning(place)
    setup = replace(setup, config={"on_nonfinite": "raise"})
    optimizer = setup.make(model.named_parameters(), model=model, lr=1e-2)
    loss_of(model, 0).backward()
    optimizer.step()
    optimizer.zero_grad()
    before = everything(model, optimizer)
    model.value = math.nan
    loss_of(model, 1).backward()
    with pytest.raises(NonFiniteGradientError) as caught:
        optimizer.step()
    assert str(caught.value) == f"the gradient of 'body.{PLACES[place]}' is not finite; nothing was updated"
    optimizer.zero_grad()
    assert_equal(everything(model, optimizer), before)
    model.value = None
    loss_of(model, 2).backward()
    optimizer.step()
    assert optimizer.statistics().steps == 2
    optimizer.close()


@quiet
@every_setup
def test_gradients_of_a_skipped_step_stay_until_they_are_forgotten(setup):
    """As torch leaves them: without ``zero_grad()`` the next step meets the same inf."""
    model = Poisoning("first bucket")
    optimizer = setup.make(model.parameters(), model=model, lr=1e-2)
    model.value = math.inf
    loss_of(model, 0).backward()
    optimizer.step()
    assert math.isinf(float(dict(model.body.named_parameters())["3.bias"].grad.abs().max()))
    model.value = None
    loss_of(model, 1).backward()
    optimizer.step()
    assert optimizer.statistics().skipped_steps == 2
    optimizer.zero_grad()
    loss_of(model, 2).backward()
    optimizer.step()
    assert optimizer.statistics().steps == 1
    optimizer.close()


@quiet
def test_an_infinity_made_by_accumulation_is_seen():
    """Two finite fp16 gradients whose fp16 sum would be infinite are summed in fp32 here, and step."""
    weight = nn.Parameter(torch.zeros(4, dtype=torch.float16))
    with OffloadAdamW([weight], lr=1e-2, max_norm=1.0) as optimizer:
        for _ in range(2):
            (weight * torch.full((4,), 60000.0, dtype=torch.float16)).sum().backward()
        optimizer.step()
        assert optimizer.statistics().last_grad_norm == pytest.approx(240000.0, rel=1e-6)
        assert (optimizer.statistics().steps, optimizer.statistics().skipped_steps) == (1, 0)
        assert torch.isfinite(weight.detach()).all()


@quiet
@every_setup
def test_a_parameter_without_a_gradient_is_never_the_reason(setup):
    """NaN in a weight that no gradient reaches, and inf in an old gradient that was forgotten."""
    model = mlp()
    optimizer = setup.make(model.parameters(), model=model, lr=1e-2)
    loss_of(model).backward()
    model[3].weight.grad.fill_(math.inf)
    optimizer.zero_grad()
    model[0](torch.ones(2, 6)).sum().backward()
    optimizer.step()
    assert optimizer.statistics().steps == 1
    optimizer.close()


def test_adam_inside_backward_met_in_the_last_bucket_raises_and_says_what_has_moved():
    """Not atomic, and never silent: the state is torn until a checkpoint is loaded."""
    device = EmulatedDevice()
    model = Poisoning("last bucket")
    optimizer = replace(IN_BACKWARD, config={"device": device}).make(model.named_parameters(), model=model, lr=1e-2)

    def uploaded(gradient):
        """Backward goes on when the first bucket has been updated and is on its way back."""
        if model.value is not None:
            deadline_s = time.monotonic() + 20
            while device.statistics().h2d_copies == before and time.monotonic() < deadline_s:
                time.sleep(1e-3)
            assert device.statistics().h2d_copies > before

    model.body[0].weight.register_hook(uploaded)
    loss_of(model, 0).backward()
    optimizer.step()
    optimizer.zero_grad()
    saved = optimizer.state_dict()
    kept = [parameter.detach().clone() for parameter in model.parameters()]
    before = device.statistics().h2d_copies
    model.value = math.inf
    with pytest.raises(NonFiniteGradientError) as caught:
        loss_of(model, 1).backward()
        optimizer.step()
    assert "'body.0.weight' is not finite, and Adam inside backward has already updated" in str(caught.value)
    assert any("have moved" in note and "body.3" in note for note in caught.value.__notes__)
    with pytest.raises(TornStateError, match="load a checkpoint with load_state_dict"):
        optimizer.state_dict()
    with pytest.raises(TornStateError):
        optimizer.step()

    model.value = None
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), kept, strict=True):
            parameter.copy_(value)
    optimizer.load_state_dict(saved)
    reference = Poisoning("last bucket")
    expected = torch.optim.AdamW(reference.parameters(), lr=1e-2, foreach=False)
    loss_of(reference, 0).backward()
    expected.step()
    expected.zero_grad()
    for each, chosen in ((model, optimizer), (reference, expected)):
        each.zero_grad()
        loss_of(each, 2).backward()
        chosen.step()
    optimizer.synchronize()
    assert_same_weights(model, reference)
    optimizer.close()


@quiet
@pytest.mark.parametrize("setup", [IN_BACKWARD, IN_BACKWARD_LATE], ids=lambda setup: setup.name)
def test_adam_inside_backward_met_before_anything_moved_skips(setup):
    """A gradient that is bad everywhere: the first bucket already shows it."""
    model = mlp()
    optimizer = setup.make(model.named_parameters(), model=model, lr=1e-2)
    before = everything(model, optimizer)
    (loss_of(model) * math.nan).backward()
    optimizer.step()
    assert_equal(everything(model, optimizer), before)
    assert optimizer.statistics().skipped_steps == 1
    optimizer.close()


@quiet
@pytest.mark.parametrize("place", PLACES)
def test_a_delayed_update_travels_with_its_own_skip(place):
    """The bad gradient of step 2 is dropped at step 3; those around it are applied, each one step late."""

    def run(poisoned):
        model = Poisoning(place)
        optimizer = DELAYED.make(model.parameters(), model=model, lr=1e-2)
        for step in range(5):
            model.value = math.inf if poisoned and step == 2 else None
            loss_of(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.synchronize()
        statistics = optimizer.statistics()
        assert (statistics.steps, statistics.skipped_steps) == ((4, 1) if poisoned else (5, 0))
        result = everything(model, optimizer)
        assert all(torch.isfinite(tensor).all() for tensor in result)
        return [float(tensor) for tensor in result if tensor.dim() == 0]

    assert run(True) == [4.0] * 6
    assert run(False) == [5.0] * 6
