"""Norms and clipping: torch's own functions work on gradients that have left, and ``max_norm`` clips as they do."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_, get_total_norm

from tests.contract.loops import (
    ATOMIC,
    GATED,
    PLAIN,
    SMALL,
    assert_equal,
    loss_of,
    mlp,
    same_with_torch,
    values_stay_on_the_host,
    weights,
)
from zoff_async import GradientError, OffloadAdamW, StepError

every_setup = pytest.mark.parametrize("setup", ATOMIC, ids=lambda setup: setup.name)


@every_setup
@pytest.mark.parametrize("foreach", [None, True, False])
def test_clip_grad_norm_clips_and_returns_the_norm_before_it(setup, foreach):
    def loop(model, make):
        optimizer, norms = make(model.parameters(), lr=1e-2), []
        for step in range(4):
            for part in range(2):
                loss_of(model, 10 * step + part).backward()
            norms.append(clip_grad_norm_(model.parameters(), 0.3, foreach=foreach))
            norms.append(clip_grad_norm_(model.parameters(), 1e9, foreach=foreach))  # what is left of it
            optimizer.step()
            optimizer.zero_grad()
        return optimizer, norms

    same_with_torch(loop, setup)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf, 0.5])
def test_every_kind_of_norm(norm_type):
    def loop(model, make):
        optimizer, norms = make(model.parameters(), lr=1e-2), []
        for step in range(3):
            loss_of(model, step).backward()
            norms.append(clip_grad_norm_(model.parameters(), 0.1, norm_type=norm_type))
            norms.append(get_total_norm([p.grad for p in model.parameters()], norm_type=norm_type))
            optimizer.step()
            optimizer.zero_grad()
        return optimizer, norms

    same_with_torch(loop)


@every_setup
def test_max_norm_is_clip_grad_norm(setup):
    """Above, below and far below the bound; what is left in ``p.grad`` is the clipped gradient."""

    def loop(model, make):
        ours = make is not None and isinstance(make([nn.Parameter(torch.zeros(1))]), OffloadAdamW)
        optimizer = make(model.parameters(), lr=1e-2, **({"max_norm": 0.4} if ours else {}))
        norms, left = [], []
        for step in range(5):
            (loss_of(model, step) * (1e-3 if step == 2 else 10)).backward()
            if not ours:
                norms.append(clip_grad_norm_(model.parameters(), 0.4).item())
            optimizer.step()
            if ours:
                norms.append(optimizer.statistics().last_grad_norm)
            left.append([p.grad.clone() for p in model.parameters()])
            optimizer.zero_grad()
        return optimizer, (norms, left)

    same_with_torch(loop, setup)


@every_setup
def test_max_norm_clips_what_piles_up_without_zero_grad(setup):
    def loop(model, make):
        ours = isinstance(make([nn.Parameter(torch.zeros(1))]), OffloadAdamW)
        optimizer = make(model.parameters(), lr=1e-2, **({"max_norm": 0.4} if ours else {}))
        for step in range(5):
            loss_of(model, step).backward()
            if not ours:
                clip_grad_norm_(model.parameters(), 0.4)
            optimizer.step()
        return optimizer, [p.grad.clone() for p in model.parameters()]

    same_with_torch(loop, setup)


def test_norms_and_scalings_do_not_bring_gradients_back():
    model = mlp()
    with OffloadAdamW(model.parameters(), config=SMALL) as optimizer:
        for step in range(2):
            loss_of(model, step).backward()
            with values_stay_on_the_host():
                clip_grad_norm_(model.parameters(), 0.1)
                get_total_norm(p.grad for p in model.parameters())
                for parameter in model.parameters():
                    parameter.grad.mul_(0.5)
                    parameter.grad *= 2.0
                    assert parameter.grad.norm().item() > 0
                    assert torch.linalg.vector_norm(parameter.grad).item() > 0
                    assert parameter.grad.detach().norm(2).item() > 0
                    assert parameter.grad.data.norm(2.0).item() > 0
                torch._foreach_mul_([p.grad for p in model.parameters()], 0.5)
            optimizer.step()
            optimizer.zero_grad()


def test_the_norm_of_bf16_gradients_is_told_in_fp32():
    """torch's own is rounded to bf16; ours is within 2e-6 of the fp64 norm of the same gradients."""
    model = mlp(torch.bfloat16)
    with OffloadAdamW(model.parameters(), config=SMALL) as optimizer:
        loss_of(model, 0, torch.bfloat16).backward()
        gradients = [optimizer.grad(p) for p in model.parameters()]
        exact = math.sqrt(sum(float(g.double().square().sum()) for g in gradients))
        told = clip_grad_norm_(model.parameters(), 1e9)
        assert told.dtype == torch.float32
        assert float(told) == pytest.approx(exact, rel=2e-6)
        optimizer.step()
        assert optimizer.statistics().last_grad_norm == pytest.approx(exact, rel=1e-12)


