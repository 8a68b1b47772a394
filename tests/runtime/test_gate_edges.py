"""Where gates end: parameters outside the model, compiled code, two optimizers, news that comes late, failures in
between.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zoff_async as zoff
from tests.runtime.scenes import PATIENCE_S, Beside, Noted, closing, wait_until, within
from zoff_async.device import EmulatedDevice, Faults
from zoff_async.gate import GatedParameters


def small(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


def held_optimizer(model: nn.Module, params: Any = None, *, faults: Faults | None = None, **options: Any) -> Any:
    device = Noted() if faults is None else Noted(faults=faults)
    config = zoff.OffloadConfig(device=device, workers=1, event_loop="asyncio", **options.pop("config", {}))
    params = model.parameters() if params is None else params
    return zoff.OffloadAdamW(params, lr=0.5, model=model, config=config, **options), device


def one_step(model: nn.Module, optimizer: Any, x: Tensor | None = None) -> None:
    model(torch.ones(2, 4) if x is None else x).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def read_after(step: Any, read: Any, let: Any) -> Tensor:
    """What is read once ``step`` has returned. Uploads that are held back are let go when somebody waits for them."""
    stepping = Beside(step)
    if not stepping.over.wait(0.3):
        let()  # step() waits for them itself
    stepping.result()
    reading = Beside(lambda: read().detach().clone())
    reading.over.wait(0.3)  # it has read, or it waits at a gate
    let()
    return reading.result()


# --- parameters that no gate stands before ----------------------------------------------------------------------------


def test_a_parameter_outside_the_model_is_current_when_step_returns():
    """A temperature that is trained beside the model has no gate: step() itself waits for it."""
    model, outside = small(), nn.Parameter(torch.ones(3))
    optimizer, device = held_optimizer(model, [*model.parameters(), outside], config={"bucket_bytes": 1})
    with closing(optimizer):
        outside.grad = torch.ones(3)
        device.hold("h2d")
        read = read_after(optimizer.step, lambda: outside, lambda: device.let("h2d"))

        assert torch.equal(read, optimizer.master(outside))
        assert not torch.equal(read, torch.ones(3))


def test_a_module_that_joins_the_model_later_is_not_read_stale():
    """The model gets a new module that shares a trained weight: it is gated, or step() waits."""
    model = small()
    optimizer, device = held_optimizer(model)
    with closing(optimizer):
        one_step(model, optimizer)
        late = nn.Linear(4, 4, bias=False)
        late.weight = model[0].weight
        model.append(late)
        model(torch.ones(2, 4)).square().sum().backward()
        device.hold("h2d")
        read = read_after(optimizer.step, lambda: late.weight, lambda: device.let("h2d"))

        assert torch.equal(read, optimizer.master(model[0].weight))


# --- compiled code ----------------------------------------------------------------------------------------------------


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(torch.tanh(self.a(x)), self.b.weight)


def _compiled_run(*, compile_when: str, held: bool) -> Tensor:
    """The output of the third forward, with the second step's uploads held back until somebody waits for them."""
    torch.manual_seed(5)
    torch._dynamo.reset()
    model = Twice()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    x = torch.linspace(-1, 1, 8).view(2, 4)
    if compile_when == "before":
        compiled(x)
    optimizer, device = held_optimizer(model)
    with closing(optimizer):
        for step in range(2):
            if compile_when == "between" and step == 1:
                compiled(x)
            forward = model if compile_when == "last" else compiled
            forward(x).square().sum().backward()
            if held and step == 1:
                device.hold("h2d")
            if step == 0:
                optimizer.step()
                optimizer.zero_grad()
        return read_after(optimizer.step, lambda: compiled(x), lambda: device.let("h2d"))


@pytest.mark.parametrize("compile_when", ["before", "first", "between", "last"])
def test_compiled_code_reads_current_weights(compile_when):
    """Traced before the optimizer was made, at the first step, between two steps, or only with an update in flight.

    Compiled code loads weights past the dict, so from the first trace on steps wait.
    """
    held = _compiled_run(compile_when=compile_when, held=True)

    assert torch.equal(held, _compiled_run(compile_when=compile_when, held=False))


