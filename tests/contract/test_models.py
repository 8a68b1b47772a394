"""Weights read through the model are current, however they are read, while the update's tail is in flight."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tests.contract.loops import (
    ATOMIC,
    GATED,
    LATE,
    PLAIN,
    SMALL,
    batch,
    loss_of,
    mlp,
    same_with_torch,
    weights,
)
from zoff_async import OffloadAdamW

gated_setups = pytest.mark.parametrize("setup", [PLAIN, GATED, LATE], ids=lambda setup: setup.name)
every_setup = pytest.mark.parametrize("setup", ATOMIC, ids=lambda setup: setup.name)


def reading(read, make_model=mlp):
    """A loop that reads the weights right after ``step()`` and keeps what it read."""

    def loop(model, make):
        optimizer, log = make(model.parameters(), lr=1e-2), []
        for step in range(4):
            loss_of(model, step).backward()
            optimizer.step()
            log.append(read(model))
            optimizer.zero_grad()
        return optimizer, log

    return loop


def tensors(model):
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


READS = {
    "forward": lambda m: loss_of(m, 50).item(),
    "parameters": lambda m: [p.detach().sum().item() for p in m.parameters()],
    "named_parameters": lambda m: {n: p.detach().clone() for n, p in m.named_parameters()},
    "state_dict": tensors,
    "attribute": lambda m: m[0].weight.detach().clone(),
    "getattr": lambda m: getattr(m[3], "bias").detach().clone(),  # noqa: B009 - the way of reading is the subject
    "get_parameter": lambda m: m.get_parameter("0.weight").detach().clone(),
    "_parameters": lambda m: m[0]._parameters["weight"].detach().clone(),
    "a part of the model": lambda m: m[0](batch(51)).sum().item(),
    "deepcopy": lambda m: [p.detach().clone() for p in copy.deepcopy(m).parameters()],
    "functional_call": lambda m: torch.func.functional_call(m, dict(m.named_parameters()), batch(52)).sum().item(),
    "functional_linear": lambda m: nn.functional.linear(batch(53), m[0].weight, m[0].bias).sum().item(),
    "parameters_to_vector": lambda m: nn.utils.parameters_to_vector(m.parameters()).detach(),
    "modules": lambda m: [w.detach().clone() for module in m.modules() for w in module.parameters(recurse=False)],
    "norm of all": lambda m: torch.stack([p.detach().norm() for p in m.parameters()]).norm().item(),
    "repr": repr,
    "numel": lambda m: sum(p.numel() for p in m.parameters()),
    "float copy": lambda m: [p.detach().clone() for p in copy.deepcopy(m).double().parameters()],
}


@gated_setups
def test_every_way_of_reading_sees_the_new_weights(setup):
    """Another way after each step: each is the first to read the weights that this step has sent."""

    def loop(model, make):
        optimizer, log = make(model.parameters(), lr=1e-2), {}
        for step, (name, read) in enumerate(READS.items()):
            loss_of(model, step).backward()
            optimizer.step()
            log[name] = read(model)
            optimizer.zero_grad()
        return optimizer, log

    same_with_torch(loop, setup, log_rtol=1e-4, atol=1e-5)


@every_setup
def test_an_average_kept_by_hand(setup):
    def loop(model, make):
        optimizer = make(model.parameters(), lr=1e-2)
        average = copy.deepcopy(model)
        for step in range(5):
            loss_of(model, step).backward()
            optimizer.step()
            with torch.no_grad():
                for mean, parameter in zip(average.parameters(), model.parameters(), strict=True):
                    mean.mul_(0.9).add_(parameter, alpha=0.1)
            optimizer.zero_grad()
        return optimizer, [mean.detach().clone() for mean in average.parameters()]

    same_with_torch(loop, setup)


class Branches(nn.Module):
    """Another branch every step; the second reads the first one's weight without calling it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(20)
        self.stem, self.left, self.right, self.head = (nn.Linear(6, 6) for _ in range(4))
        self.turn = 0

    def forward(self, x):
        self.turn += 1
        x = torch.tanh(self.stem(x))
        x = self.left(x) if self.turn % 3 == 0 else nn.functional.linear(x, self.right.weight)
        return self.head(x)


