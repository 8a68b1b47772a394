"""``p.grad`` never lies: what is read from a gradient that has left is its value, what is written reaches the host."""

from __future__ import annotations

import copy
import io
import pickle

import numpy as np
import pytest
import torch
from torch import nn

from tests.contract.loops import ATOMIC, PLAIN, SMALL, assert_same_log, loss_of, mlp, same_with_torch
from zoff_async import GradientError, OffloadAdamW
from zoff_async.gradient import GradientStandIn

every_setup = pytest.mark.parametrize("setup", ATOMIC, ids=lambda setup: setup.name)


def slope_of(gradient):
    """A gradient used as a constant in another loss."""
    weight = torch.ones(6, requires_grad=True)
    (gradient * weight.square()).sum().backward()
    return weight.grad


#: What logging and checking code does with a gradient: each gives a number, a tensor or a plain value.
READS = {
    "item of a sum": lambda g: g.sum().item(),
    "mean and std": lambda g: (g.mean().item(), g.std().item()),
    "largest": lambda g: g.abs().max().item(),
    "isfinite": lambda g: bool(torch.isfinite(g).all()),
    "isnan.any": lambda g: bool(g.isnan().any()),
    "clone": lambda g: g.clone(),
    "detach": lambda g: g.detach() + 0,
    "data": lambda g: g.data * 1,
    "index": lambda g: g[1, 2].item(),
    "float of an element": lambda g: float(g[0][0]),
    "slice": lambda g: g[1:3, ::2] + 0,
    "mask": lambda g: g[g > 0],
    "flatten": lambda g: g.flatten() * 2,
    "view": lambda g: g.view(-1)[:5].clone(),
    "transpose": lambda g: g.t() @ g,
    "cat": lambda g: torch.cat([g.reshape(-1), g.reshape(-1)]),
    "stack": lambda g: torch.stack([g, g]),
    "numpy": lambda g: g.numpy().copy().tolist(),
    "cpu.numpy": lambda g: g.detach().cpu().numpy().copy().tolist(),
    "np.asarray": lambda g: np.asarray(g).copy().tolist(),
    "tolist": lambda g: g.tolist(),
    "float": lambda g: g.float() + 0,
    "double": lambda g: g.double() + 0,
    "to": lambda g: g.to(torch.bfloat16),
    "histogram": lambda g: torch.histc(g, 5, -1, 1),
    "quantile": lambda g: torch.quantile(g, 0.9).item(),
    "norm 1": lambda g: g.norm(1).item(),
    "norm inf": lambda g: g.norm(float("inf")).item(),
    "norm by rows": lambda g: g.norm(dim=1),
    "linalg.norm": lambda g: torch.linalg.norm(g).item(),
    "cosine": lambda g: torch.nn.functional.cosine_similarity(g.flatten(), g.flatten(), dim=0).item(),
    "dot": lambda g: torch.dot(g.flatten(), g.flatten()).item(),
    "arithmetic": lambda g: (2 * g - g / 3) ** 2,
    "comparison": lambda g: (g == g).all().item(),
    "equal": lambda g: torch.equal(g, g.clone()),
    "allclose": lambda g: torch.allclose(g, g + 0),
    "iterate": lambda g: [row.sum().item() for row in g],
    "unbind": lambda g: [row.sum().item() for row in g.unbind(0)],
    "len": len,
    "repr": repr,
    "str of an element": lambda g: f"{g[0, 0]:.4f}",
    "format": lambda g: f"{g.norm():.4f}",
    "deepcopy": lambda g: copy.deepcopy(g) + 0,
    "copy": lambda g: copy.copy(g) + 0,
    "pickle": lambda g: pickle.loads(pickle.dumps(g)),
    "shape": lambda g: (g.shape, g.size(), g.size(0), g.dim(), g.ndim, g.numel(), g.nelement()),
    "kind": lambda g: (g.dtype, g.device, g.layout, g.is_sparse, g.requires_grad, g.grad_fn, g.is_leaf),
    "strides": lambda g: (g.stride(), g.is_contiguous(), g.element_size(), g.nbytes, g.storage_offset()),
    "is_tensor": lambda g: (torch.is_tensor(g), isinstance(g, torch.Tensor), g.is_floating_point()),
    "zeros_like": lambda g: torch.zeros_like(g),
    "empty_like shape": lambda g: torch.empty_like(g).shape,
    "new_zeros": lambda g: g.new_zeros(3),
    "type_as": lambda g: torch.ones(2, dtype=torch.float64).type_as(g),
    "where": lambda g: torch.where(g > 0, g, torch.zeros(())),
    "topk": lambda g: g.flatten().abs().topk(3).values,
    "sort": lambda g: g.flatten().sort().values,
    "parameters_to_vector": lambda g: torch.nn.utils.parameters_to_vector([g]),
    "einsum": lambda g: torch.einsum("ij,ij->", g, g).item(),
    "func.vmap": lambda g: torch.vmap(torch.sum)(g.clone()),
    "contiguous": lambda g: g.contiguous() + 0,
    "squeeze": lambda g: g.unsqueeze(0).squeeze(0) + 0,
    "split": lambda g: [part.sum().item() for part in g.split(4)],
    "chunk": lambda g: [part.sum().item() for part in torch.chunk(g, 2)],
    "expand": lambda g: g[0].expand(3, -1).sum().item(),
    "out=": lambda g: torch.add(g, 1, out=torch.empty(11, 6)),
    "copy_ into another": lambda g: torch.empty(11, 6).copy_(g),
    "foreach_norm": lambda g: torch._foreach_norm([g, torch.ones(2)]),
    "foreach_add": lambda g: torch._foreach_add([g, torch.ones(11, 6)], 1.0),
    "count_nonzero": lambda g: int(torch.count_nonzero(g)),
    "scatter into": lambda g: torch.zeros(2, 11, 6).index_copy_(0, torch.tensor([1]), g.unsqueeze(0)),
    "torch.tensor of elements": lambda g: torch.tensor([g[0, 0], g[1, 1]]),
    "np.float32 of an element": lambda g: float(np.float32(g[0, 0])),
    "np.array of rows": lambda g: np.stack([row.numpy() for row in g]).tolist(),
    "torch.as_tensor": lambda g: torch.as_tensor(g) + 0,
    "nn.Parameter": lambda g: nn.Parameter(g).detach().clone(),
    "from_dlpack": lambda g: torch.from_dlpack(g) + 0,
    "in a loss": lambda g: slope_of(g),
}


