"""Gradients from any number and kind of backwards are summed as torch sums them."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.contract.loops import (
    ATOMIC,
    EXACT,
    GATED,
    PLAIN,
    SMALL,
    assert_equal,
    batch,
    loss_of,
    mlp,
    same_with_torch,
    weights,
)
from zoff_async import GradientError, OffloadAdamW, OffloadConfig

every_setup = pytest.mark.parametrize("setup", ATOMIC, ids=lambda setup: setup.name)


@pytest.mark.parametrize("setup", EXACT, ids=lambda setup: setup.name)
def test_one_backward_a_step(setup):
    def loop(model, make):
        optimizer, losses = make(model.parameters(), lr=1e-2, weight_decay=0.1), []
        for step in range(8):
            loss = loss_of(model, step)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return optimizer, losses

    same_with_torch(loop, setup)


@every_setup
def test_any_number_of_backwards_without_declaring_it(setup):
    """1, 3, 2, 5 backwards in turn; the norm is that of the whole sum."""

    def loop(model, make):
        optimizer, norms = make(model.parameters(), lr=1e-2), []
        for step, backwards in enumerate([1, 3, 2, 5, 1, 2]):
            for part in range(backwards):
                loss_of(model, 10 * step + part).backward()
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1e9))
            optimizer.step()
            optimizer.zero_grad()
        return optimizer, norms

    same_with_torch(loop, setup)


def test_adam_runs_once_a_step_however_many_backwards_there_are():
    model = mlp()
    optimizer = OffloadAdamW(model.parameters(), config=SMALL)
    for part in range(3):
        loss_of(model, part).backward()
    optimizer.step()
    optimizer.synchronize()

    adams = [span.action for span in optimizer.timeline.spans if span.action.kind == "adam"]
    assert len(adams) == len(set(adams)) > 0
    d2h = [span.action for span in optimizer.timeline.spans if span.action.kind == "d2h"]
    assert len(d2h) == len(set(d2h)) == 3 * len({action.bucket for action in d2h})
    optimizer.close()


def test_micro_batches_of_bf16_gradients_are_summed_in_fp32():
    """Gradients of 1, then 63 of 2**-9: in bf16 the small ones would vanish."""
    weight = nn.Parameter(torch.zeros(7, dtype=torch.bfloat16))
    with OffloadAdamW([weight]) as optimizer:
        expected = torch.zeros(7)
        for part in range(64):
            gradient = torch.full((7,), 1.0 if part == 0 else 2.0**-9, dtype=torch.bfloat16)
            (weight * gradient).sum().backward()
            expected += gradient.float()

        assert torch.equal(optimizer.grad(weight), expected)


@every_setup
def test_several_losses_of_one_forward(setup):
    def loop(model, make):
        optimizer = make(model.parameters(), lr=1e-2)
        for step in range(4):
            output = model(batch(step))
            output.square().mean().backward(retain_graph=True)
            output.abs().mean().backward(retain_graph=True)
            output.sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return optimizer

    same_with_torch(loop, setup)


@every_setup
def test_a_backward_of_several_tensors_with_their_own_gradients(setup):
    def loop(model, make):
        optimizer = make(model.parameters(), lr=1e-2)
        for step in range(4):
            output = model(batch(step))
            output.backward(torch.linspace(-1, 1, output.numel()).reshape(output.shape), retain_graph=True)
            torch.autograd.backward([output.mean(), output.square().sum()], [None, torch.tensor(0.5)])
            optimizer.step()
            optimizer.zero_grad()
        return optimizer

    same_with_torch(loop, setup)


@every_setup
def test_the_same_graph_is_run_backward_twice(setup):
    def loop(model, make):
        optimizer = make(model.parameters(), lr=1e-2)
        for step in range(3):
            loss = loss_of(model, step)
            loss.backward(retain_graph=True)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return optimizer

    same_with_torch(loop, setup)


@every_setup
def test_a_backward_that_reaches_some_parameters_only(setup):
    """``backward(inputs=...)`` fills some; ``torch.autograd.grad`` fills none."""

    def loop(model, make):
        optimizer = make(model.parameters(), lr=1e-2, weight_decay=0.1)
        for step in range(4):
            loss = loss_of(model, step)
            torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
            assert step or all(parameter.grad is None for parameter in model.parameters())
            loss.backward(inputs=[model[0].weight, model[3].bias])
            optimizer.step()
            optimizer.zero_grad()
        return optimizer, [parameter.grad is None for parameter in model.parameters()]

    same_with_torch(loop, setup)


class Shared(nn.Module):
    """One linear layer used three times, the middle use perhaps checkpointed."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.reentrant = reentrant
        self.first, self.shared, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x):
        x = self.shared(torch.tanh(self.first(x)))
        if self.reentrant is None:
            x = torch.tanh(self.shared(x))
        else:
            x = checkpoint(lambda y: torch.tanh(self.shared(y)), x, use_reentrant=self.reentrant)
        return self.last(self.shared(x))