@gated_setups
def test_branches_that_change_from_step_to_step(setup):
    def loop(model, make):
        optimizer = make(model.parameters(), lr=1e-2, weight_decay=0.1)
        for step in range(8):
            loss_of(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        return optimizer

    same_with_torch(loop, setup, Branches)


@gated_setups
def test_forward_hooks_that_read_weights(setup):
    def loop(model, make):
        log = []
        model.register_forward_pre_hook(lambda module, args: log.append(module[3].weight.detach().sum().item()))
        model[0].register_forward_hook(lambda module, args, out: log.append(module.weight.detach().norm().item()))
        optimizer = make(model.parameters(), lr=1e-2)
        for step in range(4):
            loss_of(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        return optimizer, log

    same_with_torch(loop, setup)


class Written(nn.Module):
    """A model with a forward of its own, as compilers want it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(21)
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 2)

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)))


@gated_setups
@pytest.mark.parametrize("what", ["model", "block", "model given compiled"])
def test_compiled_models_and_blocks(setup, what):
    """Compiled before the optimizer is made; the optimizer gets the original module."""

    compiled = []

    def loop(model, make):
        torch._dynamo.reset()
        forward = model
        if what == "block":
            model.first = torch.compile(model.first, backend="aot_eager")
        else:
            forward = torch.compile(model, backend="aot_eager")
        compiled.append(forward)
        optimizer = make(forward.parameters(), lr=1e-2)
        for step in range(5):
            forward(batch(step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return optimizer

    if what == "model given compiled" and setup.gated:
        wrapped = SimpleNamespace(
            gated=True, make=lambda params, *, model, **hyper: setup.make(params, model=compiled[-1], **hyper)
        )
        same_with_torch(loop, wrapped, Written)
    else:
        same_with_torch(loop, setup, Written)


@gated_setups
def test_a_module_compiled_in_place_after_the_optimizer(setup):
    """``module.compile()``; and no recompilation after the second step."""

    def loop(model, make):
        torch._dynamo.reset()
        optimizer = make(model.parameters(), lr=1e-2)
        model.compile(backend="aot_eager", fullgraph=True)
        counts = []
        for step in range(5):
            loss_of(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
            counts.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        assert counts[1] == counts[-1]
        return optimizer

    same_with_torch(loop, setup, Written)


@gated_setups
def test_a_wrapped_model(setup):
    """``nn.DataParallel``-like wrappers and re-registered layers: the gates stay on the layers themselves."""

    class Wrapper(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return self.inner(x) * 2

    def loop(model, make):
        optimizer = make(model.parameters(), lr=1e-2)
        wrapped = Wrapper(model)
        rest = nn.Sequential(*list(model.children()))
        for step in range(5):
            loss_of(wrapped if step % 2 else rest, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        return optimizer

    same_with_torch(loop, setup)


def test_two_halves_of_a_model_with_two_optimizers():
    """Each with its own ``model=`` part; the whole is read through both."""

    def loop(model, make_first, make_second):
        first = make_first(model[0].parameters(), lr=1e-2)
        second = make_second(model[2:].parameters(), lr=1e-3)
        for step in range(5):
            loss_of(model, step).backward()
            first.step()
            second.step()
            model.zero_grad()
        return first, second

    model, reference = mlp(), mlp()
    for optimizer in loop(
        model,
        lambda params, **hyper: LATE.make(params, model=model[0], **hyper),
        lambda params, **hyper: LATE.make(params, model=model[2:], **hyper),
    ):
        optimizer.synchronize()
    loop(reference, torch.optim.AdamW, torch.optim.AdamW)
    torch.testing.assert_close(weights(model), weights(reference), rtol=1e-5, atol=1e-6)


def test_one_model_given_to_two_optimizers_is_refused_by_name():
    model = mlp()
    first = OffloadAdamW(model[0].parameters(), model=model, config=SMALL)
    with pytest.raises(ValueError, match="already gated by another optimizer"):
        OffloadAdamW(model[3].parameters(), model=model, config=SMALL)
    first.close()
    with OffloadAdamW(model.parameters(), model=model, config=SMALL) as second:
        loss_of(model).backward()
        second.step()


def test_weights_of_a_frozen_part_are_read_at_any_time():
    """A part that this optimizer does not train never waits: read while every upload is held back."""
    from zoff_async import OffloadConfig
    from zoff_async.device import EmulatedDevice

    device = EmulatedDevice()
    model = mlp()
    model[0].requires_grad_(False)
    config = OffloadConfig(bucket_bytes=200, chunk_numel=17, workers=2, device=device)
    optimizer = OffloadAdamW(model.parameters(), model=model, config=config)
    loss_of(model).backward()
    device.hold("h2d")
    optimizer.step()
    frozen = model[0].weight.detach().sum()  # would hang if it waited
    model.zero_grad()
    optimizer.zero_grad()
    device.let("h2d")
    assert torch.isfinite(frozen)
    optimizer.close()


def test_zero_grad_never_waits_for_the_update_in_flight():
    """Both forms and the model's own, while every upload is held back."""
    from zoff_async import OffloadConfig
    from zoff_async.device import EmulatedDevice

    device = EmulatedDevice()
    model = mlp()
    config = OffloadConfig(bucket_bytes=200, chunk_numel=17, workers=2, device=device)
    optimizer = OffloadAdamW(model.parameters(), model=model, config=config)
    loss_of(model).backward()
    device.hold("h2d")
    optimizer.step()
    model.zero_grad(set_to_none=False)
    optimizer.zero_grad(set_to_none=False)
    model.zero_grad()
    optimizer.zero_grad()
    device.let("h2d")
    loss_of(model, 1).backward()
    optimizer.step()
    assert optimizer.statistics().steps == 2
    optimizer.close()


@gated_setups
def test_a_step_in_one_thread_and_a_forward_in_another(setup):
    """An evaluation thread reads whole weights, before or after a step, never a mixture within one parameter."""
    import threading

    class Equal(nn.Module):
        """All elements of the weight get the same gradient, so they stay equal."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(999))

        def forward(self):
            return self.weight.sum()

    model = Equal()
    optimizer = setup.make(model.parameters(), model=model, lr=1e-2)
    torn, stop = [], threading.Event()

    def watch():
        while not stop.is_set():
            values = model.state_dict()["weight"].clone() if setup is not PLAIN else torch.ones(1)
            if float(values.min()) != float(values.max()):
                torn.append(values)

    watcher = threading.Thread(target=watch)
    watcher.start()
    for _ in range(3):
        model().backward()
        optimizer.step()
        optimizer.zero_grad()
    stop.set()
    watcher.join()
    optimizer.synchronize()
    assert float(model.weight.detach().min()) == float(model.weight.detach().max())
    optimizer.close()


@gated_setups
def test_inference_mode_and_eval_right_after_step(setup):
    def evaluate(model):
        with torch.inference_mode():
            value = loss_of(model.eval(), 60).item()
        model.train()
        return value

    same_with_torch(reading(evaluate), setup)


@every_setup
def test_jvp_and_per_sample_gradients_beside_training(setup):
    """``torch.func`` over the model's parameters leaves no gradient and disturbs nothing."""

    def loop(model, make):
        optimizer, log = make(model.parameters(), lr=1e-2), []
        for step in range(3):
            loss_of(model, step).backward()
            parameters = {name: value.detach() for name, value in model.named_parameters()}

            def loss(parameters, x):
                return torch.func.functional_call(model, parameters, (x[None],)).square().mean()

            samples = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, batch(70))
            log.append({name: value.sum().item() for name, value in samples.items()})
            optimizer.step()
            optimizer.zero_grad()
        return optimizer, log

    same_with_torch(loop, setup)
