"""Our Adam and AdamW are torch's, from the same gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.cpu_ops.reference import in_mode
from zoff_async.cpu_ops import ADAM, ADAMW, UpdateRule, make_kernel

KERNELS = ["numexpr", "numba", "torch"]
RULES = [ADAMW, ADAM]
NUMEL = 1001


def both(
    rule: UpdateRule,
    kernel: str,
    grads: list[Tensor],
    *,
    start: Tensor | None = None,
    factor: float = 1.0,
    **hyper: Any,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(ours, torch's) master and moments after one update a gradient; ours in a thread like the pool's."""
    start = torch.randn(NUMEL) if start is None else start
    hyper = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1, **hyper}
    master, state = start.clone(), (torch.zeros_like(start), torch.zeros_like(start))
    grad = torch.empty_like(start)
    update = make_kernel(kernel, rule).bind(master, state, grad, None)

    def run() -> None:
        for step, g in enumerate(grads, 1):
            grad.copy_(g)
            update.run(rule.scalars(step=step, factor=factor, **hyper))

    in_mode(flush=True, run=run)

    parameter = torch.nn.Parameter(start.clone())
    optimizer = getattr(torch.optim, {"adamw": "AdamW", "adam": "Adam"}[rule.name])(
        [parameter], foreach=False, fused=False, **hyper
    )
    for g in grads:
        parameter.grad = g * factor
        optimizer.step()
    theirs = optimizer.state[parameter]
    return (
        {"master": master, "exp_avg": state[0], "exp_avg_sq": state[1]},
        {"master": parameter.detach(), "exp_avg": theirs["exp_avg"], "exp_avg_sq": theirs["exp_avg_sq"]},
    )


def ulps(found: Tensor, expected: Tensor) -> float:
    spacing = np.spacing(np.abs(expected.numpy()))
    return float(np.max(np.abs(found.numpy().astype(np.float64) - expected.numpy()) / spacing))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.9, 0.95), (0.0, 0.99)])
def test_moments_are_torchs_to_two_ulp_after_one_step(rule, kernel, weight_decay, betas):
    """Moments first: a wrong ``1 - beta2`` hides in parameters and shows here."""
    grads = [torch.randn(NUMEL)]
    ours, theirs = both(rule, kernel, grads, weight_decay=weight_decay, betas=betas)

    assert ulps(ours["exp_avg"], theirs["exp_avg"]) <= 2
    assert ulps(ours["exp_avg_sq"], theirs["exp_avg_sq"]) <= 2


@pytest.mark.parametrize("kernel", ["numexpr", "numba"])
@pytest.mark.parametrize("betas", [(0.0, 0.0), (0.1, 0.01), (0.5, 0.5)])
def test_a_short_memory_keeps_every_digit_of_a_small_gradient_after_a_large_one(kernel, betas):
    """Adding ``(g - m)*c1`` to m would lose them. torch itself is no judge here: its ``1 - weight`` is fp32."""
    grads = [torch.randn(NUMEL) * 1e4, torch.randn(NUMEL) * 1e-4]
    ours, _ = both(ADAMW, kernel, grads, betas=betas)
    first, second = (g.double() for g in grads)
    exp_avg = betas[0] * (1 - betas[0]) * first + (1 - betas[0]) * second
    exp_avg_sq = betas[1] * (1 - betas[1]) * first**2 + (1 - betas[1]) * second**2

    assert ulps(ours["exp_avg"], exp_avg.float()) <= 3
    assert ulps(ours["exp_avg_sq"], exp_avg_sq.float()) <= 3


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
@pytest.mark.parametrize("steps", [1, 20])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("lr", [1e-2, 1e-3])
def test_parameters_are_torchs_after_one_step_and_after_twenty(rule, kernel, steps, weight_decay, lr):
    grads = [torch.randn(NUMEL) for _ in range(steps)]
    ours, theirs = both(rule, kernel, grads, weight_decay=weight_decay, lr=lr)

    torch.testing.assert_close(ours["master"], theirs["master"], rtol=1e-6, atol=1e-4 * lr)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_decay_is_decoupled_in_adamw_and_part_of_the_gradient_in_adam(rule):
    """From a zero gradient: AdamW shrinks the weights and no moment, Adam moves by lr in the weight's sign."""
    ours, _ = both(rule, "numexpr", [torch.zeros(4)], start=torch.tensor([1.0, -1.0, 2.0, -2.0]), lr=0.1)

    if rule is ADAMW:
        torch.testing.assert_close(ours["master"], torch.tensor([0.99, -0.99, 1.98, -1.98]))
        assert (ours["exp_avg"] == 0).all()
    else:
        torch.testing.assert_close(ours["master"], torch.tensor([0.9, -0.9, 1.9, -1.9]))
        torch.testing.assert_close(ours["exp_avg"], torch.tensor([0.01, -0.01, 0.02, -0.02]))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("eps", [1e-8, 0.0])
@pytest.mark.parametrize("size", [1e-8, 1e-10, 1e-12])
def test_tiny_gradients_meet_eps_where_torch_puts_it(kernel, eps, size):
    """From zero weights, so that the update is what is seen."""
    grads = [(torch.rand(NUMEL) + 0.5) * size for _ in range(3)]
    ours, theirs = both(ADAMW, kernel, grads, start=torch.zeros(NUMEL), eps=eps, weight_decay=0.0)

    torch.testing.assert_close(ours["master"], theirs["master"], rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("kernel", "eps"),
    [(k, eps) for k in KERNELS for eps in (1e-8, 1e-16, 1e-37)] + [("numexpr", 1e-44), ("numba", 1e-44)],
)
def test_a_zero_gradient_without_decay_moves_nothing(kernel, eps):
    """Not even where eps would be flushed to zero and 0/0 made of it (torch's operator takes eps as it is)."""
    start = torch.randn(NUMEL)
    ours, _ = both(ADAMW, kernel, [torch.zeros(NUMEL)] * 3, start=start, eps=eps, weight_decay=0.0)

    assert torch.equal(ours["master"], start)
    assert (ours["exp_avg"] == 0).all()


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_learning_rate_of_zero_leaves_the_weights(kernel):
    start = torch.randn(NUMEL)
    ours, _ = both(ADAMW, kernel, [torch.randn(NUMEL)] * 2, start=start, lr=0.0)

    assert torch.equal(ours["master"], start)
    assert (ours["exp_avg"] != 0).all()


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_factor_comes_before_the_square(kernel):
    """Gradients of 1e20 have squares beyond fp32; scaled to a norm of one they are ordinary."""
    grads = [torch.randn(NUMEL) * 1e20]
    ours, theirs = both(ADAMW, kernel, grads, factor=1e-20)

    assert ours["exp_avg_sq"].isfinite().all()
    assert ulps(ours["exp_avg_sq"], theirs["exp_avg_sq"]) <= 2
    torch.testing.assert_close(ours["master"], theirs["master"], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_a_loss_scale_that_is_a_power_of_two_leaves_no_trace(rule, kernel):
    grads, start = [torch.randn(NUMEL) for _ in range(3)], torch.randn(NUMEL)
    plain, _ = both(rule, kernel, grads, start=start)
    scaled, _ = both(rule, kernel, [g * 1024 for g in grads], start=start, factor=1 / 1024)

    for name, value in plain.items():
        assert torch.equal(scaled[name], value), name