def test_a_traced_gate_makes_every_later_step_wait():
    torch._dynamo.reset()
    model = small()
    optimizer, device = held_optimizer(model)
    with closing(optimizer):
        gate = model[0]._parameters.gate
        assert not gate.bypassed
        torch.compile(model, backend="aot_eager", fullgraph=True)(torch.ones(2, 4))
        assert gate.bypassed
        model(torch.ones(2, 4)).square().sum().backward()
        device.hold("h2d")
        stepping = Beside(optimizer.step)
        assert not stepping.over.wait(0.1)
        device.let("h2d")
        stepping.result()


def test_compiling_does_not_recompile_from_step_to_step():
    torch._dynamo.reset()
    model = small()
    optimizer, _ = held_optimizer(model)
    with closing(optimizer):
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        for step in range(5):
            if step == 2:
                seen = dict(torch._dynamo.utils.counters["stats"])
            compiled(torch.ones(2, 4)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        assert dict(torch._dynamo.utils.counters["stats"]) == seen


def test_code_is_compiled_anew_while_gradients_are_kept():
    """A batch of another shape in the middle of an accumulation: a trace sees parameters whose gradients have left."""
    sums = []
    for compiles in (False, True):
        torch._dynamo.reset()
        model = small(3)
        optimizer, _ = held_optimizer(model)
        with closing(optimizer):
            forward = torch.compile(model, backend="aot_eager") if compiles else model
            for rows in (2, 2, 3, 5):
                forward(torch.linspace(-1, 1, 4 * rows).view(rows, 4)).square().sum().backward()
            sums.append([optimizer.grad(p) for p in model.parameters()])
            optimizer.step()

    for plain, compiled in zip(*sums, strict=True):
        torch.testing.assert_close(compiled, plain)


# --- news that comes late ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["overlap", "in_backward"])
def test_the_news_of_an_old_upload_does_not_open_the_gate_of_a_new_one(policy):
    """The loop learns of step 1's upload only after step 2 has been closed: its gate still waits for step 2's own."""
    model = small()
    optimizer, device = held_optimizer(model, policy=policy)
    with closing(optimizer):
        one_step(model, optimizer)
        optimizer.synchronize()
        device.hold("h2d")
        before = device.enqueued_h2d
        one_step(model, optimizer)
        wait_until(lambda: device.enqueued_h2d > before)
        go_on = threading.Event()
        optimizer._runtime.portal.post(go_on.wait)  # the loop hears nothing from here on
        device.let("h2d", 1)
        model(torch.ones(2, 4)).square().sum().backward()
        stepping = Beside(optimizer.step)
        stepping.over.wait(0.2)
        go_on.set()
        stepping.result()
        optimizer.zero_grad()
        reading = Beside(lambda: model[0].weight.detach().clone())
        reading.over.wait(0.2)
        device.let("h2d")

        read = reading.result()
        assert torch.equal(read, optimizer.master(model[0].weight))


def test_weights_edited_while_an_unused_part_is_still_on_its_way_are_taken_over():
    """Adam inside backward starts with the edited weight, although another bucket's upload is not over."""
    edited = {}
    for held in (False, True):
        torch.manual_seed(1)
        model = nn.ModuleDict({"used": nn.Linear(4, 4), "rare": nn.Linear(4, 4)})
        optimizer, device = held_optimizer(model, policy="in_backward", config={"bucket_bytes": 1})
        with closing(optimizer):
            (model["used"](torch.ones(1, 4)) + model["rare"](torch.ones(1, 4))).square().sum().backward()
            if held:
                device.hold("h2d")
            optimizer.step()
            optimizer.zero_grad()
            if held:
                wait_until(lambda device=device: device.enqueued_h2d)
            else:
                optimizer.synchronize()
            _edit(model, device)
            loss = model["used"](torch.ones(1, 4)).square().sum()
            loss.backward()
            if held:
                device.let("h2d")
            optimizer.step()
            edited[held] = optimizer.master(model["used"].weight)

    assert torch.equal(edited[True], edited[False])


def _edit(model: nn.ModuleDict, device: EmulatedDevice) -> None:
    """Multiply the used weight by three, with two uploads let go: the used layer's, which the forward reads first."""
    device.let("h2d", 2)
    weight, _ = within(PATIENCE_S, lambda: (model["used"].weight, model["used"].bias))
    with torch.no_grad():
        weight.mul_(3)


# --- two optimizers, failed constructions, closing --------------------------------------------------------------------


def test_two_optimizers_gate_two_halves_of_one_model():
    """Each half waits for its own optimizer, and gives the same numbers as one optimizer for all."""
    runs = []
    for halves in (False, True):
        model = small(2)
        parts = [model[0], model[2]] if halves else [model]
        optimizers = [held_optimizer(part)[0] for part in parts]
        with closing(*optimizers):
            for _ in range(5):
                model(torch.ones(2, 4)).square().sum().backward()
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
            for optimizer in optimizers:
                optimizer.synchronize()
            runs.append([p.detach().clone() for p in model.parameters()])

    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_a_model_that_is_gated_already_is_refused_and_left_alone():
    model = small()
    first, _ = held_optimizer(model[0])
    with pytest.raises(ValueError) as caught:
        held_optimizer(model)
    assert str(caught.value) == (
        "model= is already gated by another optimizer (module Linear): pass the part of the model that this optimizer "
        "updates, or close the other optimizer first"
    )
    gated = [type(m._parameters) is GatedParameters for m in model.modules()]
    assert gated == [False, True, False, False]

    first.close()
    second, _ = held_optimizer(model)
    second.close()
    assert [type(m._parameters) for m in model.modules()] == [dict] * 4


def test_a_failed_upload_reaches_whoever_reads_the_weight():
    """A reader at the gate is told what went wrong instead of waiting for ever."""
    model = small()
    optimizer, device = held_optimizer(model, faults=Faults(fail_h2d_at=(1,)))
    with closing(optimizer):
        device.hold("h2d")
        one_step(model, optimizer)
        reading = Beside(lambda: model(torch.ones(1, 4)))
        device.let("h2d")
        with pytest.raises(zoff.DeviceError):
            reading.result()
        with pytest.raises((zoff.DeviceError, zoff.TornStateError)):
            optimizer.step()


@pytest.mark.parametrize("policy", ["overlap", "in_backward", "delayed", "serial"])
def test_closing_gives_plain_torch_back(policy):
    """After close() the model has plain dicts, no hooks of ours, ordinary gradients, and the last update in it."""
    model = small()
    optimizer, _ = held_optimizer(model, policy=policy)
    with closing(optimizer):
        one_step(model, optimizer)
        if policy != "in_backward":
            model(torch.ones(2, 4)).square().sum().backward()
        masters = [optimizer.master(p) for p in model.parameters()]
    assert [type(m._parameters) for m in model.modules()] == [dict] * 4
    assert all(type(p.grad) in (torch.Tensor, type(None)) for p in model.parameters())
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    assert all(torch.equal(p, master) for p, master in zip(model.parameters(), masters, strict=True))
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    plain.zero_grad()
    one_step(model, plain)
    with pytest.raises(zoff.ClosedError):
        optimizer.step()


def test_a_gradient_that_the_user_set_may_be_reused_after_step():
    """As with torch, step() has taken the values: what happens to the caller's own tensor afterwards is not seen."""
    model = small()
    optimizer, device = held_optimizer(model)
    gradients = [torch.full_like(p, 0.5) for p in model.parameters()]
    with closing(optimizer):
        device.hold("d2h")
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = gradient
        stepping = Beside(optimizer.step)
        if stepping.over.wait(0.3):
            [gradient.zero_() for gradient in gradients]
        device.let("d2h")
        stepping.result()

        optimizer.synchronize()
        moments = [optimizer.state[p]["exp_avg"] for p in model.parameters()]
        assert all(torch.allclose(m, torch.full_like(m, 0.05)) for m in moments)


def test_two_threads_may_begin_at_once():
    """The first gradients come from two threads' backwards: neither finds a half-built runtime."""
    parts = [small(1), small(2)]
    model = nn.ModuleList(parts)

    class SlowToOpen(EmulatedDevice):
        entered = threading.Event()
        go_on = threading.Event()

        def allocate(self, numel, dtype):
            self.entered.set()
            self.go_on.wait(PATIENCE_S)
            return super().allocate(numel, dtype)

    device = SlowToOpen()
    optimizer = zoff.OffloadAdamW(model.parameters(), config=zoff.OffloadConfig(device=device, workers=1))
    with closing(optimizer):
        first = Beside(lambda: parts[0](torch.ones(1, 4)).sum().backward())
        assert device.entered.wait(PATIENCE_S)
        second = Beside(lambda: parts[1](torch.ones(1, 4)).sum().backward())
        second.over.wait(0.1)
        device.go_on.set()
        first.result()
        second.result()
        within(PATIENCE_S, optimizer.step)
        assert optimizer.statistics().steps == 1
