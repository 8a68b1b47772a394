"""Parameter groups, hyperparameters and step counts: torch's semantics a group and a parameter."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from tests.contract.loops import (
    ATOMIC,
    EXACT,
    SMALL,
    assert_equal,
    batch,
    loss_of,
    mlp,
    same_with_torch,
    torch_adam,
    torch_adamw,
    weights,
)
from zoff_async import OffloadAdam, OffloadAdamW

every_setup = pytest.mark.parametrize("setup", EXACT, ids=lambda setup: setup.name)
atomic_setups = pytest.mark.parametrize("setup", ATOMIC, ids=lambda setup: setup.name)


def train(model, optimizer, steps, start=0):
    for step in range(start, start + steps):
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()


def decay_groups(model):
    """Weights decay, biases and norms do not; interleaved, so that one bucket spans both groups."""
    decayed = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    return [
        {"params": decayed, "weight_decay": 0.3, "lr": 1e-3},
        {"params": others, "weight_decay": 0.0, "lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-6},
    ]


@every_setup
def test_groups_with_their_own_hyperparameters(setup):
    def loop(model, make):
        optimizer = make(decay_groups(model), lr=1e-4)
        train(model, optimizer, 6)
        return optimizer

    same_with_torch(loop, setup)


def test_two_groups_equal_two_optimizers_bit_for_bit():
    together, apart = mlp(), mlp()
    with OffloadAdamW(decay_groups(together), config=SMALL) as optimizer:
        train(together, optimizer, 5)
    both = [OffloadAdamW([group], config=SMALL) for group in decay_groups(apart)]
    for step in range(5):
        loss_of(apart, step).backward()
        for optimizer in both:
            optimizer.step()
            optimizer.zero_grad()
    for optimizer in both:
        optimizer.close()
    assert_equal(weights(together), weights(apart))


def test_an_empty_group_is_kept():
    def loop(model, make):
        optimizer = make([{"params": []}, {"params": list(model.parameters()), "lr": 1e-2}, {"params": []}], lr=1e-3)
        train(model, optimizer, 3)
        return optimizer, [len(group["params"]) for group in optimizer.param_groups]

    same_with_torch(loop)


@atomic_setups
def test_a_group_added_later(setup):
    """With a step in flight and a gradient already there."""

    def loop(model, make):
        optimizer = make(model[0].parameters(), lr=1e-2)
        train(model, optimizer, 3)
        loss_of(model, 9).backward()  # also fills the gradients of what is added
        optimizer.add_param_group({"params": model[2].parameters(), "lr": 1e-3})
        optimizer.add_param_group({"params": model[3].weight})
        optimizer.step()
        optimizer.zero_grad()
        train(model, optimizer, 3, start=20)
        return optimizer, [group["lr"] for group in optimizer.param_groups]

    same_with_torch(loop, setup)


@every_setup
def test_a_group_added_between_steps(setup):
    def loop(model, make):
        optimizer = make(model[0].parameters(), lr=1e-2)
        train(model, optimizer, 3)
        optimizer.add_param_group({"params": model[2:].parameters(), "lr": 1e-3})
        model.zero_grad()  # what backward left in the parameters that nobody trained
        train(model, optimizer, 3, start=20)
        return optimizer

    same_with_torch(loop, setup)


@every_setup
def test_parameters_frozen_at_first_and_unfrozen_later(setup):
    def loop(model, make):
        model[0].requires_grad_(False)
        optimizer = make(model.parameters(), lr=1e-2, weight_decay=0.1)
        train(model, optimizer, 3)
        model[0].requires_grad_(True)
        train(model, optimizer, 3, start=10)
        return optimizer

    same_with_torch(loop, setup)


@atomic_setups
def test_parameters_frozen_later_stay_and_thaw_again(setup):
    def loop(model, make):
        optimizer = make(model.parameters(), lr=1e-2, weight_decay=0.1)
        train(model, optimizer, 2)
        model[0].requires_grad_(False)
        frozen = [parameter.detach().clone() for parameter in model[0].parameters()]
        train(model, optimizer, 2, start=10)
        assert_equal([parameter.detach().clone() for parameter in model[0].parameters()], frozen)
        model[0].requires_grad_(True)
        train(model, optimizer, 2, start=20)
        return optimizer

    same_with_torch(loop, setup)


class Branching(nn.Module):
    """``b`` is used on even batches only, ``never`` not at all."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.a, self.b, self.never = nn.Linear(6, 7), nn.Linear(6, 7), nn.Linear(6, 7)

    def forward(self, number):
        x = batch(number)
        return (self.a(x) + (self.b(x) if number % 2 == 0 else 0)).square().mean()