def test_every_read_gives_the_gradients_value():
    def loop(model, make):
        optimizer, log = make(model.parameters(), lr=1e-2), []
        for step in range(2):
            for part in range(2):
                loss_of(model, 10 * step + part).backward()
            log.append({name: read(model[0].weight.grad) for name, read in READS.items()})
            optimizer.step()
            optimizer.zero_grad()
        return optimizer, log

    same_with_torch(loop)


#: What changes a gradient in place.
WRITES = {
    "add_": lambda g: g.add_(0.5),
    "+=": lambda g: g.__iadd__(0.25),
    "sub_": lambda g: g.sub_(g.mean()),
    "div_": lambda g: g.div_(3),
    "/=": lambda g: g.__itruediv__(4),
    "mul_ by a 0-d tensor": lambda g: g.mul_(torch.tensor(0.3)),
    "mul_ by a tensor": lambda g: g.mul_(torch.linspace(0, 1, 6)),
    "neg_": lambda g: g.neg_(),
    "clamp_": lambda g: g.clamp_(-0.01, 0.01),
    "element": lambda g: g.__setitem__((0, 1), 0.5),
    "row": lambda g: g.__setitem__(2, 0.0),
    "mask": lambda g: g.__setitem__(g < 0, 0.0),
    "view.mul_": lambda g: g.view(-1)[3:20].mul_(2),
    "transposed add_": lambda g: g.t().add_(1.0),
    "select of a slice": lambda g: g[2:5].select(1, 3).fill_(0.125),
    "data.mul_": lambda g: g.data.mul_(0.5),
    "detach().add_": lambda g: g.detach().add_(0.5),
    "copy_": lambda g: g.copy_(torch.full((11, 6), 0.2)),
    "fill_": lambda g: g.fill_(0.3),
    "zero_": lambda g: g.zero_(),
    "nan_to_num_": lambda g: g.nan_to_num_(0.0),
    "masked_fill_": lambda g: g.masked_fill_(g.abs() < 0.01, 0.0),
    "add_ itself": lambda g: g.add_(g),
    "mul_ by itself": lambda g: g.mul_(g),
    "mul_ by its norm": lambda g: g.mul_(1 / (g.norm() + 1e-3)),
    "addcmul_": lambda g: g.addcmul_(g, g, value=0.5),
    "lerp_": lambda g: g.lerp_(torch.zeros(11, 6), 0.3),
    "sign_": lambda g: g.sign_(),
    "pow_": lambda g: g.pow_(2),
    "index_add_": lambda g: g.index_add_(0, torch.tensor([0, 3]), torch.ones(2, 6)),
    "index_fill_": lambda g: g.index_fill_(0, torch.tensor([4]), 0.0),
    "foreach_mul_": lambda g: torch._foreach_mul_([g], 0.5),
    "foreach_mul_ by a list": lambda g: torch._foreach_mul_([g], [0.5]),
    "foreach_mul_ by tensors": lambda g: torch._foreach_mul_([g], [torch.full((11, 6), 0.5)]),
    "foreach_add_": lambda g: torch._foreach_add_([g], [torch.ones(11, 6)], alpha=0.1),
    "foreach_div_": lambda g: torch._foreach_div_([g], 3.0),
    "out=": lambda g: torch.mul(g, 2, out=g),
    "bernoulli dropout": lambda g: g.mul_(torch.arange(66).reshape(11, 6) % 2),
    "unbind": lambda g: g.unbind(0)[1].add_(1.0),
    "split": lambda g: g.split(4)[1].mul_(3.0),
    "swap rows": lambda g: g.copy_(g.flip(0)),
    "after a step of view": lambda g: g.unsqueeze(0).squeeze(0).mul_(0.25),
    "scaled twice": lambda g: g.mul_(0.3).mul_(0.7),
    "scaled then added": lambda g: g.mul_(0.3).add_(1.0).mul_(2.0),
    "negative factor": lambda g: g.mul_(-1.0),
    "mul_ by zero": lambda g: g.mul_(0.0),
    "set to infinity and back": lambda g: g.mul_(2.0**20).mul_(2.0**-20),
}


