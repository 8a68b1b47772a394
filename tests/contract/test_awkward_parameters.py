"""Parameters of every odd kind: tied, frozen, sparse, empty, scalar, strided, unused, cast and moved."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from tests.contract.loops import (
    ATOMIC,
    EXACT,
    GATED,
    LATE,
    PLAIN,
    SMALL,
    assert_equal,
    batch,
    everything,
    loss_of,
    mlp,
    same_with_torch,
)
from zoff_async import GradientError, OffloadAdamW

every_setup = pytest.mark.parametrize("setup", EXACT, ids=lambda setup: setup.name)
atomic_setups = pytest.mark.parametrize("setup", ATOMIC, ids=lambda setup: setup.name)


def train(model, make, steps=5, **hyper):
    optimizer = make(model.parameters(), lr=1e-2, weight_decay=0.1, **hyper)
    for step in range(steps):
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


class Tied(nn.Module):
    """A byte-level language model's ends: the head is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.embedding = nn.Embedding(9, 5)
        self.middle = nn.Linear(5, 5)
        self.head = nn.Linear(5, 9, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        tokens = (x.abs() * 4).long() % 9
        return self.head(torch.tanh(self.middle(self.embedding(tokens))))


@every_setup
def test_tied_weights_are_one_parameter(setup):
    """One master, one update of the summed gradient, still tied after saving and loading."""

    def loop(model, make):
        optimizer = train(model, make)
        model.load_state_dict(copy.deepcopy(model.state_dict()))
        assert model.head.weight is model.embedding.weight
        return optimizer

    _, optimizer = same_with_torch(loop, setup, Tied)
    assert len(optimizer.state) == 3


@every_setup
def test_frozen_parameters_stay_and_cost_nothing(setup):
    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = mlp().requires_grad_(False)
            self.adapter = nn.Linear(3, 3)

        def forward(self, x):
            return self.adapter(self.body(x))

    model, optimizer = same_with_torch(train, setup, Adapted)
    assert optimizer.statistics().parameters == 12
    assert optimizer.statistics().master_bytes == 48
    assert optimizer.statistics().moment_bytes == 96
    assert_equal(model.body.parameters(), mlp().parameters())


@pytest.mark.parametrize("setup", [PLAIN, GATED], ids=lambda setup: setup.name)
def test_sparse_gradients_are_refused_by_name_with_nothing_moved(setup):
    """torch's AdamW raises at ``step()``; here the parameter's name is told, and dense training goes on."""

    class Lookup(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.embedding, self.head = nn.Embedding(10, 4, sparse=True), nn.Linear(4, 2)

        def forward(self, tokens):
            return self.head(self.embedding(tokens))

    model = Lookup()
    optimizer = setup.make(model.named_parameters(), model=model, lr=1e-2)
    before = everything(model, optimizer)
    with pytest.raises(GradientError) as caught:
        model(torch.tensor([1, 2])).sum().backward()
        optimizer.step()
    assert str(caught.value) == (
        "'embedding.weight' has a sparse gradient (torch.sparse_coo): this optimizer updates dense parameters only; "
        "use sparse=False in the embedding, or leave the parameter to torch.optim.SparseAdam"
    )
    optimizer.zero_grad()
    assert_equal(everything(model, optimizer), before)
    model.embedding.sparse = False
    model(torch.tensor([1, 2])).sum().backward()
    optimizer.step()
    assert optimizer.statistics().steps == 1
    optimizer.close()


class Odd(nn.Module):
    """A scalar, an empty parameter, one element, a three-dimensional one, and one that is never used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(8)
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.empty = nn.Parameter(torch.zeros(0, 4))
        self.one = nn.Parameter(torch.ones(1, 1))
        self.cube = nn.Parameter(torch.randn(2, 3, 6))
        self.unused = nn.Parameter(torch.randn(5))

    def forward(self, x):
        return torch.einsum("bf,ijf->bij", x, self.cube) * self.scale + self.one + self.empty.sum()


@every_setup
def test_scalars_empty_ones_and_unused_ones(setup):
    _, optimizer = same_with_torch(train, setup, Odd)
    assert optimizer.state_dict()["state"][0]["exp_avg"].shape == ()
    assert optimizer.state_dict()["state"][1]["master"].shape == (0, 4)


class Strided(nn.Module):
    """Weights that are not contiguous: a transposed matrix, a convolution in channels-last."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(9)
        self.transposed = nn.Parameter(torch.randn(7, 6).t())
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)

    def forward(self, x):
        image = (x @ self.transposed).reshape(-1, 1, 7, 1).expand(-1, 3, 7, 7)
        return self.conv(image.contiguous(memory_format=torch.channels_last))


@every_setup
def test_weights_that_are_not_contiguous_keep_their_strides(setup):
    model, _ = same_with_torch(train, setup, Strided)
    assert model.transposed.stride() == (1, 6)
    assert model.conv.weight.is_contiguous(memory_format=torch.channels_last)


@atomic_setups
def test_gradients_of_weights_that_are_not_contiguous_can_be_read_and_written(setup):
    def loop(model, make):
        optimizer, log = make(model.parameters(), lr=1e-2), []
        for step in range(3):
            loss_of(model, step).backward()
            for parameter in model.parameters():
                parameter.grad[0].mul_(2)
                log.append(parameter.grad.clone())
                log.append(parameter.grad.norm().item())
            loss_of(model, step + 10).backward()
            log += [parameter.grad.clone() for parameter in model.parameters()]
            optimizer.step()
            optimizer.zero_grad()
        return optimizer, log

    same_with_torch(loop, setup, Strided)


class Expanding(nn.Module):
    """Gradients that autograd hands over as expanded or transposed views."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(10)
        self.a, self.b, self.c = (nn.Parameter(torch.randn(6, 4)) for _ in range(3))

    def forward(self, x):
        return self.a.sum() + (x @ self.b).sum() + (self.c.t() @ x.t()).square().mean()


@every_setup
def test_gradients_that_are_views(setup):
    same_with_torch(train, setup, Expanding)


@every_setup
def test_a_gradient_shared_by_two_parameters(setup):
    """``a + b``: autograd may hand the same tensor to both."""

    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.ones(6)), nn.Parameter(torch.zeros(6))

        def forward(self, x):
            return x * (self.a + self.b)

    def loop(model, make):
        optimizer, log = make(model.parameters(), lr=1e-2), []
        for step in range(4):
            loss_of(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        return optimizer, log

    same_with_torch(loop, setup, Sum)


def test_writing_into_one_of_two_shared_gradients_leaves_the_other():
    """Each parameter's gradient is its own here: scaling one must not scale the other twice."""
    a, b = nn.Parameter(torch.ones(6)), nn.Parameter(torch.zeros(6))
    with OffloadAdamW([a, b], config=SMALL) as optimizer:
        (a + b).sum().backward()
        a.grad.mul_(3.0)
        assert optimizer.grad(a).tolist() == [3.0] * 6
        assert optimizer.grad(b).tolist() == [1.0] * 6


class Mixed(nn.Module):
    """bf16 layers around an fp32 norm, as many language models have them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.first, self.norm, self.last = nn.Linear(6, 8).bfloat16(), nn.LayerNorm(8), nn.Linear(8, 3).bfloat16()

    def forward(self, x):
        return self.last(self.norm(self.first(x.bfloat16()).float()).bfloat16()).float()


@every_setup
def test_parameters_of_several_dtypes(setup):
    """Each is trained on its fp32 master, on the same gradients as torch's AdamW on fp32 copies."""
    model = Mixed()
    optimizer = setup.make(model.parameters(), model=model, lr=1e-2)
    masters = [nn.Parameter(parameter.detach().float().clone()) for parameter in model.parameters()]
    reference = torch.optim.AdamW(masters, lr=1e-2, foreach=False)
    for step in range(5):
        twin = copy.deepcopy(model)
        loss_of(twin, step).backward()
        loss_of(model, step).backward()
        for master, parameter in zip(masters, twin.parameters(), strict=True):
            master.grad = parameter.grad.float()
        optimizer.step()
        optimizer.zero_grad()
        reference.step()
    for master, parameter in zip(masters, model.parameters(), strict=True):
        torch.testing.assert_close(optimizer.master(parameter), master.detach(), rtol=1e-6, atol=1e-6)
        assert torch.equal(parameter.detach(), optimizer.master(parameter).to(parameter.dtype))
    optimizer.close()


@pytest.mark.parametrize("setup", [PLAIN, GATED], ids=lambda setup: setup.name)
@pytest.mark.parametrize("when", ["before the first backward", "between steps", "between backward and step"])
def test_a_model_cast_after_construction_keeps_its_masters(setup, when):
    """fp32 masters stay; from then on the weights are their roundings, whatever moment it happens at."""
    model, reference = mlp(), mlp()
    optimizer = setup.make(model.parameters(), model=model, lr=1e-2)
    expected = torch.optim.AdamW(reference.parameters(), lr=1e-2, foreach=False)
    if when == "before the first backward":
        model.bfloat16()
    for step in range(4):
        if step == 2 and when == "between steps":
            model.bfloat16()
        dtype = next(model.parameters()).dtype
        twin = copy.deepcopy(model)
        loss_of(twin, step, dtype).backward()
        loss_of(model, step, dtype).backward()
        for parameter, source in zip(reference.parameters(), twin.parameters(), strict=True):
            parameter.grad = source.grad.float()
        if step == 2 and when == "between backward and step":
            model.bfloat16()  # the gradients too
            for parameter in reference.parameters():
                parameter.grad = parameter.grad.bfloat16().float()
        optimizer.step()
        optimizer.zero_grad()
        expected.step()
    optimizer.synchronize()
    for parameter, other in zip(model.parameters(), reference.parameters(), strict=True):
        assert parameter.dtype == torch.bfloat16
        torch.testing.assert_close(optimizer.master(parameter), other.detach(), rtol=1e-5, atol=1e-6)
        assert torch.equal(parameter.detach(), optimizer.master(parameter).bfloat16())
    optimizer.close()


@pytest.mark.parametrize("setup", [PLAIN, LATE], ids=lambda setup: setup.name)
def test_a_model_cast_there_and_back(setup):
    """``half()`` for an export, ``float()`` to go on: the weights lose digits, and count as they are."""
    model = mlp()
    optimizer = setup.make(model.parameters(), model=model, lr=1e-2)
    for step in range(4):
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            model.half()
            model.float()
    optimizer.synchronize()
    assert optimizer.statistics().steps == 4
    for parameter in model.parameters():
        assert torch.equal(parameter.detach(), optimizer.master(parameter))
    optimizer.close()


def test_a_model_moved_by_swapping_its_tensors():
    """``set_swap_module_params_on_conversion``: the parameter keeps its identity, its contents are new."""
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model = mlp()
        with OffloadAdamW(model.parameters(), lr=1e-2, config=SMALL) as optimizer:
            for step in range(3):
                loss_of(model, step, next(model.parameters()).dtype).backward()
                optimizer.step()
                optimizer.zero_grad()
                if step == 0:
                    model.bfloat16()
            assert optimizer.statistics().steps == 3
            for parameter in model.parameters():
                assert torch.equal(parameter.detach(), optimizer.master(parameter).bfloat16())
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


@every_setup
def test_parametrized_weights(setup):
    """Weight norm and a symmetric matrix: the originals are trained."""

    class Symmetric(nn.Module):
        def forward(self, w):
            return w.triu() + w.triu(1).t()

    def build():
        model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2))
        parametrize.register_parametrization(model[0], "weight", Symmetric())
        nn.utils.parametrizations.weight_norm(model[2])
        return model

    def make_model():
        torch.manual_seed(12)
        return build()

    same_with_torch(train, setup, make_model)


