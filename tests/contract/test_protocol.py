"""torch's optimizer protocol to the letter: closures, hooks, what an `Optimizer` is asked by others."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from tests.contract.loops import ATOMIC, EXACT, SMALL, assert_equal, loss_of, mlp, same_with_torch, weights
from zoff_async import ClosedError, OffloadAdamW

every_setup = pytest.mark.parametrize("setup", EXACT, ids=lambda setup: setup.name)
atomic_setups = pytest.mark.parametrize("setup", ATOMIC, ids=lambda setup: setup.name)


def test_it_is_an_optimizer():
    model = mlp()
    with OffloadAdamW(model.parameters(), config=SMALL) as optimizer:
        assert isinstance(optimizer, torch.optim.Optimizer)
        assert optimizer.defaults.keys() >= {"lr", "betas", "eps", "weight_decay"}
        assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in model.parameters()]
        assert "OffloadAdamW" in repr(optimizer)
        assert "lr: 0.001" in repr(optimizer)


@every_setup
def test_a_closure_computes_the_loss(setup):
    def loop(model, make):
        optimizer, losses = make(model.parameters(), lr=1e-2), []
        for step in range(4):

            def closure(step=step):
                assert torch.is_grad_enabled()
                optimizer.zero_grad()
                loss = loss_of(model, step)
                loss.backward()
                return loss

            losses.append(optimizer.step(closure).item())
        return optimizer, losses

    same_with_torch(loop, setup)


def test_step_without_a_closure_returns_none():
    model = mlp()
    with OffloadAdamW(model.parameters(), config=SMALL) as optimizer:
        loss_of(model).backward()
        assert optimizer.step() is None


@atomic_setups
def test_a_closure_that_raises_leaves_the_step_undone(setup):
    def loop(model, make):
        optimizer = make(model.parameters(), lr=1e-2)
        for step in range(4):

            def closure(step=step):
                loss = loss_of(model, step)
                loss.backward()
                if step == 2:
                    raise KeyError("in the closure")
                return loss

            try:
                optimizer.step(closure)
            except KeyError:
                assert step == 2
            optimizer.zero_grad()
        return optimizer

    same_with_torch(loop, setup)


@atomic_setups
def test_step_hooks_of_the_optimizer_and_of_all_optimizers(setup):
    """A pre-hook may change gradients; a post-hook reads the new weights."""

    def loop(model, make):
        log = []
        optimizer = make(model.parameters(), lr=1e-2)

        def before(optimizer, args, kwargs):
            for parameter in model.parameters():
                parameter.grad.mul_(0.5)
            model[0].bias.grad.add_(0.1)

        def after(optimizer, args, kwargs):
            log.append(sum(p.detach().abs().sum().item() for p in model.parameters()))

        handles = [
            optimizer.register_step_pre_hook(before),
            optimizer.register_step_post_hook(after),
            register_optimizer_step_pre_hook(lambda optimizer, args, kwargs: log.append(1.0)),
            register_optimizer_step_post_hook(lambda optimizer, args, kwargs: log.append(2.0)),
        ]
        for step in range(4):
            loss_of(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 2:
                for handle in handles:
                    handle.remove()
        return optimizer, log

    same_with_torch(loop, setup)


def test_state_dict_hooks_run():
    """Pre- and post-hooks of saving and loading, with torch's signatures: a post-hook may replace what is saved."""

    def run(make, model):
        log = []
        optimizer = make(model.parameters(), lr=1e-2)
        loss_of(model).backward()
        optimizer.step()
        optimizer.register_state_dict_pre_hook(lambda optimizer: log.append("before saving"))
        optimizer.register_state_dict_post_hook(lambda optimizer, saved: {**saved, "mine": 7})
        optimizer.register_load_state_dict_pre_hook(
            lambda optimizer, saved: (
                log.append(("before loading", saved["mine"])) or {k: v for k, v in saved.items() if k != "mine"}
            )
        )
        optimizer.register_load_state_dict_post_hook(lambda optimizer: log.append("after loading"))
        saved = optimizer.state_dict()
        assert saved["mine"] == 7
        optimizer.load_state_dict(saved)
        return optimizer, log

    ours, log = run(lambda params, **hyper: OffloadAdamW(params, config=SMALL, **hyper), mlp())
    _, expected = run(torch.optim.AdamW, mlp())
    assert log == expected == ["before saving", ("before loading", 7), "after loading"]
    ours.close()