@pytest.mark.parametrize("then_more", [False, True], ids=["then_step", "then_backward"])
def test_every_write_takes_effect(then_more):
    """Before ``step()``, and where a further backward adds to what was written. Each write on a gradient of its own."""

    def loop(model, make):
        optimizer, log = make(model.parameters(), lr=1e-3), {}
        for step, (name, write) in enumerate(WRITES.items()):
            loss_of(model, 10 * step).backward()
            write(model[0].weight.grad)
            seen = [model[0].weight.grad.clone(), model[0].weight.grad.norm().item()]
            if then_more:
                loss_of(model, 10 * step + 1).backward()
                seen.append(model[0].weight.grad.clone())
            log[name] = seen
            optimizer.step()
            optimizer.zero_grad()
        return optimizer, log

    same_with_torch(loop, log_rtol=1e-4, atol=1e-5)


@every_setup
def test_reads_and_writes_under_every_policy(setup):
    def loop(model, make):
        optimizer, log = make(model.parameters(), lr=1e-2), []
        for step in range(3):
            loss_of(model, 10 * step).backward()
            for parameter in model.parameters():
                log.append(parameter.grad.abs().sum().item())
                parameter.grad.add_(0.01).mul_(0.5)
            loss_of(model, 10 * step + 1).backward()
            log.append([parameter.grad.clone() for parameter in model.parameters()])
            optimizer.step()
            log.append([parameter.grad.clone() for parameter in model.parameters()])  # still there
            optimizer.zero_grad()
            log.append([parameter.grad is None for parameter in model.parameters()])
        return optimizer, log

    same_with_torch(loop, setup)


@every_setup
def test_a_gradient_written_after_step_does_not_disturb_the_update_in_flight(setup):
    def loop(model, make):
        optimizer = make(model.parameters(), lr=1e-2)
        for step in range(4):
            loss_of(model, step).backward()
            optimizer.step()
            for parameter in model.parameters():
                parameter.grad.fill_(1e6)
            optimizer.zero_grad(set_to_none=step % 2 == 0)
        return optimizer

    same_with_torch(loop, setup)


def test_a_view_kept_from_before_is_tied_to_the_gradient():
    model = mlp()
    with OffloadAdamW(model.parameters(), config=SMALL) as optimizer:
        loss_of(model).backward()
        row = model[0].weight.grad[2]
        model[0].weight.grad.fill_(0.5)
        assert torch.equal(row.clone(), torch.full((6,), 0.5))
        row.add_(1.0)
        assert model[0].weight.grad[2, 0].item() == 1.5
        assert optimizer.grad(model[0].weight)[2, 0].item() == 1.5


def test_gradients_leave_the_device():
    """The point of it: after backward no parameter holds storage for its gradient."""
    model = mlp()
    with OffloadAdamW(model.parameters(), config=SMALL):
        loss_of(model).backward()
        assert all(type(parameter.grad) is GradientStandIn for parameter in model.parameters())