@pytest.mark.parametrize("setup", [GATED, LATE], ids=lambda setup: setup.name)
def test_a_parametrization_registered_after_the_optimizer(setup):
    """The weight moves into a module that was not there when the gates were set; it still waits."""

    class Double(nn.Module):
        def forward(self, w):
            return 2 * w

    def loop(model, make):
        optimizer = make(model.parameters(), lr=1e-2)
        for step in range(6):
            loss_of(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 1:
                parametrize.register_parametrization(model[0], "weight", Double())
        return optimizer

    same_with_torch(loop, setup)


@every_setup
def test_recurrent_layers_that_keep_their_weights_aside(setup):
    """``nn.LSTM`` reads a list of its own that it made when it was built, not its parameters by name."""

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(13)
            self.lstm, self.gru = nn.LSTM(6, 5, num_layers=2), nn.GRU(5, 4)
            self.head = nn.Linear(4, 2)

        def forward(self, x):
            return self.head(self.gru(self.lstm(x)[0])[0])

    same_with_torch(train, setup, Recurrent)


@every_setup
def test_attention_that_reads_another_modules_weight(setup):
    """``nn.MultiheadAttention`` reads ``out_proj.weight`` without calling ``out_proj``."""

    class Attending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(14)
            self.layer = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True, bias=False)
            self.head = nn.Linear(6, 2)

        def forward(self, x):
            return self.head(self.layer(x[None]))

    same_with_torch(train, setup, Attending)