@every_setup
def test_a_parameter_without_a_gradient_is_untouched(setup):
    """No decay, no momentum, no count; its bias correction goes by its own count."""

    def loop(model, make):
        optimizer = make(model.parameters(), lr=1e-2, weight_decay=0.1)
        for step in range(7):
            before = [parameter.detach().clone() for parameter in model.b.parameters()]
            model(step).backward()
            optimizer.step()
            optimizer.zero_grad()
            if step % 2:
                assert_equal([parameter.detach().clone() for parameter in model.b.parameters()], before)
        return optimizer

    same_with_torch(loop, setup, Branching)


@every_setup
def test_learning_rates_are_read_at_their_step(setup):
    """Set by hand, zero in between (moments move, weights do not), as a float and as a 0-d tensor."""

    def loop(model, make):
        optimizer = make(model.parameters(), lr=1e-2, weight_decay=0.1)
        for step, lr in enumerate([1e-2, 0.0, 1e-3, torch.tensor(5e-3), 1e-2]):
            optimizer.param_groups[0]["lr"] = lr
            before = weights(model)
            loss_of(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
            if lr == 0.0:
                assert_equal(weights(model), before)
        return optimizer

    same_with_torch(loop, setup)


@atomic_setups
def test_hyperparameters_may_change_between_backward_and_step(setup):
    def loop(model, make):
        optimizer = make(model.parameters(), lr=1e-2)
        for step in range(5):
            loss_of(model, step).backward()
            group = optimizer.param_groups[0]
            group["lr"] = 1e-2 / (step + 1)
            group["betas"] = (0.9 - 0.1 * step, 0.99)
            group["weight_decay"] = 0.1 * step
            group["eps"] = 1e-8 * 10**step
            optimizer.step()
            group["lr"] = 123.0  # after step(): belongs to the next one
            optimizer.zero_grad()
        return optimizer

    same_with_torch(loop, setup)


@pytest.mark.parametrize("lr", [0.0, 1e-3, torch.tensor(1e-3)])
def test_a_learning_rate_of_any_kind_at_construction(lr):
    def loop(model, make):
        optimizer = make(model.parameters(), lr=lr)
        train(model, optimizer, 3)
        return optimizer, float(optimizer.param_groups[0]["lr"])

    same_with_torch(loop)


def test_the_defaults_are_torchs():
    for ours, theirs in ((OffloadAdamW, torch.optim.AdamW), (OffloadAdam, torch.optim.Adam)):
        weight = nn.Parameter(torch.zeros(3))
        with ours([weight]) as optimizer:
            expected = theirs([nn.Parameter(torch.zeros(3))]).param_groups[0]
            for name in ("lr", "betas", "eps", "weight_decay"):
                assert optimizer.param_groups[0][name] == optimizer.defaults[name] == expected[name]


@every_setup
@pytest.mark.parametrize("kind", [OffloadAdam, OffloadAdamW])
def test_decay_is_decoupled_in_adamw_and_l2_in_adam(setup, kind):
    """Ten steps with a strong decay, where the two differ in the first digit."""

    def loop(model, make):
        optimizer = make(model.parameters(), lr=1e-2, weight_decay=0.5)
        train(model, optimizer, 10)
        return optimizer

    against = {OffloadAdam: torch_adam, OffloadAdamW: torch_adamw}[kind]
    same_with_torch(loop, setup, kind=kind, against=against)


@pytest.mark.parametrize("size", [1e-8, 1e-10, 1e-12, 0.0])
@pytest.mark.parametrize("eps", [1e-8, 1e-4, 0.0])
def test_eps_stands_outside_the_root(size, eps):
    """Tiny gradients, where its place shows; a zero gradient moves nothing (and with eps 0 gives torch's NaN)."""
    ours, theirs = nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(5))
    reference = torch.optim.AdamW([theirs], lr=1e-2, eps=eps, weight_decay=0.0, foreach=False)
    with OffloadAdamW([ours], lr=1e-2, eps=eps, weight_decay=0.0) as optimizer:
        for _ in range(3):
            ours.grad, theirs.grad = torch.full((5,), size), torch.full((5,), size)
            optimizer.step()
            reference.step()
        torch.testing.assert_close(ours.detach(), theirs.detach(), rtol=1e-5, atol=1e-7, equal_nan=True)
        assert size or not eps or torch.equal(ours.detach(), torch.ones(5))