@every_setup
@pytest.mark.parametrize("reentrant", [None, True, False])
def test_a_module_used_three_times_and_checkpointed(setup, reentrant):
    """Its hook fires twice in a backward where the checkpoint is reentrant."""

    def loop(model, make):
        optimizer = make(model.parameters(), lr=1e-2)
        for step in range(4):
            for part in range(1 + step % 2):
                loss_of(model, 10 * step + part).backward()
            optimizer.step()
            optimizer.zero_grad()
        return optimizer

    same_with_torch(loop, setup, lambda: Shared(reentrant))


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")  # the outer checkpoint's forward
@every_setup
@pytest.mark.parametrize("reentrant", [True, False])
def test_nested_checkpoints_of_every_layer(setup, reentrant):
    def loop(model, make):
        optimizer = make(model.parameters(), lr=1e-2)
        first, rest = model[0], model[1:]
        for step in range(4):
            x = batch(step).requires_grad_()

            def block(x):
                return checkpoint(rest, first(x), use_reentrant=reentrant)

            checkpoint(block, x, use_reentrant=reentrant).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return optimizer

    same_with_torch(loop, setup)


def test_in_backward_a_checkpointed_shared_module_is_refused_before_anything_moves():
    """Adam would start at the first of two gradients of one backward."""
    model = Shared(reentrant=True)
    with OffloadAdamW(model.parameters(), policy="in_backward", config=SMALL) as optimizer:
        before = weights(model)
        with pytest.raises(GradientError, match=r"backwards_per_step|overlap"):
            loss_of(model).backward()
            optimizer.step()
        assert_equal(weights(model), before)


def test_in_backward_a_second_backward_is_refused():
    model = mlp()
    with OffloadAdamW(model.parameters(), policy="in_backward", config=SMALL) as optimizer:
        loss_of(model, 0).backward()
        with pytest.raises(GradientError, match="backward number 2 of the step"):
            loss_of(model, 1).backward()
        assert optimizer is not None


@every_setup
def test_forwards_without_gradients_between_change_nothing(setup):
    """Evaluations, sampling and a forward that fails, between the backwards and after the step."""

    def loop(model, make):
        optimizer, seen = make(model.parameters(), lr=1e-2), []
        for step in range(4):
            loss_of(model, step).backward()
            with torch.no_grad():
                seen.append(loss_of(model, 50).item())
            with torch.inference_mode():
                seen.append(loss_of(model.eval(), 51).item())
            model.train()
            with pytest.raises(RuntimeError):
                model(torch.zeros(2, 5))
            loss_of(model, 100 + step)  # a graph that is dropped
            loss_of(model, 20 + step).backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                seen.append(loss_of(model, 52).item())
        return optimizer, seen

    same_with_torch(loop, setup)


class Broken(torch.autograd.Function):
    """The identity; its backward fails while ``broken`` is set."""

    broken = False

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if Broken.broken:
            raise ArithmeticError("backward is broken")
        return gradient


class BreakingModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.last = nn.Linear(6, 9), nn.Linear(9, 2)

    def forward(self, x):
        return self.last(Broken.apply(torch.tanh(self.first(x))))


@every_setup
@pytest.mark.parametrize("forgotten", [True, False], ids=["zero_grad", "kept"])
def test_a_backward_that_fails_leaves_what_torch_leaves(setup, forgotten):
    """The layers behind the fault have their gradients; whether they count is the caller's choice, as with torch."""

    def loop(model, make):
        optimizer = make(model.parameters(), lr=1e-2, weight_decay=0.1)
        for step in range(5):
            Broken.broken = step == 2
            if step == 2:
                with pytest.raises(ArithmeticError, match="backward is broken"):
                    loss_of(model, step).backward()
                if forgotten:
                    optimizer.zero_grad()
                    loss_of_now(model, step)
            else:
                loss_of(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        return optimizer

    def loss_of_now(model, step):
        Broken.broken = False
        loss_of(model, step).backward()

    same_with_torch(loop, setup, BreakingModel)


@every_setup
def test_without_zero_grad_gradients_pile_up(setup):
    def loop(model, make):
        optimizer = make(model.parameters(), lr=1e-2)
        for step in range(5):
            loss_of(model, step).backward()
            optimizer.step()
            if step == 2:
                optimizer.zero_grad()
        return optimizer, [parameter.grad.clone() for parameter in model.parameters()]

    same_with_torch(loop, setup)


@every_setup
def test_a_second_step_applies_the_same_gradient_again(setup):
    def loop(model, make):
        optimizer = make(model.parameters(), lr=1e-2)
        loss_of(model).backward()
        optimizer.step()
        optimizer.step()
        loss_of(model, 1).backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.step()  # without a gradient: nothing
        return optimizer

    same_with_torch(loop, setup)


@every_setup
def test_zeroed_gradients_step_and_absent_ones_do_not(setup):
    """``zero_grad(set_to_none=False)`` leaves zeros: they decay the weight, move by the old momentum, and count."""

    def loop(model, make):
        optimizer = make(model.parameters(), lr=1e-2, weight_decay=0.1)
        zeros = []
        for step in range(6):
            if step != 3:
                loss_of(model, step).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 2 == 1)
            zeros.append([None if p.grad is None else p.grad.abs().sum().item() for p in model.parameters()])
        return optimizer, zeros

    same_with_torch(loop, setup)


@every_setup
@pytest.mark.parametrize(
    "form", ["model.zero_grad", "p.grad = None", "model.zero_grad(False)", "p.grad.zero_()", "foreach_zero"]
)
def test_every_way_to_forget_gradients(setup, form):
    def loop(model, make):
        optimizer = make(model.parameters(), lr=1e-2, weight_decay=0.1)
        for step in range(4):
            loss_of(model, step).backward()
            optimizer.step()
            if form == "model.zero_grad":
                model.zero_grad()
            elif form == "model.zero_grad(False)":
                model.zero_grad(set_to_none=False)
            elif form == "foreach_zero":
                torch._foreach_zero_([parameter.grad for parameter in model.parameters()])
            else:
                for parameter in model.parameters():
                    if form == "p.grad = None":
                        parameter.grad = None
                    else:
                        parameter.grad.zero_()
        return optimizer

    same_with_torch(loop, setup)


@every_setup
def test_gradients_set_by_hand_are_the_gradients(setup):
    """Set, replaced after a backward, swapped between parameters, one dropped."""

    def loop(model, make):
        parameters = list(model.parameters())
        optimizer = make(parameters, lr=1e-2, weight_decay=0.1)
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, 0.25)
        optimizer.step()
        optimizer.zero_grad()
        loss_of(model, 1).backward()
        parameters[0].grad = parameters[0].grad * 3
        parameters[1].grad, parameters[2].grad = parameters[2].grad, parameters[1].grad  # both (11,)
        parameters[4].grad = None
        optimizer.step()
        parameters[0].grad = torch.ones_like(parameters[0])
        loss_of(model, 2).backward()  # adds to what was set
        optimizer.step()
        return optimizer, [parameter.grad.clone() for parameter in parameters]

    same_with_torch(loop, setup)


