"""Against torch itself: the same gradients, torch.optim.AdamW and Adam in fp32 with foreach and fused off.

Moments within 2 units in the last place after one step, parameters within rtol 1e-6 and atol 1e-4 of the learning
rate after one step and after twenty; a parameter of the model is its master, rounded once.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import zoff_async as zoff
from tests.runtime.scenes import Stage, odd_loss, train

HYPERS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "decay": {"lr": 3e-4, "weight_decay": 0.1},
    "large": {"lr": 0.1, "betas": (0.5, 0.9), "eps": 1e-3},
    "no memory": {"lr": 1e-2, "betas": (0.0, 0.0), "weight_decay": 0.3},
    "no rate": {"lr": 0.0, "weight_decay": 0.1},
}
PAIRS = {
    zoff.OffloadAdamW: torch.optim.AdamW,
    zoff.OffloadAdam: torch.optim.Adam,
}
LR = 1e-3


def network(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(7, 11), nn.Tanh(), nn.LayerNorm(11), nn.Linear(11, 3)).to(dtype)


def gradients(model: nn.Module, step: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Of many magnitudes, some of them zero and some tiny."""
    generator = torch.Generator().manual_seed(step)
    made = []
    for parameter in model.parameters():
        scale = 10 ** torch.empty(parameter.shape).uniform_(-6, 2, generator=generator)
        values = torch.randn(parameter.shape, generator=generator) * scale
        values[torch.rand(parameter.shape, generator=generator) < 0.1] = 0
        made.append(values.to(dtype))
    return made


def ulps(a: Tensor, b: Tensor) -> int:
    """The most representable numbers that lie between two fp32 tensors, element by element."""

    def ordered(t: Tensor) -> np.ndarray:
        bits = t.detach().contiguous().numpy().view(np.int32).astype(np.int64)
        return np.where(bits < 0, -(bits & 0x7FFFFFFF), bits)

    return int(np.abs(ordered(a) - ordered(b)).max())


def assert_close_to(ours: list[Tensor], theirs: list[Tensor], lr: float) -> None:
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b.detach(), rtol=1e-6, atol=1e-4 * lr)


@pytest.mark.parametrize("kernel", ["numexpr", "numba", "torch"])
@pytest.mark.parametrize("name", HYPERS)
@pytest.mark.parametrize("rule", PAIRS, ids=lambda rule: rule.__name__)
def test_one_step_and_twenty_are_those_of_torch(rule, name, kernel):
    hyper = {"lr": LR, **HYPERS[name]}
    model, reference = network(), network()
    ours = rule(model.parameters(), **hyper, config=zoff.OffloadConfig(kernel=kernel, bucket_bytes=100, chunk_numel=17))
    theirs = PAIRS[rule](reference.parameters(), **hyper, foreach=False, fused=False)
    for step in range(20):
        for a, b, gradient in zip(model.parameters(), reference.parameters(), gradients(model, step), strict=True):
            a.grad, b.grad = gradient.clone(), gradient.clone()
        ours.step()
        theirs.step()
        if step == 0:
            for a, b in zip(model.parameters(), reference.parameters(), strict=True):
                for moment in ("exp_avg", "exp_avg_sq"):
                    assert ulps(ours.state[a][moment], theirs.state[b][moment]) <= 2
        if step in (0, 19):
            assert_close_to([ours.master(p) for p in model.parameters()], list(reference.parameters()), hyper["lr"])
    ours.close()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("policy", ["serial", "overlap", "in_backward"])
def test_low_precision_models_have_the_masters_of_an_fp32_run(policy, dtype):
    """Given the same (low precision) gradients, masters are torch's fp32 parameters, and weights are rounded
    masters.
    """
    model, reference = network(dtype), network(dtype).float()
    ours = zoff.OffloadAdamW(model.parameters(), lr=LR, policy=policy)
    theirs = torch.optim.AdamW(reference.parameters(), lr=LR, foreach=False, fused=False)
    for step in range(20):
        for a, b, gradient in zip(
            model.parameters(), reference.parameters(), gradients(model, step, dtype), strict=True
        ):
            a.grad, b.grad = gradient.clone(), gradient.float()
        ours.step()
        theirs.step()
        ours.zero_grad()
        for parameter in model.parameters():
            assert torch.equal(parameter, ours.master(parameter).to(dtype))
    assert_close_to([ours.master(p) for p in model.parameters()], list(reference.parameters()), LR)
    ours.close()