@every_setup
def test_clip_grad_value(setup):
    def loop(model, make):
        optimizer = make(model.parameters(), lr=1e-2)
        for step in range(3):
            loss_of(model, step).backward()
            clip_grad_value_(model.parameters(), 0.01)
            optimizer.step()
            optimizer.zero_grad()
        return optimizer

    same_with_torch(loop, setup)


@pytest.mark.parametrize("foreach", [True, False])
def test_clip_grad_value_one_by_one_and_all_at_once(foreach):
    def loop(model, make):
        optimizer = make(model.parameters(), lr=1e-2)
        loss_of(model, 0).backward()
        clip_grad_value_(model.parameters(), 0.01, foreach=foreach)
        largest = [parameter.grad.abs().max().item() for parameter in model.parameters()]
        optimizer.step()
        return optimizer, largest

    same_with_torch(loop)


@every_setup
def test_clipping_in_two_halves_with_the_public_pieces(setup):
    """``get_total_norm`` and ``clip_grads_with_norm_``, as code does that reduces the norm itself."""

    def loop(model, make):
        optimizer, norms = make(model.parameters(), lr=1e-2), []
        for step in range(3):
            loss_of(model, step).backward()
            norm = get_total_norm([p.grad for p in model.parameters()])
            clip_grads_with_norm_(model.parameters(), 0.2, norm)
            norms.append(norm)
            optimizer.step()
            optimizer.zero_grad()
        return optimizer, norms

    same_with_torch(loop, setup)


@every_setup
def test_clipping_each_layer_by_itself_and_between_backwards(setup):
    """Clip after the first backward, add a second, clip one layer: the factors belong to what they were applied to."""

    def loop(model, make):
        optimizer, norms = make(model.parameters(), lr=1e-2), []
        for step in range(3):
            loss_of(model, 10 * step).backward()
            norms.append(clip_grad_norm_(model.parameters(), 0.1))
            loss_of(model, 10 * step + 1).backward()
            norms.append(clip_grad_norm_(model[0].parameters(), 0.2))
            norms.append(clip_grad_norm_(model[3].weight, 0.05))
            optimizer.step()
            optimizer.zero_grad()
        return optimizer, norms

    same_with_torch(loop, setup)


@every_setup
def test_parameters_without_a_gradient_are_left_out_of_the_norm(setup):
    def loop(model, make):
        optimizer, norms = make(model.parameters(), lr=1e-2, weight_decay=0.1), []
        for step in range(3):
            model[0](torch.ones(2, 6) * (step + 1)).square().mean().backward()  # reaches the first layer only
            norms.append(clip_grad_norm_(model.parameters(), 0.1))
            optimizer.step()
            optimizer.zero_grad()
        return optimizer, norms

    same_with_torch(loop, setup)


def test_no_gradient_at_all_has_norm_zero():
    model = mlp()
    with OffloadAdamW(model.parameters(), config=SMALL) as optimizer:
        assert float(clip_grad_norm_(model.parameters(), 1.0)) == 0.0
        optimizer.step()
        assert optimizer.statistics().steps == 0


