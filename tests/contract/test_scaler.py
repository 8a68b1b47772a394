"""torch's GradScaler: scaling, unscaling, clipping and skipping as torch does them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.amp import GradScaler
from torch.nn.utils import clip_grad_norm_

from tests.contract.loops import (
    ATOMIC,
    GATED,
    PLAIN,
    SMALL,
    assert_equal,
    assert_same_log,
    batch,
    everything,
    loss_of,
    mlp,
    same_with_torch,
    values_stay_on_the_host,
)
from zoff_async import NonFiniteGradientWarning, OffloadAdamW, StepError

every_setup = pytest.mark.parametrize("setup", ATOMIC, ids=lambda setup: setup.name)


def scaler_for(model, **options):
    return GradScaler("cpu", **{"init_scale": 2.0**10, "growth_interval": 3, **options})


def poison(model, where):
    """Make one gradient infinite: that of the layer backward reaches first, or last."""
    layer = model[3] if where == "first" else model[0]
    layer.weight.grad[0, 0] = math.inf


@every_setup
@pytest.mark.parametrize("clip", [None, 0.3])
def test_scale_unscale_clip_step_update(setup, clip):
    """The scale grows during the run; norms are those of the unscaled gradients."""

    def loop(model, make):
        optimizer, scaler, log = make(model.parameters(), lr=1e-2), scaler_for(model), []
        for step in range(8):
            for part in range(2):
                scaler.scale(loss_of(model, 10 * step + part)).backward()
            if clip is not None:
                scaler.unscale_(optimizer)
                log.append(clip_grad_norm_(model.parameters(), clip))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            log.append(scaler.get_scale())
        return optimizer, log

    same_with_torch(loop, setup)


@every_setup
@pytest.mark.parametrize("where", ["first", "last"])
@pytest.mark.parametrize("unscale", [True, False], ids=["unscaled", "direct"])
@pytest.mark.filterwarnings("ignore::zoff_async.NonFiniteGradientWarning")
def test_an_overflow_skips_the_step_and_halves_the_scale(setup, where, unscale):
    def loop(model, make):
        optimizer, scaler, scales = make(model.parameters(), lr=1e-2), scaler_for(model), []
        for step in range(6):
            scaler.scale(loss_of(model, step)).backward()
            if step == 3:
                poison(model, where)
            if unscale:
                scaler.unscale_(optimizer)
                clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scales.append(scaler.get_scale())
        return optimizer, scales

    _, optimizer = same_with_torch(loop, setup)
    assert optimizer.statistics().steps == 5
    assert optimizer.statistics().skipped_steps == 1


@every_setup
@pytest.mark.filterwarnings("ignore::zoff_async.NonFiniteGradientWarning")
def test_a_skipped_step_leaves_every_bit_as_it_was(setup):
    model = mlp()
    optimizer, scaler = setup.make(model.parameters(), model=model, lr=1e-2), scaler_for(model)
    for step in range(3):
        scaler.scale(loss_of(model, step)).backward()
        before = everything(model, optimizer) if step == 2 else []
        if step == 2:
            poison(model, "last")
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert_equal(everything(model, optimizer), before)
    optimizer.close()


@pytest.mark.parametrize("setup", [PLAIN, GATED], ids=lambda setup: setup.name)
def test_a_power_of_two_scale_changes_no_bit(setup):
    def run(scale):
        model = mlp()
        optimizer = setup.make(model.parameters(), model=model, lr=1e-2, max_norm=0.5)
        scaler = scaler_for(model, init_scale=scale, growth_interval=1000)
        for step in range(4):
            scaler.scale(loss_of(model, step)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return everything(model, optimizer)

    assert_equal(run(2.0**12), run(1.0))


def test_fp32_parameters_under_autocast():
    def loop(model, make):
        optimizer, scaler, losses = make(model.parameters(), lr=1e-2), scaler_for(model), []
        for step in range(5):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(batch(step)).float().square().mean()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            losses.append(loss.item())
        return optimizer, losses

    same_with_torch(loop)


def test_unscaling_does_not_bring_gradients_back():
    model = mlp()
    scaler = scaler_for(model)
    with OffloadAdamW(model.parameters(), config=SMALL) as optimizer:
        scaler.scale(loss_of(model)).backward()
        with values_stay_on_the_host():
            scaler.unscale_(optimizer)
            clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()


def test_the_last_norm_is_that_of_the_unscaled_gradients():
    model, reference = mlp(), mlp()
    scaler = scaler_for(model)
    loss_of(reference).backward()
    expected = float(clip_grad_norm_(reference.parameters(), 1e9))
    with OffloadAdamW(model.parameters(), config=SMALL) as optimizer:
        scaler.scale(loss_of(model)).backward()
        scaler.step(optimizer)
        assert optimizer.statistics().last_grad_norm == pytest.approx(expected, rel=2e-6)


@every_setup
def test_fp16_parameters_train_through_the_attached_scaler(setup):
    """``step`` hands us the scale, and the numbers are those of an fp32 run on the same fp16 gradients."""
    model = mlp(torch.float16)
    optimizer = setup.make(model.parameters(), model=model, lr=1e-2)
    scaler = GradScaler("cpu", init_scale=64.0, growth_interval=2)
    masters = [parameter.detach().float().clone().requires_grad_() for parameter in model.parameters()]
    reference = torch.optim.AdamW(masters, lr=1e-2, foreach=False)
    for step in range(5):
        scaler.scale(loss_of(model, step, torch.float16)).backward()
        for master, parameter in zip(masters, model.parameters(), strict=True):
            master.grad = optimizer.grad(parameter) / scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        reference.step()
    for master, parameter in zip(masters, model.parameters(), strict=True):
        torch.testing.assert_close(optimizer.master(parameter), master.detach(), rtol=1e-6, atol=1e-7)
        assert torch.equal(parameter.detach(), optimizer.master(parameter).half())
    assert scaler.get_scale() == 64.0 * 4
    optimizer.close()


def test_unscaling_fp16_gradients_is_refused_in_torchs_words():
    model = mlp(torch.float16)
    scaler = scaler_for(model)
    with OffloadAdamW(model.parameters(), config=SMALL) as optimizer:
        scaler.scale(loss_of(model, 0, torch.float16)).backward()
        with pytest.raises(ValueError) as caught:
            scaler.unscale_(optimizer)
        assert str(caught.value) == "Attempting to unscale FP16 gradients."


@pytest.mark.parametrize("where", ["first", "last"])
@pytest.mark.filterwarnings("ignore::zoff_async.NonFiniteGradientWarning")
def test_an_overflow_of_fp16_gradients_skips_the_step(where):
    model = mlp(torch.float16)
    scaler = GradScaler("cpu", init_scale=64.0)
    with OffloadAdamW(model.parameters(), lr=1e-2, config=SMALL) as optimizer:
        for step in range(3):
            scaler.scale(loss_of(model, step, torch.float16)).backward()
            before = everything(model, optimizer)
            if step == 1:
                poison(model, where)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            after = everything(model, optimizer)
            assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True)) == (step == 1)
        assert scaler.get_scale() == 32.0
        assert optimizer.statistics().skipped_steps == 1


def test_a_scaler_that_found_inf_skips_even_what_looks_finite_here():
    """The scaler's word counts, whatever the gradients look like here."""
    model = mlp()
    with OffloadAdamW(model.parameters(), lr=1e-2, config=SMALL) as optimizer:
        loss_of(model).backward()
        before = everything(model, optimizer)
        optimizer.grad_scale = None
        optimizer.found_inf = torch.tensor(1.0)
        optimizer.step()
        del optimizer.grad_scale, optimizer.found_inf
        assert_equal(everything(model, optimizer), before)
        assert optimizer.statistics().skipped_steps == 1