def test_accumulated_low_precision_gradients_are_summed_in_fp32():
    """Three bf16 gradients a step: the sum that Adam sees is theirs in fp32, in their order."""
    model, reference = network(torch.bfloat16), network(torch.bfloat16).float()
    ours = zoff.OffloadAdamW(model.parameters(), lr=LR)
    theirs = torch.optim.AdamW(reference.parameters(), lr=LR, foreach=False, fused=False)
    for step in range(5):
        sums: list[Tensor] = [torch.zeros(p.shape) for p in model.parameters()]
        for micro in range(3):
            x = torch.randn(4, 7, generator=torch.Generator().manual_seed(100 * step + micro)).bfloat16()
            made = torch.autograd.grad(model(x).float().square().mean(), list(model.parameters()))
            sums = [
                total + gradient.float() if micro else gradient.float()
                for total, gradient in zip(sums, made, strict=True)
            ]
            model(x).float().square().mean().backward()
        for parameter, total in zip(reference.parameters(), sums, strict=True):
            parameter.grad = total
        assert all(torch.equal(ours.grad(p), total) for p, total in zip(model.parameters(), sums, strict=True))
        ours.step()
        theirs.step()
        ours.zero_grad()
    assert_close_to([ours.master(p) for p in model.parameters()], list(reference.parameters()), LR)
    ours.close()


@pytest.mark.parametrize("max_norm", [0.1, 1e4])
def test_clipping_is_torchs(max_norm):
    model, reference = network(), network()
    ours = zoff.OffloadAdamW(model.parameters(), lr=LR, max_norm=max_norm)
    theirs = torch.optim.AdamW(reference.parameters(), lr=LR, foreach=False, fused=False)
    for step in range(10):
        x = torch.randn(4, 7, generator=torch.Generator().manual_seed(step))
        model(x).square().mean().backward()
        for a, b in zip(model.parameters(), reference.parameters(), strict=True):
            b.grad = ours.grad(a)
        norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), max_norm)
        ours.step()
        theirs.step()
        told = ours.statistics().last_grad_norm
        assert told == pytest.approx(float(norm), rel=2e-6)
        ours.zero_grad()
    assert_close_to([ours.master(p) for p in model.parameters()], list(reference.parameters()), LR)
    ours.close()


def test_huge_gradients_have_a_finite_norm_and_are_clipped():
    """1e20-sized gradients overflow an fp32 sum of squares; the norm here is in fp64."""
    model = nn.Linear(3, 2, bias=False)
    optimizer = zoff.OffloadAdamW(model.parameters(), lr=LR, max_norm=1.0)
    model.weight.grad = torch.full((2, 3), 1e20)
    exact = 6**0.5 * model.weight.grad[0, 0].item()
    optimizer.step()

    assert optimizer.statistics().last_grad_norm == pytest.approx(exact, rel=1e-12)
    assert optimizer.statistics().steps == 1
    torch.testing.assert_close(optimizer.state[model.weight]["exp_avg"], torch.full((2, 3), 0.1 / 6**0.5))
    optimizer.close()


@pytest.mark.parametrize("rule", PAIRS, ids=lambda rule: rule.__name__)
def test_an_odd_model_trained_twice_is_torchs_too(rule):
    """Tied, unused, alternating, scalar, empty and transposed parameters in two groups, gradients from autograd
    itself.
    """
    stage = Stage(policy="overlap", groups=2, rule=rule, bucket_bytes=200, gated=True)
    model, reference = stage.model(), stage.model()
    ours = stage.optimizer(model)
    groups = [
        {**{key: value for key, value in group.items() if key != "params"}, "params": [p for _, p in group["params"]]}
        for group in stage.params(reference)
    ]
    theirs = PAIRS[rule](groups, lr=1e-2, weight_decay=0.1, foreach=False, fused=False)
    train(model, ours, range(20), stage)
    for step in range(20):
        for group in theirs.param_groups:
            first = group.setdefault("first_lr", group["lr"])
            group["lr"] = first / (1 + 0.1 * step)
        odd_loss(reference, step).backward()
        theirs.step()
        theirs.zero_grad()

    for (name, a), b in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")
    ours.close()