@every_setup
def test_huge_gradients_have_a_finite_norm_and_are_clipped_right(setup):
    """1e20-sized gradients: their squares overflow fp32, so torch's own factor is 0 where ours is right."""
    model = mlp()
    optimizer = setup.make(model.parameters(), model=model, lr=1e-2, max_norm=1.0)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e20)
    optimizer.step()

    expected = 1e20 * math.sqrt(135)
    assert optimizer.statistics().last_grad_norm == pytest.approx(expected, rel=1e-6)
    for values in optimizer.state_dict()["state"].values():
        clipped = 1 / math.sqrt(135)
        torch.testing.assert_close(
            values["exp_avg"], torch.full_like(values["exp_avg"], 0.1 * clipped), rtol=1e-5, atol=0
        )
    optimizer.close()


def test_error_if_nonfinite_raises_as_torch_does():
    model = mlp()
    with OffloadAdamW(model.parameters(), config=SMALL):
        (loss_of(model) * math.inf).backward()
        with pytest.raises(RuntimeError, match="is non-finite, so it cannot be clipped"):
            clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)


def test_own_clipping_follows_the_users():
    """``max_norm`` sees the gradients as the user left them: scaled by 3, then clipped to 0.4."""

    def loop(model, make):
        ours = isinstance(make([nn.Parameter(torch.zeros(1))]), OffloadAdamW)
        optimizer = make(model.parameters(), lr=1e-2, **({"max_norm": 0.4} if ours else {}))
        for step in range(3):
            loss_of(model, step).backward()
            for parameter in model.parameters():
                parameter.grad.mul_(3.0)
            model[3].bias.grad.add_(0.125)
            if not ours:
                clip_grad_norm_(model.parameters(), 0.4)
            optimizer.step()
            optimizer.zero_grad()
        return optimizer

    same_with_torch(loop)


@pytest.mark.parametrize("setup", [PLAIN, GATED], ids=lambda setup: setup.name)
def test_scaling_by_a_power_of_two_changes_no_bit(setup):
    def run(scale):
        model = mlp()
        optimizer = setup.make(model.parameters(), model=model, lr=1e-2, max_norm=0.3)
        for step in range(4):
            (loss_of(model, step) * scale).backward()
            for parameter in model.parameters():
                parameter.grad.mul_(1 / scale)
            optimizer.step()
            optimizer.zero_grad()
        optimizer.synchronize()
        return weights(model)

    assert_equal(run(1024.0), run(1.0))


@pytest.mark.parametrize("clip", ["clip_grad_norm_", "clip_grad_value_"])
def test_with_adam_inside_backward_the_users_clipping_is_refused(clip):
    """Adam may have used the gradients: clipping them now would do nothing, so it raises."""
    model = mlp()
    with OffloadAdamW(model.parameters(), policy="in_backward", config=SMALL) as optimizer:
        loss_of(model).backward()
        with pytest.raises(GradientError, match="policy='overlap'"):
            if clip == "clip_grad_norm_":
                clip_grad_norm_(model.parameters(), 1e-3)
            else:
                clip_grad_value_(model.parameters(), 1e-3)
        assert optimizer is not None


def test_with_adam_inside_backward_norms_can_be_read():
    """A norm below the bound clips nothing, and reading one is allowed."""
    model = mlp()
    reference = mlp()
    loss_of(reference).backward()
    with OffloadAdamW(model.parameters(), policy="in_backward", config=SMALL) as optimizer:
        loss_of(model).backward()
        told = get_total_norm([p.grad for p in model.parameters()])
        assert float(told) == pytest.approx(float(get_total_norm([p.grad for p in reference.parameters()])), rel=2e-6)
        optimizer.step()


def test_max_norm_with_adam_inside_backward_is_refused_at_construction():
    with pytest.raises((ValueError, StepError), match=r"max_norm|clip"):
        OffloadAdamW(mlp().parameters(), policy="in_backward", max_norm=1.0, config=SMALL)
