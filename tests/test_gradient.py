"""The stand-in by itself, before a source that notes what is asked of it."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import Tensor, nn

from zoff_async.errors import GradientError
from zoff_async.gradient import GradientStandIn, next_stand_in


class Noted:
    """A gradient on the host: holds the values, and notes every call."""

    name = "layer.weight"

    def __init__(self, values: Tensor) -> None:
        self.values = values
        self.generation = 0
        self.calls: list[str] = []

    def read(self) -> Tensor:
        self.calls.append("read")
        return self.values.clone()

    def write(self, values: Tensor) -> None:
        self.calls.append("write")
        self.values = values.to(self.values.dtype, copy=True)

    def zero(self) -> None:
        self.calls.append("zero")
        self.values = torch.zeros_like(self.values)

    def norm(self) -> float:
        self.calls.append("norm")
        return float(self.values.double().norm())

    def scale(self, factor: float) -> None:
        self.calls.append(f"scale {factor:g}")
        self.values = self.values * factor

    def receive(self, gradient: Tensor) -> None:
        self.calls.append("receive")
        self.values = self.values + gradient


@pytest.fixture
def source() -> Noted:
    return Noted(torch.arange(6.0).reshape(2, 3))


@pytest.fixture
def stand_in(source: Noted) -> GradientStandIn:
    return GradientStandIn(source, source.values, torch.device("cpu"))


WITHOUT_VALUES = {
    "norm": (lambda g: g.norm(), ["norm"]),
    "norm(2)": (lambda g: g.norm(2), ["norm"]),
    "vector_norm": (lambda g: torch.linalg.vector_norm(g), ["norm"]),
    "vector_norm in fp64": (lambda g: torch.linalg.vector_norm(g, dtype=torch.float64), ["norm"]),
    "norm of detach": (lambda g: g.detach().norm(), ["norm"]),
    "norm of data": (lambda g: g.data.norm(), ["norm"]),
    "foreach_norm": (lambda g: torch._foreach_norm([g, g]), ["norm", "norm"]),
    "mul_ by a number": (lambda g: g.mul_(0.5), ["scale 0.5"]),
    "mul_ by a 0-d tensor": (lambda g: g.mul_(torch.tensor(0.5)), ["scale 0.5"]),
    "*=": (lambda g: g.__imul__(4), ["scale 4"]),
    "foreach_mul_ by a number": (lambda g: torch._foreach_mul_([g], 0.5), ["scale 0.5"]),
    "foreach_mul_ by numbers": (lambda g: torch._foreach_mul_([g, g], [0.5, 0.25]), ["scale 0.5", "scale 0.25"]),
    "foreach_mul_ by a tensor": (lambda g: torch._foreach_mul_([g], torch.tensor(0.5)), ["scale 0.5"]),
    "zero_": (lambda g: g.zero_(), ["zero"]),
    "foreach_zero_": (lambda g: torch._foreach_zero_([g]), ["zero"]),
    "detach_": (lambda g: g.detach_(), []),
    "requires_grad_(False)": (lambda g: g.requires_grad_(False), []),
    "shape and kind": (lambda g: (g.shape, g.dtype, g.device, g.stride(), g.numel(), g.is_sparse, g.grad_fn), []),
    "is not None": (lambda g: g is not None, []),
    "a view": (lambda g: g[1].unsqueeze(0).transpose(0, 1), []),
    "clipping": (lambda g: nn.utils.clip_grads_with_norm_([holder(g)], 1.0, torch.tensor(2.0)), ["scale 0.5"]),
}


def holder(gradient):
    parameter = nn.Parameter(torch.zeros(2, 3))
    parameter.grad = gradient
    return parameter


@pytest.mark.parametrize("question", WITHOUT_VALUES)
def test_it_is_answered_without_the_values(question, source, stand_in):
    ask, calls = WITHOUT_VALUES[question]
    ask(stand_in)
    assert source.calls == calls


def test_a_scaler_unscales_and_finds_inf_by_the_norm(source, stand_in):
    found, inverse = torch.zeros(()), torch.tensor(0.25)
    torch._amp_foreach_non_finite_check_and_unscale_([stand_in], found, inverse)
    assert (source.calls, float(found)) == (["norm", "scale 0.25"], 0.0)
    source.values[0, 1] = torch.inf
    torch._amp_foreach_non_finite_check_and_unscale_([stand_in, torch.ones(2)], found, inverse)
    assert float(found) == 1.0


READS_ONCE = {
    "sum": lambda g: g.sum(),
    "item of an element": lambda g: g[1, 2].item(),
    "clone": lambda g: g.clone(),
    "norm 1": lambda g: g.norm(1),
    "norm by rows": lambda g: g.norm(dim=0),
    "norm of a view": lambda g: g[1].norm(),
    "numpy": lambda g: g.numpy(),
    "tolist": lambda g: g.tolist(),
    "times itself": lambda g: g * g,
    "with a view of itself": lambda g: g[0] + g[1],
    "division": lambda g: g / 2,
    "repr": repr,
    "pickle": pickle.dumps,
    "deepcopy": copy.deepcopy,
}


@pytest.mark.parametrize("question", READS_ONCE)
def test_anything_else_reads_the_values_once(question, source, stand_in):
    READS_ONCE[question](stand_in)
    assert source.calls == ["read"]


WRITES_ONCE = {
    "add_": lambda g: g.add_(1.0),
    "div_": lambda g: g.div_(2.0),
    "mul_ by a tensor": lambda g: g.mul_(torch.ones(3)),
    "element": lambda g: g.__setitem__((0, 0), 3.0),
    "view": lambda g: g.view(-1)[2:4].fill_(9.0),
    "out=": lambda g: torch.neg(g, out=g),
    "foreach_add_": lambda g: torch._foreach_add_([g], 1.0),
}


@pytest.mark.parametrize("question", WRITES_ONCE)
def test_a_change_reads_changes_and_writes(question, source, stand_in):
    plain = source.values.clone()
    WRITES_ONCE[question](plain)
    WRITES_ONCE[question](stand_in)
    assert source.calls == ["read", "write"]
    assert torch.equal(source.values, plain)


def test_an_operation_in_place_gives_the_stand_in_back(stand_in):
    assert stand_in.add_(1.0) is stand_in
    assert stand_in.mul_(2.0) is stand_in
    assert torch.add(stand_in, 1.0, out=stand_in) is stand_in


def test_two_stand_ins_in_one_call_are_both_written(source, stand_in):
    other = Noted(torch.ones(2, 3))
    second = GradientStandIn(other, other.values, torch.device("cpu"))
    torch._foreach_add_([stand_in, second], [torch.ones(2, 3), torch.ones(2, 3)])
    assert torch.equal(source.values, torch.arange(1.0, 7.0).reshape(2, 3))
    assert torch.equal(other.values, torch.full((2, 3), 2.0))


def test_shapes_and_strides_of_views_are_those_of_torch(source, stand_in):
    for view in (
        lambda g: g.t(),
        lambda g: g[:, ::2],
        lambda g: g.unsqueeze(1).expand(2, 4, 3),
        lambda g: g.split(1)[1],
        lambda g: g.unbind(1)[2],
        lambda g: g.flatten()[1:],
        lambda g: g.as_strided((2, 2), (1, 2)),
    ):
        ours, theirs = view(stand_in), view(source.values)
        assert (ours.shape, ours.stride()) == (theirs.shape, theirs.stride())
        assert torch.equal(ours.clone(), theirs)


def test_autograd_hands_the_next_gradient_over(source):
    weight = nn.Parameter(torch.ones(2, 3))
    weight.grad = GradientStandIn(source, source.values, torch.device("cpu"))
    (weight * torch.full((2, 3), 2.0)).sum().backward()
    assert source.calls == ["receive"]
    assert torch.equal(source.values, torch.arange(6.0).reshape(2, 3) + 2)
    assert type(weight.grad) is GradientStandIn


def test_outside_of_a_backward_an_addition_is_a_write(source, stand_in):
    stand_in.add_(torch.ones(2, 3))
    assert source.calls == ["read", "write"]


def test_saved_and_copied_it_is_a_plain_tensor(source, stand_in):
    file = io.BytesIO()
    torch.save(stand_in, file)
    file.seek(0)
    for twin in (torch.load(file, weights_only=True), copy.deepcopy(stand_in), pickle.loads(pickle.dumps(stand_in))):
        assert type(twin) is Tensor
        assert torch.equal(twin, source.values)


def test_a_model_that_is_cast_takes_the_gradients_dtype_along(source):
    model = nn.Linear(3, 2, bias=False)
    model.weight.grad = GradientStandIn(source, source.values, torch.device("cpu"))
    model.bfloat16()
    assert type(model.weight.grad) is GradientStandIn
    assert model.weight.grad.dtype == torch.bfloat16
    assert source.calls[-1] == "write"


def test_data_of_another_shape_is_refused(stand_in):
    with pytest.raises(GradientError) as caught:
        stand_in.data = torch.zeros(3)
    assert str(caught.value) == (
        "the gradient of 'layer.weight' has left for the host and keeps its shape (2, 3), "
        "got data of shape (3,): set parameter.grad instead"
    )


def test_the_next_gradients_stand_in_is_the_old_one_if_nobody_kept_it(source):
    class Holder:
        stand_in = GradientStandIn(source, source.values, torch.device("cpu"))

    before = id(Holder.stand_in)
    source.generation += 1
    Holder.stand_in = next_stand_in(Holder.stand_in)
    assert id(Holder.stand_in) == before
    assert torch.equal(Holder.stand_in.clone(), source.values)


def test_whoever_kept_the_old_one_is_refused(source):
    class Holder:
        stand_in = GradientStandIn(source, source.values, torch.device("cpu"))

    kept = Holder.stand_in
    view = kept[1]
    source.generation += 1
    Holder.stand_in = next_stand_in(Holder.stand_in)
    assert Holder.stand_in is not kept
    assert torch.equal(Holder.stand_in.clone(), source.values)
    for old in (kept, view):
        for read in (Tensor.norm, Tensor.clone, lambda g: g.mul_(2.0), lambda g: g.zero_()):
            with pytest.raises(GradientError) as caught:
                read(old)
            assert str(caught.value) == (
                "this gradient of 'layer.weight' is gone, the parameter has another one by now: "
                "keep a gradient beyond zero_grad() with .clone()"
            )
    assert source.values[0, 1] == 1.0
