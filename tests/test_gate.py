"""Gates by themselves: the dict behind a module's parameters, what it asks for each read, and how it comes and goes."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from zoff_async.gate import Gate, GatedParameters, install, remove


class Asked:
    """Uploads that are over as soon as somebody asks for them, and remember who asked."""

    def __init__(self) -> None:
        self.parameters: list[Tensor] = []
        self.all = 0

    def wait_current(self, parameter: Tensor) -> None:
        self.parameters.append(parameter)

    def wait_all_current(self) -> None:
        self.all += 1


@pytest.fixture
def uploads() -> Asked:
    return Asked()


@pytest.fixture
def gate(uploads: Asked) -> Gate:
    made = Gate(uploads)
    made.open = False
    return made


@pytest.fixture
def layer(gate: Gate) -> nn.Linear:
    made = nn.Linear(2, 2)
    install(made, gate)
    return made


BOTH = ("weight", "bias")
READS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "attribute": (lambda layer: layer.weight, ("weight",)),
    "forward": (lambda layer: layer(torch.ones(1, 2)), BOTH),
    "getattr with a default": (lambda layer: getattr(layer, "weight", None), ("weight",)),
    "get": (lambda layer: layer._parameters.get("bias"), ("bias",)),
    "items": (lambda layer: list(layer._parameters.items()), BOTH),
    "values": (lambda layer: list(layer._parameters.values()), BOTH),
    "copy": (lambda layer: layer._parameters.copy(), BOTH),
    "dict()": (lambda layer: dict(layer._parameters), BOTH),
    "unpacking": (lambda layer: {**layer._parameters}, BOTH),
    "union": (lambda layer: layer._parameters | {}, BOTH),
    "union from the right": (lambda layer: {} | layer._parameters, BOTH),
    "update of another": (lambda layer: {}.update(layer._parameters), BOTH),
    "pop": (lambda layer: layer._parameters.pop("bias"), ("bias",)),
    "popitem": (lambda layer: layer._parameters.popitem(), ("bias",)),
    "setdefault": (lambda layer: layer._parameters.setdefault("weight", None), ("weight",)),
    "parameters": (lambda layer: list(layer.parameters()), BOTH),
    "named_parameters": (lambda layer: dict(layer.named_parameters()), BOTH),
    "get_parameter": (lambda layer: layer.get_parameter("weight"), ("weight",)),
    "state_dict": (lambda layer: layer.state_dict(), BOTH),
    "deepcopy": (lambda layer: copy.deepcopy(layer), BOTH),
    "pickle": (lambda layer: pickle.dumps(layer), BOTH),
    "repr": (lambda layer: repr(layer), ("bias",)),
    "requires_grad_": (lambda layer: layer.requires_grad_(True), BOTH),
    "to": (lambda layer: layer.to(torch.float64), BOTH),
    "share_memory": (lambda layer: layer.share_memory(), BOTH),
    "parameters_to_vector": (lambda layer: nn.utils.parameters_to_vector(layer.parameters()), BOTH),
    "names only": (lambda layer: list(layer._parameters), ()),
    "keys": (lambda layer: list(layer._parameters.keys()), ()),
    "membership": (lambda layer: "weight" in layer._parameters, ()),
    "length": (lambda layer: len(layer._parameters), ()),
    "zero_grad": (lambda layer: layer.zero_grad(), ()),
}


@pytest.mark.parametrize("name", READS)
def test_what_a_read_waits_for(name, layer, gate, uploads):
    """Each weight that is handed out has been asked for, by itself and nothing else."""
    by_id = {id(value): key for key, value in dict.items(layer._parameters)}
    read, wanted = READS[name]
    read(layer)

    assert {by_id[id(parameter)] for parameter in uploads.parameters if id(parameter) in by_id} == set(wanted)


@pytest.mark.parametrize("name", READS)
def test_an_open_gate_asks_nobody(name, layer, gate, uploads):
    gate.open = True
    READS[name][0](layer)

    assert uploads.parameters == []


def test_reads_give_what_a_plain_dict_gives(layer):
    plain = nn.Linear(2, 2)
    plain.load_state_dict(layer.state_dict())

    assert [name for name, _ in layer.named_parameters()] == [name for name, _ in plain.named_parameters()]
    assert torch.equal(layer(torch.ones(1, 2)), plain(torch.ones(1, 2)))
    assert layer._parameters.get("no such", 7) == 7
    assert layer._parameters.pop("no such", 8) == 8
    with pytest.raises(KeyError):
        layer._parameters["no such"]
    with pytest.raises(KeyError):
        layer._parameters.pop("no such")
    with pytest.raises(AttributeError):
        layer.no_such  # noqa: B018
    assert len(list(layer._parameters.values())) == len(layer._parameters.items()) == 2


def test_a_missing_parameter_is_none_and_asks_nobody(gate, uploads):
    layer = nn.Linear(2, 2, bias=False)
    install(layer, gate)

    assert layer.bias is None
    assert uploads.parameters == []


def test_what_is_assigned_or_deleted_is_what_is_read(layer, gate):
    new = nn.Parameter(torch.zeros(2))
    layer.bias = new
    assert layer.bias is new
    del layer.bias
    assert not hasattr(layer, "bias")
    layer.register_parameter("bias", None)
    assert layer.bias is None
    assert type(layer._parameters) is GatedParameters


def test_copies_and_pickles_hold_plain_dicts(layer, gate):
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert type(other._parameters) is dict
        assert torch.equal(other.weight, layer.weight)
        assert other.weight is not layer.weight


def test_a_deep_copy_keeps_ties(gate):
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    model[1].weight = model[0].weight
    install(model, gate)

    other = copy.deepcopy(model)
    assert other[1].weight is other[0].weight


def test_installing_tells_what_is_behind_the_gate_and_twice_is_once(gate):
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2, bias=False))
    behind = install(model, gate)
    dicts = [module._parameters for module in model.modules()]

    assert behind == set(model.parameters())
    assert install(model, gate) == behind
    assert all(module._parameters is old for module, old in zip(model.modules(), dicts, strict=True))


def test_a_model_behind_another_gate_is_refused_before_anything_changes(gate):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    install(model[1], gate)
    with pytest.raises(ValueError) as caught:
        install(model, Gate(Asked()))

    assert str(caught.value) == (
        "model= is already gated by another optimizer (module Linear): pass the part of the model that this optimizer "
        "updates, or close the other optimizer first"
    )
    assert [type(module._parameters) for module in model.modules()] == [dict, dict, GatedParameters]


def test_removing_gives_plain_dicts_back_and_leaves_other_gates_alone(gate):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    other = Gate(Asked())
    install(model[0], gate)
    install(model[1], other)
    weight = dict.__getitem__(model[0]._parameters, "weight")
    remove(model, gate)

    assert type(model[0]._parameters) is dict
    assert model[0].weight is weight
    assert type(model[1]._parameters) is GatedParameters


def test_a_trace_bypasses_every_gate_for_good(layer, gate, uploads):
    """While torch.compile traces it asks once for all weights; from then on the gate says that it has been passed
    by.
    """
    torch._dynamo.reset()
    other = Gate(Asked())
    torch.compile(layer, backend="aot_eager", fullgraph=True)(torch.ones(1, 2))

    assert gate.bypassed
    assert other.bypassed
    assert uploads.all >= 1


def test_a_subclass_that_overrides_zero_grad_does_not_wait_either(gate, uploads):
    class Own(nn.Linear):
        def zero_grad(self, set_to_none: bool = True) -> None:
            super().zero_grad(set_to_none)

    model = nn.Sequential(Own(2, 2))
    install(model, gate)
    model.zero_grad()
    model[0].zero_grad()

    assert uploads.parameters == []