def test_one_scaler_for_two_optimizers():
    def loop(model, make):
        first, second = make(model[0].parameters(), lr=1e-2), make(model[2:].parameters(), lr=1e-3)
        scaler = scaler_for(model)
        for step in range(4):
            scaler.scale(loss_of(model, step)).backward()
            scaler.unscale_(first)
            clip_grad_norm_(model[0].parameters(), 0.1)
            scaler.step(first)
            scaler.step(second)
            scaler.update()
            for optimizer in (first, second):
                optimizer.zero_grad()
            log.append(scaler.get_scale())
        return second, [parameter.detach().clone() for parameter in model.parameters()]

    log: list[float] = []
    reference, model = mlp(), mlp()
    _, expected = loop(reference, lambda params, **hyper: torch.optim.AdamW(params, **hyper, foreach=False))
    _, found = loop(model, lambda params, **hyper: PLAIN.make(params, model=model, **hyper))
    assert_same_log([p + 0 for p in found], expected)
    assert log[:4] == log[4:]


def test_a_disabled_scaler_is_nothing():
    def loop(model, make):
        optimizer, scaler = make(model.parameters(), lr=1e-2), GradScaler("cpu", enabled=False)
        for step in range(3):
            scaler.scale(loss_of(model, step)).backward()
            scaler.unscale_(optimizer)
            clip_grad_norm_(model.parameters(), 0.3)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return optimizer

    same_with_torch(loop)


