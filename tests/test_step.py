"""What a user's own node finds in ``step.context``, and how a step cuts a bucket into pieces."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import zoff_async as zoff


def model_of(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def train(model: nn.Module, optimizer: zoff.OffloadAdamW, steps: int, after_step) -> None:
    for number in range(steps):
        torch.manual_seed(100 + number)
        model(torch.randn(4, 5)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        after_step()


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("bucket_bytes", [1, 1 << 20])
def test_a_node_averages_the_masters_behind_each_update(bucket_bytes, gated):
    """The averages that a node makes inside the step are those of a loop over the masters after each step."""
    model = model_of()
    averages = {name: p.detach().clone() for name, p in model.named_parameters()}

    async def average(action, step):
        def job() -> None:
            for name, master in step.context.masters(action.bucket).items():
                averages[name].lerp_(master, 0.1)

        return await step.context.in_pool(job)

    def with_averages(layout):
        plan = zoff.overlap(layout)
        for bucket in range(layout.buckets):
            plan = plan.add(f"ema:{bucket}", after=f"adam:{bucket}", before=f"adam:{bucket}@+1", run=average)
        return plan

    config = zoff.OffloadConfig(bucket_bytes=bucket_bytes, chunk_numel=11, workers=2)
    named = list(model.named_parameters())
    with zoff.OffloadAdamW(
        named, lr=1e-2, policy=with_averages, model=model if gated else None, config=config
    ) as optimizer:
        train(model, optimizer, 5, lambda: None)
        optimizer.synchronize()

    plain = model_of()
    expected = {name: p.detach().clone() for name, p in plain.named_parameters()}

    def follow() -> None:
        for name, parameter in plain.named_parameters():
            expected[name].lerp_(reference.master(parameter), 0.1)

    with zoff.OffloadAdamW(plain.named_parameters(), lr=1e-2, policy="serial") as reference:
        train(plain, reference, 5, follow)

    assert averages.keys() == expected.keys()
    for name in expected:
        assert torch.equal(averages[name], expected[name]), name


def test_what_a_node_raises_reaches_the_caller_as_it_is():
    """A node is an action like any other: its error is the step's."""
    model = model_of()
    before = copy.deepcopy(model.state_dict())
    broken = RuntimeError("no disk")

    async def fails(action, step):
        raise broken

    def policy(layout):
        return zoff.overlap(layout).add("dump", after="norm", before="adam", run=fails)

    with zoff.OffloadAdamW(model.named_parameters(), policy=policy) as optimizer:
        model(torch.randn(4, 5)).sum().backward()
        with pytest.raises(RuntimeError) as caught:
            optimizer.step()
        assert caught.value is broken
        optimizer.zero_grad()
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