@every_setup
def test_lists_and_dicts_of_parameters(setup):
    class Listed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(15)
            self.layers = nn.ParameterList([nn.Parameter(torch.randn(6)) for _ in range(3)])
            self.named = nn.ParameterDict({"a": nn.Parameter(torch.randn(6)), "b": nn.Parameter(torch.randn(1))})

        def forward(self, x):
            for layer in self.layers:
                x = torch.tanh(x * layer)
            return x * self.named["a"] + self.named["b"]

    same_with_torch(train, setup, Listed)


@every_setup
def test_batch_norm_and_dropout(setup):
    """Buffers are the model's own business; random numbers are drawn as in torch's run."""

    def make_model():
        torch.manual_seed(16)
        return nn.Sequential(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 2))

    def loop(model, make):
        torch.manual_seed(99)
        optimizer = train(model, make)
        return optimizer, [model[1].running_mean.clone(), torch.rand(3)]

    same_with_torch(loop, setup, make_model)


@every_setup
def test_parameters_that_belong_to_no_module(setup):
    def loop(model, make):
        latent = nn.Parameter(torch.linspace(-1, 1, 6))
        optimizer = make([*model.parameters(), latent], lr=1e-2)
        for step in range(4):
            model(batch(step) + latent).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer_synchronized(optimizer)
        return optimizer, latent.detach().clone()

    def optimizer_synchronized(optimizer):
        if isinstance(optimizer, OffloadAdamW):
            optimizer.synchronize()  # only what is read through the model waits by itself

    same_with_torch(loop, setup)


