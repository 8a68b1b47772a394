"""Weights read through the model are current: each way to read one waits, and would read old values without its gate.

The uploads of a step are held back on an emulated device. A reader in a thread of its own then either asks the gate,
and is let through with the new weights, or has read the old ones already. Every reader is tried both ways.
"""

from __future__ import annotations

import copy
import pickle
import queue
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zoff_async as zoff
from tests.runtime.scenes import PATIENCE_S, Beside, closing, within
from zoff_async.device import EmulatedDevice
from zoff_async.gate import GatedParameters, remove


class Net(nn.Module):
    """The reader's model; ``trained`` names the parameters that the optimizer updates."""

    trained: tuple[str, ...] = ()

    def read(self) -> Any:
        raise NotImplementedError


class Attention(Net):
    """``nn.MultiheadAttention`` reads ``out_proj.weight`` without calling ``out_proj``."""

    trained = ("attention.out_proj.weight",)

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def read(self) -> Tensor:
        x = torch.linspace(-1, 1, 12).view(1, 3, 4)
        return self.attention(x, x, x)[0]


class Linear(Net):
    """The ordinary case: a module's own forward."""

    trained = ("layer.weight",)

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)

    def read(self) -> Tensor:
        return self(torch.ones(2, 4))


class Shared(Net):
    """A tied weight, trained once and read through the module that it was tied to."""

    trained = ("embed.weight",)

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight

    def read(self) -> Tensor:
        return self.head(torch.ones(1, 4))


class Functional(Net):
    """Another module's weight, read by a function."""

    trained = ("owner.weight",)

    def __init__(self) -> None:
        super().__init__()
        self.owner = nn.Linear(4, 3)

    def read(self) -> Tensor:
        return F.linear(torch.ones(1, 4), self.owner.weight)


class Part(Net):
    """A part of the model that is called without the whole."""

    trained = ("encoder.0.weight",)

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(4, 3), nn.Tanh())

    def read(self) -> Tensor:
        return self.encoder(torch.ones(1, 4))


class Branch(Net):
    """A branch that has never been taken before."""

    trained = ("other.weight",)

    def __init__(self) -> None:
        super().__init__()
        self.usual, self.other = nn.Linear(4, 3), nn.Linear(4, 3)

    def read(self) -> Tensor:
        return self.other(torch.ones(1, 4))


class Checkpointed(Linear):
    """Recomputed in backward, reentrantly or not: the gradient tells which weights the forward and backward read."""

    reentrant = False

    def read(self) -> Tensor:
        x = torch.ones(2, 4, requires_grad=True)
        y = checkpoint(lambda z: torch.tanh(self.layer(z)), x, use_reentrant=self.reentrant)
        (gradient,) = torch.autograd.grad(y.sum(), x) if not self.reentrant else (_backward_of(y, x),)
        return torch.cat([y.detach().flatten(), gradient.flatten()])


def _backward_of(y: Tensor, x: Tensor) -> Tensor:
    y.sum().backward()
    assert x.grad is not None
    return x.grad


class CheckpointedReentrantly(Checkpointed):
    reentrant = True


class FunctionalCall(Linear):
    """``torch.func.functional_call`` with the model's own parameters, one of them left out."""

    def read(self) -> Tensor:
        others = {name: p for name, p in self.named_parameters() if name != "layer.weight"}
        return torch.func.functional_call(self, others, (torch.ones(1, 4),))


class NamedParameters(Linear):
    def read(self) -> Tensor:
        return dict(self.named_parameters())["layer.weight"].detach().clone()


class Ema(Linear):
    """An average over ``model.parameters()``, in place, as loops keep it."""

    def read(self) -> Tensor:
        average = [torch.zeros(3, 4), torch.zeros(3)]
        with torch.no_grad():
            for mean, parameter in zip(average, self.parameters(), strict=True):
                mean.lerp_(parameter, 0.5)
        return average[0]


class Averaged(Linear):
    """torch's own ``AveragedModel``."""

    def read(self) -> Tensor:
        average = torch.optim.swa_utils.AveragedModel(self)
        average.update_parameters(self)
        return average.module.layer.weight.detach().clone()


class StateDict(Linear):
    def read(self) -> Tensor:
        return self.state_dict()["layer.weight"].clone()


class DeepCopy(Linear):
    def read(self) -> Tensor:
        return copy.deepcopy(self).layer.weight.detach()


class ShallowCopy(Linear):
    def read(self) -> Tensor:
        return copy.copy(self).layer.weight.detach().clone()


class Pickled(Linear):
    def read(self) -> Tensor:
        return pickle.loads(pickle.dumps(self)).layer.weight.detach()


class DictOfParameters(Linear):
    """A plain dict made of a module's parameters, as frameworks that shard and offload do."""

    def read(self) -> Tensor:
        return dict(self.layer._parameters)["weight"].detach().clone()


class Unpacked(Linear):
    def read(self) -> Tensor:
        return {**self.layer._parameters}["weight"].detach().clone()


class Recurrent(Net):
    """``nn.LSTM`` keeps its weights in a list of its own, beside the dict of parameters."""

    trained = ("cell.weight_hh_l0",)

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTM(4, 3, batch_first=True)

    def read(self) -> Tensor:
        return self.cell(torch.ones(1, 3, 4))[0]


class Listed(Net):
    """``nn.ParameterList`` and ``nn.ParameterDict``."""

    trained = ("several.0", "named.one")

    def __init__(self) -> None:
        super().__init__()
        self.several = nn.ParameterList([nn.Parameter(torch.ones(2))])
        self.named = nn.ParameterDict({"one": nn.Parameter(torch.ones(2))})

    def read(self) -> Tensor:
        return torch.cat([*self.several, *self.named.values()]).detach().clone()