@every_setup
def test_tensor_hooks_and_other_accumulation_hooks_see_and_change_gradients(setup):
    """Hooks before ours and after ours, that scale a gradient or only read it."""

    def halve(parameter):
        parameter.grad.mul_(0.5)

    def clamp(parameter):
        parameter.grad.clamp_(-0.01, 0.01)

    def loop(model, make):
        seen = []
        first, last = model[0].weight, model[3].weight
        first.register_hook(lambda gradient: gradient * 2)
        last.register_post_accumulate_grad_hook(halve)
        optimizer = make(model.parameters(), lr=1e-2)
        first.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad.norm().item()))
        last.register_post_accumulate_grad_hook(clamp)
        for step in range(3):
            for part in range(2):
                loss_of(model, 10 * step + part).backward()
            optimizer.step()
            optimizer.zero_grad()
        return optimizer, seen

    same_with_torch(loop, setup)


@every_setup
def test_gradient_penalty_with_double_backward(setup):
    def loop(model, make):
        optimizer = make(model.parameters(), lr=1e-2)
        for step in range(3):
            x = batch(step).requires_grad_()
            (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
            (loss_of(model, step) + slope.square().mean()).backward()
            optimizer.step()
            optimizer.zero_grad()
        return optimizer

    same_with_torch(loop, setup)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")
@pytest.mark.parametrize("setup", [PLAIN, GATED], ids=lambda setup: setup.name)
def test_gradients_with_a_graph_of_their_own_can_be_differentiated(setup):
    """``backward(create_graph=True)``, then a second loss of ``p.grad``: the graph must not be lost in silence."""

    def loop(model, make):
        optimizer = make(model.parameters(), lr=1e-2)
        for step in range(3):
            loss_of(model, step).backward(create_graph=True)
            penalty = sum(parameter.grad.square().sum() for parameter in model.parameters())
            penalty.backward()
            optimizer.step()
            optimizer.zero_grad()
        return optimizer

    same_with_torch(loop, setup)


@every_setup
def test_backward_in_another_thread(setup):
    from concurrent.futures import ThreadPoolExecutor

    def loop(model, make):
        optimizer = make(model.parameters(), lr=1e-2)
        with ThreadPoolExecutor(1) as threads:
            for step in range(3):
                threads.submit(lambda step=step: loss_of(model, step).backward()).result()
                threads.submit(optimizer.step).result()
                optimizer.zero_grad()
        return optimizer

    same_with_torch(loop, setup)


@pytest.mark.parametrize("bucket_bytes", [1, 63 * 4, 64 * 4, 65 * 4, 10**9])
@pytest.mark.parametrize("chunk_numel", [1, 64, 10**6])
def test_bucket_and_chunk_edges_change_no_bit(bucket_bytes, chunk_numel):
    """A parameter larger than a bucket, exactly as large, one larger; chunks of one element."""

    def run(config):
        torch.manual_seed(0)
        parameters = [nn.Parameter(torch.randn(size)) for size in (100, 10, 64, 64, 1, 7)]
        with OffloadAdamW(parameters, lr=1e-2, config=config) as optimizer:
            for step in range(3):
                sum(((p + step) ** 3).sum() for p in parameters).backward()
                optimizer.step()
                optimizer.zero_grad()
            optimizer.synchronize()
            return [p.detach().clone() for p in parameters], optimizer.statistics()

    found, statistics = run(OffloadConfig(bucket_bytes=bucket_bytes, chunk_numel=chunk_numel, workers=2))
    expected, _ = run(OffloadConfig(bucket_bytes=10**6, workers=1))
    assert_equal(found, expected)
    assert statistics.d2h_bytes == 3 * 4 * (100 + 10 + 64 + 64 + 1 + 7)