@every_setup
def test_a_leaf_that_is_not_a_parameter(setup):
    def loop(model, make):
        weight = torch.linspace(-1, 1, 6, requires_grad=True)
        optimizer = make([weight, *model.parameters()], lr=1e-2)
        for step in range(4):
            if isinstance(optimizer, OffloadAdamW):
                optimizer.synchronize()
            model(batch(step) * weight).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return optimizer

    same_with_torch(loop, setup)


@atomic_setups
def test_a_model_of_lazy_layers_made_whole_first(setup):
    def make_model():
        torch.manual_seed(17)
        model = nn.Sequential(nn.LazyLinear(5), nn.Tanh(), nn.LazyLinear(2))
        model(batch(0))
        return model

    same_with_torch(train, setup, make_model)


def test_an_uninitialized_parameter_is_refused_by_name():
    with pytest.raises((ValueError, TypeError), match="weight"):
        OffloadAdamW(nn.LazyLinear(3).named_parameters())


@atomic_setups
def test_many_tiny_parameters(setup):
    class Many(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(18)
            self.parts = nn.ParameterList([nn.Parameter(torch.randn(())) for _ in range(200)])

        def forward(self, x):
            return x * torch.stack(list(self.parts)).square().mean()

    same_with_torch(train, setup, Many)


def test_shared_memory_and_pickled_models_of_another_process_train():
    """``model.share_memory()`` and a model that came out of a pickle are ordinary models."""
    model = pickle.loads(pickle.dumps(mlp().share_memory()))
    reference = mlp()
    with OffloadAdamW(model.parameters(), lr=1e-2, config=SMALL) as optimizer:
        expected = torch.optim.AdamW(reference.parameters(), lr=1e-2, foreach=False)
        for each, chosen in ((model, optimizer), (reference, expected)):
            loss_of(each).backward()
            chosen.step()
        torch.testing.assert_close(list(model.parameters()), list(reference.parameters()), rtol=1e-5, atol=1e-6)