def test_moments_after_one_step_are_within_two_ulp_of_torchs():
    """A loose tolerance would hide a coefficient formed in fp32 (1 - 0.999 is off by 1.3e-5 there)."""
    torch.manual_seed(5)
    gradient = torch.randn(1000)
    ours, theirs = nn.Parameter(torch.zeros(1000)), nn.Parameter(torch.zeros(1000))
    reference = torch.optim.AdamW([theirs], foreach=False)
    with OffloadAdamW([ours]) as optimizer:
        ours.grad, theirs.grad = gradient.clone(), gradient.clone()
        optimizer.step()
        reference.step()
        for name in ("exp_avg", "exp_avg_sq"):
            found = optimizer.state_dict()["state"][0][name].view(torch.int32)
            expected = reference.state[theirs][name].view(torch.int32)
            assert int((found - expected).abs().max()) <= 2
        torch.testing.assert_close(ours.detach(), theirs.detach(), rtol=1e-6, atol=1e-4 * 1e-3)


def test_low_precision_weights_move_by_their_masters():
    """bf16 weights of 1.0 and steps of 1e-4: without fp32 masters they would never move."""
    weight = nn.Parameter(torch.ones(64, dtype=torch.bfloat16))
    exact = nn.Parameter(torch.ones(64))
    reference = torch.optim.AdamW([exact], lr=1e-4, foreach=False)
    with OffloadAdamW([weight], lr=1e-4) as optimizer:
        for _ in range(100):
            weight.grad = torch.full((64,), 0.5, dtype=torch.bfloat16)
            exact.grad = torch.full((64,), 0.5)
            optimizer.step()
            reference.step()
        torch.testing.assert_close(optimizer.master(weight), exact.detach(), rtol=1e-6, atol=1e-8)
        assert float(optimizer.master(weight)[0]) < 0.991
        assert torch.equal(weight.detach(), optimizer.master(weight).bfloat16())


def test_named_parameters_keep_their_names_in_messages_and_state():
    model, reference = mlp(), mlp()
    expected = torch.optim.AdamW(reference.named_parameters())
    with OffloadAdamW(model.named_parameters(), config=SMALL) as optimizer:
        names = [name for name, _ in model.named_parameters()]
        assert optimizer.param_groups[0]["param_names"] == names == expected.param_groups[0]["param_names"]
        assert optimizer.state_dict()["param_groups"][0]["param_names"] == names
        train(model, optimizer, 1)
    groups = [{"params": list(model[0].named_parameters())}, {"params": list(model[2].named_parameters()), "lr": 1.0}]
    with OffloadAdamW(groups, config=SMALL) as optimizer:
        assert [group["param_names"] for group in optimizer.param_groups] == [["weight", "bias"]] * 2


def test_keys_of_the_users_own_stay_in_their_group():
    model = mlp()
    with OffloadAdamW([{"params": model.parameters(), "layer": 3, "lr_scale": 0.5}], config=SMALL) as optimizer:
        train(model, optimizer, 1)
        assert optimizer.param_groups[0]["lr_scale"] == 0.5
        assert optimizer.state_dict()["param_groups"][0]["layer"] == 3


# --- what is refused --------------------------------------------------------------------------------------------------


def weight(*shape: int, **options) -> nn.Parameter:
    return nn.Parameter(torch.zeros(*(shape or (3,)), **options))


