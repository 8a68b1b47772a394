"""The reference is torch's AdamW, on fp32 masters where the model is not fp32."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.optim import AdamW

from zoff_async.train.reference import ReferenceAdamW

BETAS = (0.9, 0.95)


def reference_for(model: nn.Module, max_norm: float | None = None) -> ReferenceAdamW:
    groups = [{"params": list(model.named_parameters()), "weight_decay": 0.1}]
    return ReferenceAdamW(groups, lr=1e-2, betas=BETAS, max_norm=max_norm)


def train(model: nn.Module, after_backward, step, *, parts: int = 1) -> None:
    generator = torch.Generator().manual_seed(1)
    dtype = model.weight.dtype
    for _ in range(5):
        for _ in range(parts):
            x = torch.randn(4, 6, generator=generator).to(dtype)
            model(x).square().sum().backward()
            after_backward()
        step()


def test_for_an_fp32_model_it_is_plain_adamw():
    ours = nn.Linear(6, 3)
    theirs = copy.deepcopy(ours)
    reference = reference_for(ours, max_norm=1.0)
    adamw = AdamW(theirs.parameters(), lr=1e-2, betas=BETAS, weight_decay=0.1, foreach=False)

    def their_step() -> None:
        nn.utils.clip_grad_norm_(theirs.parameters(), 1.0, foreach=False)
        adamw.step()
        adamw.zero_grad()

    train(ours, reference.after_backward, reference.step, parts=3)
    train(theirs, lambda: None, their_step, parts=3)

    assert torch.equal(ours.weight, theirs.weight)
    assert torch.equal(ours.bias, theirs.bias)


def test_a_bf16_model_is_its_fp32_masters_rounded():
    model = nn.Linear(6, 3).bfloat16()
    reference = reference_for(model)
    train(model, reference.after_backward, reference.step)

    masters = [p for group in reference.optimizer.param_groups for p in group["params"]]
    assert [m.dtype for m in masters] == [torch.float32] * 2
    assert torch.equal(model.weight, masters[0].bfloat16())
    assert not torch.equal(model.weight.float(), masters[0])


def test_small_bf16_gradients_add_up_in_fp32():
    """256 and 1 are both bf16 numbers; their sum, 257, is not."""
    model = nn.Linear(1, 1, bias=False).bfloat16()
    reference = reference_for(model)
    for gradient in (256.0, 1.0):
        model.weight.grad = torch.full_like(model.weight, gradient)
        reference.after_backward()

    assert reference.optimizer.param_groups[0]["params"][0].grad.item() == 257.0
    assert model.weight.grad is None