def test_grad_is_the_fp32_sum_and_a_copy():
    model, reference = mlp(), mlp()
    with OffloadAdamW(model.parameters(), config=SMALL) as optimizer:
        for part in range(2):
            loss_of(model, part).backward()
            loss_of(reference, part).backward()
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            assert torch.equal(optimizer.grad(ours), theirs.grad)
            optimizer.grad(ours).fill_(7.0)
            assert torch.equal(optimizer.grad(ours), theirs.grad)
            assert torch.equal(ours.grad, theirs.grad)


def test_grad_names_a_parameter_without_a_gradient_and_one_of_another_optimizer():
    model = mlp()
    with OffloadAdamW(model.named_parameters(), config=SMALL) as optimizer:
        with pytest.raises(GradientError) as caught:
            optimizer.grad(model[0].weight)
        assert str(caught.value) == "'0.weight' has no gradient now: call backward first"
        with pytest.raises(ValueError) as foreign:
            optimizer.grad(nn.Parameter(torch.zeros(2, 3)))
        assert str(foreign.value) == "the parameter of shape (2, 3) is not trained by this optimizer"


@pytest.mark.parametrize("read", ["data_ptr", "untyped_storage", "storage", "share_memory_"])
def test_what_needs_an_address_is_refused_by_name(read):
    model = mlp()
    with OffloadAdamW(model.named_parameters(), config=SMALL):
        loss_of(model).backward()
        with pytest.raises(GradientError) as caught:
            getattr(model[3].bias.grad, read)()
        assert str(caught.value) == (
            "the gradient of '3.bias' has left for the host and has no address: "
            "read it with .clone(), or with optimizer.grad(parameter)"
        )


def test_code_below_the_dispatcher_gets_an_error_not_a_null_address():
    """DLPack is handed out by C code that asks nobody; so do extensions."""
    model = mlp()
    with OffloadAdamW(model.named_parameters(), config=SMALL):
        loss_of(model).backward()
        with pytest.raises(RuntimeError, match="Cannot access data pointer"):
            torch.utils.dlpack.to_dlpack(model[3].bias.grad)


def test_saved_gradients_are_plain_tensors():
    model = mlp()
    with OffloadAdamW(model.parameters(), config=SMALL):
        loss_of(model).backward()
        gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
        file = io.BytesIO()
        torch.save(gradients, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=True)
        assert all(type(tensor) is torch.Tensor for tensor in loaded.values())
        assert_same_log(loaded, {name: gradient.clone() for name, gradient in gradients.items()})
        assert all(type(copy.deepcopy(gradient)) is torch.Tensor for gradient in gradients.values())


def test_a_model_copied_or_saved_between_backward_and_step():
    """The copy has the weights and, as with torch, no gradient; its backward feeds no bucket of the original."""
    model = mlp()
    with OffloadAdamW(model.parameters(), lr=1e-2, config=SMALL) as optimizer:
        loss_of(model).backward()
        before = [optimizer.grad(parameter) for parameter in model.parameters()]
        twin = copy.deepcopy(model)
        again = pickle.loads(pickle.dumps(model))
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        for other in (twin, again, loaded):
            assert all(type(parameter.grad) in (type(None), torch.Tensor) for parameter in other.parameters())
            other.zero_grad()
            loss_of(other, 5).backward()
            assert all(type(parameter.grad) is torch.Tensor for parameter in other.parameters())
        for parameter, gradient in zip(model.parameters(), before, strict=True):
            assert torch.equal(optimizer.grad(parameter), gradient)
        optimizer.step()
        assert optimizer.statistics().steps == 1


def test_a_copied_parameter_takes_the_value_of_its_gradient():
    """``copy.deepcopy`` of a lone parameter with its gradient (torch copies the gradient of a plain tensor)."""
    model = mlp()
    with OffloadAdamW(model.parameters(), config=SMALL):
        loss_of(model).backward()
        leaf = model[0].weight.detach().clone().requires_grad_()
        leaf.grad = model[0].weight.grad
        assert torch.equal(copy.deepcopy(leaf).grad, model[0].weight.grad.clone())


def test_a_gradient_handed_to_another_tensor_and_to_another_optimizer():
    """Gradients of a model are put into a copy that plain torch trains."""
    model, twin = mlp(), mlp()
    other = torch.optim.SGD(twin.parameters(), lr=0.1)
    with OffloadAdamW(model.parameters(), config=SMALL) as optimizer:
        loss_of(model).backward()
        expected = [
            p.detach() - 0.1 * optimizer.grad(q) for p, q in zip(twin.parameters(), model.parameters(), strict=True)
        ]
        for parameter, source in zip(twin.parameters(), model.parameters(), strict=True):
            parameter.grad = source.grad
        other.step()
        torch.testing.assert_close([p.detach() for p in twin.parameters()], expected)