SAME = weight()
REFUSED = {
    "no parameters": (lambda: OffloadAdamW([]), ValueError, "params is empty: pass model.parameters()"),
    "a lone tensor": (
        lambda: OffloadAdamW(weight()),
        TypeError,
        "params must be an iterable of parameters or groups, got a tensor of shape (3,)",
    ),
    "no trainable parameter": (
        lambda: OffloadAdamW([weight().requires_grad_(False)]),
        ValueError,
        "params holds no parameter that requires a gradient: there is nothing to train",
    ),
    "twice in a group": (
        lambda: OffloadAdamW([SAME, weight(), SAME]),
        ValueError,
        "param_groups[0]['params'][2] is the same tensor as entry 0 of its group: list it once",
    ),
    "in two groups": (
        lambda: OffloadAdamW([{"params": [SAME]}, {"params": [SAME]}]),
        ValueError,
        "some parameters appear in more than one parameter group",
    ),
    "not a tensor": (
        lambda: OffloadAdamW([weight(), 3]),
        TypeError,
        "param_groups[0]['params'][1] must be a tensor, got int",
    ),
    "not a leaf": (
        lambda: OffloadAdamW([weight() * 2]),
        ValueError,
        "param_groups[0]['params'][0] is not a leaf: an optimizer updates the original parameter, "
        "not a tensor made from it",
    ),
    "fp64": (
        lambda: OffloadAdamW([("w", weight(dtype=torch.float64))]),
        TypeError,
        "'w' has dtype torch.float64: masters are fp32, so parameters must be one of "
        "torch.float32, torch.bfloat16, torch.float16",
    ),
    "complex": (
        lambda: OffloadAdamW([("w", weight(dtype=torch.complex64))]),
        TypeError,
        "'w' has dtype torch.complex64: masters are fp32, so parameters must be one of "
        "torch.float32, torch.bfloat16, torch.float16",
    ),
    "meta": (
        lambda: OffloadAdamW([("w", weight(device="meta"))]),
        ValueError,
        "'w' is on the meta device and has no weights yet: materialise the model first",
    ),
    "negative lr": (
        lambda: OffloadAdamW([weight()], lr=-1.0),
        ValueError,
        "lr must be finite and not negative, got -1.0",
    ),
    "nan lr": (
        lambda: OffloadAdamW([weight()], lr=math.nan),
        ValueError,
        "lr must be finite and not negative, got nan",
    ),
    "lr of a group": (
        lambda: OffloadAdamW([{"params": [weight()], "lr": -2.0}]),
        ValueError,
        "lr of param_groups[0] must be finite and not negative, got -2.0",
    ),
    "lr of two elements": (
        lambda: OffloadAdamW([weight()], lr=torch.ones(2)),
        ValueError,
        "lr must be a number or a tensor of one element, got shape (2,)",
    ),
    "beta of one": (
        lambda: OffloadAdamW([weight()], betas=(1.0, 0.9)),
        ValueError,
        "betas[0] must be in [0, 1), got 1.0",
    ),
    "one beta": (lambda: OffloadAdamW([weight()], betas=0.9), TypeError, "betas must be two numbers, got 0.9"),
    "negative eps": (
        lambda: OffloadAdamW([weight()], eps=-1e-8),
        ValueError,
        "eps must be finite and not negative, got -1e-08",
    ),
    "amsgrad": (
        lambda: OffloadAdamW([weight()], amsgrad=True),
        ValueError,
        "amsgrad=True is not honoured by this optimizer: leave it out, or use torch.optim.AdamW",
    ),
    "maximize of a group": (
        lambda: OffloadAdamW([{"params": [weight()], "maximize": True}]),
        ValueError,
        "maximize=True of param_groups[0] is not honoured by this optimizer: leave it out, or use torch.optim.AdamW",
    ),
    "differentiable": (
        lambda: OffloadAdamW([weight()], differentiable=True),
        ValueError,
        "differentiable=True is not honoured by this optimizer: leave it out, or use torch.optim.AdamW",
    ),
    "an unknown option": (
        lambda: OffloadAdamW([weight()], momentum=0.9),
        TypeError,
        "unexpected argument 'momentum': see OffloadAdamW's documentation for what there is",
    ),
    "max_norm of zero": (
        lambda: OffloadAdamW([weight()], max_norm=0),
        ValueError,
        "max_norm must be positive (or None for no clipping), got 0",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_honoured_is_refused_by_name(case):
    make, kind, message = REFUSED[case]
    with pytest.raises(kind) as caught:
        make()
    assert str(caught.value) == message


@pytest.mark.parametrize("name", ["foreach", "fused", "capturable", "amsgrad", "maximize", "differentiable"])
def test_options_that_ask_for_nothing_are_taken(name):
    with OffloadAdamW([weight()], **{name: False}) as optimizer:
        assert optimizer.param_groups[0]["lr"] == 1e-3


def test_a_group_that_is_refused_leaves_the_optimizer_as_it_was():
    model = mlp()
    with OffloadAdamW(model[0].parameters(), lr=1e-2, config=SMALL) as optimizer:
        train(model, optimizer, 1)
        for bad in (
            {"params": [weight(dtype=torch.float64)]},
            {"params": [model[0].weight]},
            {"params": [weight()], "lr": -1.0},
            {"params": [weight()], "amsgrad": True},
        ):
            with pytest.raises((ValueError, TypeError)):
                optimizer.add_param_group(bad)
        assert len(optimizer.param_groups) == 1
        assert len(optimizer.state_dict()["state"]) == 2
        model.zero_grad()
        train(model, optimizer, 2)
        assert optimizer.statistics().steps == 3


def test_parameters_of_two_devices_are_refused_by_name():
    here, there = weight(), nn.Parameter(torch.zeros(2, device="meta"), requires_grad=False)
    with OffloadAdamW([("here", here), ("there", there)]) as optimizer:  # frozen: nothing is kept for it
        here.sum().backward()
        optimizer.step()
        assert optimizer.statistics().parameters == 3
