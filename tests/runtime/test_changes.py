"""Changes in the middle of a run, and backwards of every kind: the same bits under every policy, or a loud refusal."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zoff_async as zoff
from tests.runtime.scenes import (
    EARLY,
    LATE,
    PATIENCE_S,
    Beside,
    Noted,
    Outcome,
    Stage,
    assert_same_bits,
    at_stage,
    closing,
    train,
    within,
)

POLICIES = ("overlap", "in_backward", "delayed")
FAULTS = {"late": LATE, "early": EARLY}


def outcomes_of(policy: str, faults: Any, run: Any, **changes: Any) -> tuple[Outcome, Outcome]:
    """What ``run(stage)`` leaves under a policy on a hostile device, and under its oracle on a plain one."""
    plain = "delayed" if policy == "delayed" else "serial"
    stages = (
        Stage(policy=policy, faults=faults, gated=True, bucket_bytes=150, chunk_numel=9, **changes),
        Stage(policy=plain, **changes),
    )
    got, wanted = (within(3 * PATIENCE_S, lambda stage=stage: run(stage)) for stage in stages)
    return got, wanted


@pytest.mark.parametrize("faults", FAULTS)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_model_that_is_cast_in_the_middle(policy, faults):
    """fp32 to bf16 and back: masters keep their digits, buckets are packed anew.

    A delayed update is applied before the weights are touched, as its refusal says.
    """

    def run(stage: Stage) -> Outcome:
        model = stage.model()
        optimizer = stage.optimizer(model)
        with closing(optimizer):
            train(model, optimizer, range(2), stage)
            optimizer.synchronize()
            model.bfloat16()
            train(model, optimizer, range(2, 4), stage)
            optimizer.synchronize()
            assert all(optimizer.master(p).to(p.dtype).equal(p) for p in model.parameters() if p.requires_grad)
            model.float()
            train(model, optimizer, range(4, 6), stage)
            optimizer.synchronize()
            return Outcome.of(model, optimizer)

    assert_same_bits(*outcomes_of(policy, FAULTS[faults], run))


@pytest.mark.parametrize("faults", FAULTS)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_group_that_is_added_in_the_middle(policy, faults):
    def run(stage: Stage) -> Outcome:
        model = stage.model()
        optimizer = stage.optimizer(model)
        with closing(optimizer):
            train(model, optimizer, range(2), stage)
            model.frozen.requires_grad_(True)
            model.extra = nn.Linear(5, 5)
            torch.manual_seed(1)
            nn.init.normal_(model.extra.weight)
            optimizer.add_param_group({"params": list(model.extra.named_parameters("extra")), "lr": 0.5})
            for step in range(3):
                loss = model.extra(model(torch.tensor([[1, 2]]), step)[..., :5]).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            optimizer.synchronize()
            return Outcome.of(model, optimizer)

    got, wanted = outcomes_of(policy, FAULTS[faults], run)
    assert wanted.counts["extra.weight"] == wanted.counts["frozen.weight"] == 3
    assert_same_bits(got, wanted)


def steps_of(make_loss: Any, build: Any, policy: str, faults: Any, **config: Any) -> Outcome:
    """Four steps of a small model of its own."""
    torch.manual_seed(9)
    model = build()
    device = "auto" if faults is None else Noted(faults=faults)
    optimizer = zoff.OffloadAdamW(
        model.named_parameters(),
        lr=0.05,
        policy=policy,
        model=model,
        config=zoff.OffloadConfig(bucket_bytes=1, chunk_numel=5, device=device, event_loop="asyncio", **config),
    )
    with closing(optimizer):
        for step in range(4):
            within(PATIENCE_S, lambda step=step: make_loss(model, step).backward())
            within(PATIENCE_S, optimizer.step)
            optimizer.zero_grad()
        optimizer.synchronize()
        return Outcome.of(model, optimizer)


def layers() -> nn.ModuleList:
    return nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])


def checkpointed(model: nn.ModuleList, step: int, *, reentrant: bool, order: tuple[int, ...]) -> Tensor:
    x = torch.full((2, 4), 0.3 + step, requires_grad=True)
    for i in order:
        x = checkpoint(lambda y, i=i: torch.tanh(model[i](y)), x, use_reentrant=reentrant)
    return x.square().sum()


@pytest.mark.parametrize("faults", FAULTS)
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("policy", ["overlap", "in_backward"])
def test_what_is_recomputed_in_backward_is_what_the_forward_computed(policy, reentrant, faults):
    """Uploads that overtake the backward do not reach weights that a checkpoint has still to read."""

    def loss(model: nn.ModuleList, step: int) -> Tensor:
        return checkpointed(model, step, reentrant=reentrant, order=(0, 1, 2))

    got = steps_of(loss, layers, policy, FAULTS[faults])
    assert_same_bits(got, steps_of(loss, layers, "serial", None))


@pytest.mark.parametrize("faults", FAULTS)
def test_a_module_that_is_checkpointed_reentrantly_and_used_twice(faults):
    """It fires twice in one backward: summed under overlap, and torch's own sum."""

    def loss(model: nn.ModuleList, step: int) -> Tensor:
        return checkpointed(model, step, reentrant=True, order=(0, 1, 0))

    def plain(model: nn.ModuleList, step: int) -> Tensor:
        x = torch.full((2, 4), 0.3 + step)
        for i in (0, 1, 0):
            x = torch.tanh(model[i](x))
        return x.square().sum()

    got = steps_of(loss, layers, "overlap", FAULTS[faults])
    assert_same_bits(got, steps_of(loss, layers, "serial", None))
    wanted = steps_of(plain, layers, "serial", None)
    for name, weights in got.weights.items():
        torch.testing.assert_close(weights, wanted.weights[name], rtol=1e-4, atol=1e-5)


