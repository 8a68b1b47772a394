"""torch's fused operator as a kernel: its own order, the same contract."""

from __future__ import annotations

import pytest
import torch

from tests.cpu_ops.reference import HYPER
from tests.cpu_ops.test_rule import MOMENTUM
from zoff_async.cpu_ops import ADAM, ADAMW, make_kernel
from zoff_async.cpu_ops.torch_kernel import BLOCK_NUMEL

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("rule", [ADAMW, ADAM], ids=lambda rule: rule.name)
@pytest.mark.parametrize("grad", DTYPES)
@pytest.mark.parametrize("out", [None, *DTYPES])
@pytest.mark.parametrize("numel", [1, BLOCK_NUMEL + 1])
def test_an_update_is_the_fused_optimizers(rule, grad, out, numel):
    """Bit for bit, whatever the blocks: torch's operator is element by element too."""
    start, gradient = torch.randn(numel), torch.randn(numel).to(grad)
    parameter = torch.nn.Parameter(start.clone())
    hyper = {key: value for key, value in HYPER.items() if key != "step"}
    optimizer = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam}[rule.name]([parameter], fused=True, **hyper)
    master, state = start.clone(), (torch.zeros(numel), torch.zeros(numel))
    weights = None if out is None else torch.empty(numel, dtype=out)
    update = make_kernel("torch", rule).bind(master, state, gradient, weights)
    for step in (1, 2):
        parameter.grad = gradient.float() * 0.5
        optimizer.step()
        update.run(rule.scalars(**{**HYPER, "step": step}, factor=0.5))

    # The compiled operator treats the last few of a vector apart, by a bit.
    torch.testing.assert_close(master, parameter.detach(), rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(state[0], optimizer.state[parameter]["exp_avg"], rtol=1e-6, atol=1e-9)
    if weights is not None:
        assert torch.equal(weights, master.to(out))


@pytest.mark.parametrize("numel", [1, 1000, BLOCK_NUMEL + 1])
def test_a_second_buffer_takes_the_new_state_and_the_old_stays(numel):
    kernel = make_kernel("torch", ADAMW)
    master, state = torch.randn(numel), (torch.randn(numel), torch.rand(numel))
    grad = torch.randn(numel).bfloat16()
    before = [t.clone() for t in (master, *state)]
    second = [torch.empty(numel) for _ in before]
    scalars = ADAMW.scalars(**HYPER)
    kernel.bind(master, state, grad, None, master_out=second[0], state_out=second[1:]).run(scalars)
    assert all(torch.equal(now, then) for now, then in zip((master, *state), before, strict=True))
    kernel.bind(master, state, grad, None).run(scalars)

    assert all(torch.equal(new, now) for new, now in zip(second, (master, *state), strict=True))


def test_its_order_is_its_own():
    assert make_kernel("torch", ADAMW).order == "torch"
    assert make_kernel("numexpr", ADAMW).order == make_kernel("numba", ADAMW).order == "rule"


def test_a_rule_without_a_fused_operator_is_refused():
    with pytest.raises(ValueError) as caught:
        make_kernel("torch", MOMENTUM)

    assert str(caught.value) == "torch has no fused operator for momentum: choose kernel 'numexpr' or 'numba'"