def test_a_load_pre_hook_may_replace_what_is_loaded():
    model = mlp()
    with OffloadAdamW(model.parameters(), lr=1e-2, config=SMALL) as optimizer:
        saved = optimizer.state_dict()

        def faster(optimizer, state):
            state = copy.deepcopy(state)
            state["param_groups"][0]["lr"] = 0.5
            return state

        optimizer.register_load_state_dict_pre_hook(faster)
        optimizer.load_state_dict(saved)
        assert optimizer.param_groups[0]["lr"] == 0.5
        assert saved["param_groups"][0]["lr"] == 1e-2


def test_an_optimizer_is_neither_pickled_nor_copied():
    model = mlp()
    with OffloadAdamW(model.parameters(), config=SMALL) as optimizer:
        for copying in (pickle.dumps, copy.copy, copy.deepcopy):
            with pytest.raises(TypeError) as caught:
                copying(optimizer)
            assert str(caught.value) == (
                "OffloadAdamW holds threads and cannot be pickled or copied: save optimizer.state_dict(), "
                "and build a new optimizer to load it into"
            )


@pytest.mark.parametrize("setup", ATOMIC, ids=lambda setup: setup.name)
def test_a_copied_model_trains_apart(setup):
    """The copy feeds no bucket of the original, and holds plain dicts and tensors."""
    model = mlp()
    optimizer = setup.make(model.parameters(), model=model, lr=1e-2)
    loss_of(model).backward()
    optimizer.step()
    twin = copy.deepcopy(model)  # with the update in flight: the new weights
    again = pickle.loads(pickle.dumps(model))
    optimizer.synchronize()
    assert_equal(weights(twin), weights(model))
    assert_equal(weights(again), weights(model))
    plain = torch.optim.AdamW(twin.parameters(), lr=1e-2)
    before = weights(model)
    loss_of(twin, 1).backward()
    plain.step()
    assert_equal(weights(model), before)
    assert all(type(module._parameters) is dict for module in twin.modules())
    assert optimizer.statistics().steps == 1
    optimizer.close()


def test_after_close_calls_are_refused_and_the_model_is_plain_again():
    model = mlp()
    optimizer = OffloadAdamW(model.parameters(), model=model, config=SMALL)
    loss_of(model).backward()
    optimizer.step()
    optimizer.close()
    optimizer.close()
    for call in (
        optimizer.step,
        optimizer.zero_grad,
        optimizer.state_dict,
        optimizer.synchronize,
        optimizer.refresh,
        lambda: optimizer.load_state_dict({}),
        lambda: optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]}),
        lambda: optimizer.grad(model[0].weight),
        optimizer.statistics,
    ):
        with pytest.raises(ClosedError) as caught:
            call()
        assert str(caught.value) == "this optimizer has been closed: make a new one"
    assert all(type(module._parameters) is dict for module in model.modules())
    assert all(not parameter._post_accumulate_grad_hooks for parameter in model.parameters())
    assert all(type(parameter.grad) in (torch.Tensor, type(None)) for parameter in model.parameters())


def test_a_second_optimizer_takes_over_after_the_first():
    """As after a change of phase: close one, make another of the same parameters, or load its state into torch's."""
    model, reference = mlp(), mlp()
    expected = torch.optim.AdamW(reference.parameters(), lr=1e-2, foreach=False)
    state = None
    for part in range(3):
        optimizer = OffloadAdamW(model.parameters(), lr=1e-2, config=SMALL)
        if state is not None:
            optimizer.load_state_dict(state)
        for step in range(2):
            for each, chosen in ((model, optimizer), (reference, expected)):
                loss_of(each, 10 * part + step).backward()
                chosen.step()
                chosen.zero_grad()
        state = optimizer.state_dict()
        optimizer.close()
    torch.testing.assert_close(weights(model), weights(reference), rtol=1e-5, atol=1e-6)


def test_profile_hooks_of_torch_name_the_step():
    """``Optimizer.profile_hook_step`` wraps ``step``: a profiler sees ``Optimizer.step#OffloadAdamW.step``."""
    model = mlp()
    with OffloadAdamW(model.parameters(), config=SMALL) as optimizer:
        loss_of(model).backward()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            optimizer.step()
            optimizer.zero_grad()
        names = {event.key for event in profile.key_averages()}
        assert "Optimizer.step#OffloadAdamW.step" in names


def test_grad_mode_and_inference_mode_are_left_as_found():
    model = mlp()
    with OffloadAdamW(model.parameters(), config=SMALL) as optimizer:
        loss_of(model).backward()
        with torch.no_grad():
            optimizer.step()
            assert not torch.is_grad_enabled()
        assert torch.is_grad_enabled()
        optimizer.zero_grad()
        threads = torch.get_num_threads()
        loss_of(model).backward()
        optimizer.step()
        assert torch.get_num_threads() == threads