class Parametrized(Net):
    """A weight that a parametrization computes from the trained one."""

    trained = ("layer.parametrizations.weight.original1",)

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.utils.parametrizations.weight_norm(nn.Linear(4, 3))

    def read(self) -> Tensor:
        return self.layer(torch.ones(1, 4))


class Moved(Linear):
    """``model.to`` of a copy's dtype: ``_apply`` walks the parameters."""

    def read(self) -> Tensor:
        return copy.deepcopy(self).double().layer.weight.detach().float()


READERS: tuple[type[Net], ...] = (
    Attention,
    Linear,
    Shared,
    Functional,
    Part,
    Branch,
    Checkpointed,
    CheckpointedReentrantly,
    FunctionalCall,
    NamedParameters,
    Ema,
    Averaged,
    StateDict,
    DeepCopy,
    ShallowCopy,
    Pickled,
    DictOfParameters,
    Unpacked,
    Recurrent,
    Listed,
    Parametrized,
    Moved,
)


@dataclass
class Watched:
    """Uploads as a gate asks for them, noting that it was asked."""

    uploads: Any
    events: queue.Queue[str]

    def wait_current(self, parameter: Tensor) -> None:
        self.events.put("asked")
        self.uploads.wait_current(parameter)

    def wait_all_current(self) -> None:
        self.events.put("asked")
        self.uploads.wait_all_current()


def trained(model: Net) -> list[tuple[str, nn.Parameter]]:
    return [(name, parameter) for name, parameter in model.named_parameters() if name in model.trained]


def updated(kind: type[Net], *, held: bool) -> tuple[Net, Any, EmulatedDevice]:
    """A model one step after a gradient of ones; with its uploads held back, or over."""
    torch.manual_seed(3)
    model = kind()
    device = EmulatedDevice()
    optimizer = zoff.OffloadAdamW(
        trained(model), lr=0.5, model=model, config=zoff.OffloadConfig(device=device, workers=1, event_loop="asyncio")
    )
    for _, parameter in trained(model):
        parameter.grad = torch.ones_like(parameter)
    if held:
        device.hold("h2d")
    within(PATIENCE_S, optimizer.step)
    optimizer.zero_grad()
    if not held:
        optimizer.synchronize()
    return model, optimizer, device


def _weights_of(kind: type[Net]) -> tuple[Any, Any]:
    """What the reader reads of the old weights and of the new ones."""
    torch.manual_seed(3)
    old = kind().read()
    model, optimizer, _ = updated(kind, held=False)
    new = model.read()
    optimizer.close()
    return old, new


def gates_of(model: nn.Module) -> Any:
    (gate,) = {m._parameters.gate for m in model.modules() if isinstance(m._parameters, GatedParameters)}
    return gate


@pytest.mark.parametrize("kind", READERS, ids=lambda kind: kind.__name__)
def test_a_reader_waits_for_the_upload_and_reads_the_new_weights(kind):
    old, new = _weights_of(kind)
    assert not torch.equal(old, new)
    model, optimizer, device = updated(kind, held=True)
    with closing(optimizer):
        events: queue.Queue[str] = queue.Queue()
        gate = gates_of(model)
        gate.uploads = Watched(gate.uploads, events)
        reader = _reader(model.read, events)
        first = events.get(timeout=PATIENCE_S)
        device.let("h2d")

        assert torch.equal(reader.result(), new)
        assert first == "asked"


@pytest.mark.parametrize("kind", READERS, ids=lambda kind: kind.__name__)
def test_without_its_gate_the_reader_reads_the_old_weights(kind):
    """The control: what the test above would see if nothing stood before the weights."""
    old, _ = _weights_of(kind)
    model, optimizer, device = updated(kind, held=True)
    with closing(optimizer):
        remove(model, gates_of(model))

        assert torch.equal(within(PATIENCE_S, model.read), old)
        device.let("h2d")


def _reader(read: Callable[[], Any], events: queue.Queue[str]) -> Beside:
    def run() -> Any:
        value = read()
        events.put("read")
        return value

    return Beside(run)


@pytest.mark.parametrize("zero", ["model", "optimizer", "module"])
def test_zero_grad_right_after_step_does_not_wait(zero):
    """It wants no weights, and drops the gradients; the update in flight is not disturbed."""
    _, new = _weights_of(Linear)
    model, optimizer, device = updated(Linear, held=True)
    weight = optimizer.param_groups[0]["params"][0]
    weight.grad = torch.ones_like(weight)
    with closing(optimizer):
        within(
            PATIENCE_S,
            {"model": model.zero_grad, "optimizer": optimizer.zero_grad, "module": model.layer.zero_grad}[zero],
        )
        assert weight.grad is None
        device.let("h2d")

        assert torch.equal(model.read(), new)


def test_what_is_not_read_is_not_waited_for():
    """Each weight waits for itself: the first upload is enough for the first layer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    device = EmulatedDevice()
    optimizer = zoff.OffloadAdamW(
        model.named_parameters(),
        lr=0.5,
        model=model,
        config=zoff.OffloadConfig(device=device, bucket_bytes=1, workers=1),
    )
    with closing(optimizer):
        model(torch.ones(1, 4)).sum().backward()
        device.hold("h2d")
        within(PATIENCE_S, optimizer.step)
        device.let("h2d", 2)  # the first layer's weight and bias are what the next forward reads first

        within(PATIENCE_S, lambda: model[0](torch.ones(1, 4)))
        second = Beside(lambda: model[1](torch.ones(1, 4)))
        assert not second.over.wait(0.05)
        device.let("h2d")
        second.result()