def test_after_close_gradients_are_plain_tensors_with_their_values():
    model, reference = mlp(), mlp()
    optimizer = OffloadAdamW(model.parameters(), config=SMALL)
    loss_of(model).backward()
    loss_of(reference).backward()
    optimizer.close()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert type(ours.grad) is torch.Tensor
        assert torch.equal(ours.grad, theirs.grad)
    loss_of(model, 1).backward()
    loss_of(reference, 1).backward()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_gradients_read_in_their_dtype(dtype):
    def loop(model, make):
        optimizer = make(model.parameters(), lr=1e-2)
        loss_of(model, 0, dtype).backward()
        log = [(p.grad.dtype, p.grad.clone(), p.grad.float().sum().item()) for p in model.parameters()]
        return optimizer, log

    model, reference = mlp(dtype), mlp(dtype)
    optimizer, log = loop(model, lambda params, **hyper: PLAIN.make(params, model=model, **hyper))
    _, expected = loop(reference, torch.optim.AdamW)
    assert_same_log(log, expected)
    optimizer.close()


@pytest.mark.parametrize("setup", ATOMIC, ids=lambda setup: setup.name)
def test_a_gradient_kept_beyond_zero_grad_is_refused_not_replaced(setup):
    """torch would keep the old values; showing the next backward's in their place would be a lie."""
    model = mlp()
    optimizer = setup.make(model.named_parameters(), model=model, lr=1e-2)
    kept, cloned = [], []
    for step in range(3):
        loss_of(model, step).backward()
        kept.append(model[0].weight.grad)
        cloned.append(model[0].weight.grad.clone())
        if step == 1:
            kept.append(model[0].weight.grad[2])
        optimizer.step()
        optimizer.zero_grad() if step else model.zero_grad()
    loss_of(model, 9).backward()
    for old in kept:
        for read in (torch.Tensor.clone, torch.norm, repr, lambda g: g.add_(1.0)):
            with pytest.raises(GradientError) as caught:
                read(old)
            assert str(caught.value) == (
                "this gradient of '0.weight' is gone, the parameter has another one by now: "
                "keep a gradient beyond zero_grad() with .clone()"
            )
    assert not torch.equal(cloned[0], cloned[1])
    assert torch.equal(model[0].weight.grad.clone(), optimizer.grad(model[0].weight))
    optimizer.close()


def test_an_array_of_a_gradient_cannot_be_written_to():
    """In torch it shares the gradient's memory; here a write to it would be lost, so numpy refuses it."""
    model = mlp()
    with OffloadAdamW(model.parameters(), config=SMALL):
        loss_of(model).backward()
        for array in (model[0].weight.grad.numpy(), np.asarray(model[0].weight.grad)):
            with pytest.raises(ValueError, match="read-only"):
                array[0] = 0.0


def test_data_set_by_hand_is_the_gradient():
    def loop(model, make):
        optimizer = make(model.parameters(), lr=1e-2)
        loss_of(model).backward()
        model[0].weight.grad.data = torch.full((11, 6), 0.5)
        model[3].bias.data = model[3].bias.grad.data + 1  # the other way round: a weight set from a gradient
        log = [model[0].weight.grad.clone()]
        optimizer.step()
        return optimizer, log

    same_with_torch(loop)


@pytest.mark.parametrize("change", [lambda g: g.t_(), lambda g: g.unsqueeze_(0), lambda g: g.resize_(6, 11)])
def test_a_change_of_shape_in_place_is_refused(change):
    model = mlp()
    with OffloadAdamW(model.named_parameters(), config=SMALL) as optimizer:
        loss_of(model).backward()
        before = optimizer.grad(model[0].weight)
        with pytest.raises(GradientError, match=r"would give the gradient of '0.weight' another shape"):
            change(model[0].weight.grad)
        assert torch.equal(optimizer.grad(model[0].weight), before)


def test_a_hook_may_reuse_what_it_added():
    """Noise added in a hook from one buffer that is filled again each time: what was added counts."""

    def loop(model, make):
        buffer = torch.zeros(11, 6)
        optimizer = make(model.parameters(), lr=1e-2)

        def add_noise(parameter):
            parameter.grad.add_(buffer.fill_(float(buffer[0, 0]) + 0.125))
            buffer.mul_(2.0)

        model[0].weight.register_post_accumulate_grad_hook(add_noise)
        for step in range(2):
            for part in range(3):
                loss_of(model, 10 * step + part).backward()
            optimizer.step()
            optimizer.zero_grad()
        return optimizer

    for setup in ATOMIC:
        same_with_torch(loop, setup)