def test_unscaling_twice_and_stepping_twice_are_refused_in_torchs_words():
    model = mlp()
    scaler = scaler_for(model)
    with OffloadAdamW(model.parameters(), config=SMALL) as optimizer:
        scaler.scale(loss_of(model)).backward()
        scaler.unscale_(optimizer)
        with pytest.raises(RuntimeError, match="has already been called on this optimizer since the last update"):
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        with pytest.raises(RuntimeError, match=r"step\(\) has already been called since the last update"):
            scaler.step(optimizer)


def test_a_step_with_no_gradient_raises_in_torchs_words():
    model = mlp()
    scaler = scaler_for(model)
    with OffloadAdamW(model.parameters(), config=SMALL) as optimizer:
        scaler.scale(torch.zeros((), requires_grad=True)).backward()
        with pytest.raises(AssertionError, match="No inf checks were recorded"):
            scaler.step(optimizer)
            scaler.update()


def test_with_adam_inside_backward_a_scaler_is_refused():
    """Adam has run with the scaled gradients' scale unknown: refused by name, never dropped."""
    model = mlp()
    scaler = scaler_for(model)
    with OffloadAdamW(model.parameters(), policy="in_backward", config=SMALL) as optimizer:
        scaler.scale(loss_of(model)).backward()
        with pytest.raises(StepError, match="GradScaler"):
            scaler.step(optimizer)


@pytest.mark.filterwarnings("default::zoff_async.NonFiniteGradientWarning")
def test_a_scalers_own_skips_are_not_warned_of():
    """A scaler overflows on purpose while it looks for its scale; telling that once a run would cry wolf."""
    import warnings

    model = mlp()
    scaler = scaler_for(model)
    with OffloadAdamW(model.parameters(), config=SMALL) as optimizer, warnings.catch_warnings():
        warnings.simplefilter("error", NonFiniteGradientWarning)
        for step in range(3):
            scaler.scale(loss_of(model, step)).backward()
            if step == 1:
                poison(model, "first")
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert optimizer.statistics().skipped_steps == 1


def test_a_scaler_of_plain_torch_beside_ours():
    """Half of the model with torch's optimizer, half with ours, one scaler, one clip over both."""

    def loop(model, make):
        plain = torch.optim.AdamW(model[0].parameters(), lr=1e-2, foreach=False)
        optimizer, scaler, norms = make(model[2:].parameters(), lr=1e-2), scaler_for(model), []
        for step in range(4):
            scaler.scale(loss_of(model, step)).backward()
            scaler.unscale_(plain)
            scaler.unscale_(optimizer)
            norms.append(clip_grad_norm_(model.parameters(), 0.2))
            norms.append(nn.utils.get_total_norm([p.grad for p in model.parameters()], foreach=True))
            scaler.step(plain)
            scaler.step(optimizer)
            scaler.update()
            plain.zero_grad()
            optimizer.zero_grad()
        return optimizer, norms

    same_with_torch(loop)