def test_such_a_module_is_refused_where_adam_runs_inside_backward():
    def loss(model: nn.ModuleList, step: int) -> Tensor:
        return checkpointed(model, step, reentrant=True, order=(0, 1, 0))

    with pytest.raises(zoff.GradientError) as caught:
        steps_of(loss, layers, "in_backward", None)
    assert "got a gradient in backward number 2 of the step, and Adam runs inside number 1" in str(caught.value)


class Sideways(nn.Module):
    """A weight whose value another gradient needs after its own gradient is complete."""

    def __init__(self) -> None:
        super().__init__()
        self.early, self.weight = nn.Linear(4, 4), nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.early(x) @ self.weight.detach())
        return torch.tanh(hidden) @ self.weight


@pytest.mark.parametrize("faults", FAULTS)
def test_a_weight_that_is_needed_after_its_gradient_is_right_or_refused(faults):
    """Adam inside backward replaces weights early: autograd's version counter turns a wrong gradient into an error."""

    def loss(model: nn.Module, step: int) -> Tensor:
        return model(torch.full((2, 4), 0.2 + step)).square().sum()

    wanted = steps_of(loss, Sideways, "serial", None)
    try:
        got = steps_of(loss, Sideways, "in_backward", FAULTS[faults])
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error) or isinstance(error, zoff.ZoffError)  # noqa: PT017
    else:
        assert_same_bits(got, wanted)


@pytest.mark.parametrize("gated", [False, True])
def test_closing_while_a_step_waits_in_another_thread(gated):
    """Both return: step() with the update done or with ClosedError."""
    device = Noted()
    stage = at_stage(Stage(), policy="overlap", bucket_bytes=300, gated=gated)
    model = stage.model()
    optimizer = stage.optimizer(model, device=device)
    train(model, optimizer, range(1), stage)
    device.hold("h2d")
    working = Beside(lambda: train(model, optimizer, range(1, 3), stage))
    assert not working.over.wait(0.2)
    ending = Beside(optimizer.close)
    ending.over.wait(0.2)
    device.let("h2d")
    ending.result(5.0)
    with contextlib.suppress(zoff.ClosedError):
        working.result(5.0)
