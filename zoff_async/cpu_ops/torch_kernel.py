"""The kernel that runs torch's own fused CPU operator; its order of operations is torch's, not the rule's.

``torch._fused_adamw_`` takes fp32 only, so low-precision gradients are widened into scratch, block by block, and the
weights narrowed while the block is still in cache.
"""

from __future__ import annotations

import threading
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from zoff_async.cpu_ops.kernel import Buffers, Kernel
from zoff_async.cpu_ops.rule import Scalars, UpdateRule

#: 64 Ki elements: four fp32 arrays and a scratch take 1.25 MB, about an L2, and the operator's own 10 us vanish.
BLOCK_NUMEL = 1 << 16


class _Block(NamedTuple):
    master: Tensor
    state: tuple[Tensor, ...]
    grad: Tensor
    out: Tensor | None
    old: tuple[Tensor, ...]  # what to copy into (master, *state) first; empty when in place


class TorchKernel(Kernel):
    """``rule.fused`` on blocks of a chunk."""

    name: ClassVar[str] = "torch"
    order: ClassVar[str] = "torch"

    def __init__(self, rule: UpdateRule) -> None:
        if rule.fused is None:
            raise ValueError(f"torch has no fused operator for {rule.name}: choose kernel 'numexpr' or 'numba'")
        super().__init__(rule)
        self._operator = getattr(torch, rule.fused)
        self._local = threading.local()

    def _bind(self, buffers: Buffers) -> _TorchUpdate:
        return _TorchUpdate(self, buffers)

    def _scratch(self) -> tuple[Tensor, Tensor]:
        """This thread's widened gradient and step counter."""
        try:
            return self._local.scratch  # type: ignore[no-any-return]
        except AttributeError:
            self._local.scratch = (torch.empty(BLOCK_NUMEL), torch.zeros(()))
            return self._local.scratch  # type: ignore[no-any-return]


class _TorchUpdate:
    def __init__(self, kernel: TorchKernel, buffers: Buffers) -> None:
        self._kernel = kernel
        self._blocks = [
            _cut(buffers, start, min(start + BLOCK_NUMEL, buffers.master.numel()))
            for start in range(0, buffers.master.numel(), BLOCK_NUMEL)
        ]

    @torch.no_grad()
    def run(self, scalars: Scalars) -> None:
        hyper = scalars.hyper
        scratch, step = self._kernel._scratch()
        step.fill_(hyper.step)
        keywords: dict[str, Any] = {
            "lr": hyper.lr,
            "beta1": hyper.betas[0],
            "beta2": hyper.betas[1],
            "weight_decay": hyper.weight_decay,
            "eps": hyper.eps,
            "amsgrad": False,
            "maximize": False,
            "grad_scale": None,
            "found_inf": None,
        }
        factor = float(scalars.values[0])
        for block in self._blocks:
            grad = block.grad
            if factor != 1.0 or grad.dtype != torch.float32:
                grad = scratch[: grad.numel()].copy_(grad)
                if factor != 1.0:
                    grad.mul_(factor)
            for new, old in zip((block.master, *block.state), block.old, strict=False):
                new.copy_(old)
            exp_avg, exp_avg_sq = block.state
            self._kernel._operator([block.master], [grad], [exp_avg], [exp_avg_sq], [], [step], **keywords)
            if block.out is not None:
                block.out.copy_(block.master)


def _cut(buffers: Buffers, start: int, stop: int) -> _Block:
    old = () if buffers.in_place else tuple(t[start:stop] for t in (buffers.master, *buffers.state))
    return _Block(
        buffers.master_out[start:stop],
        tuple(t[start:stop] for t in buffers.state_out),
        buffers.grad[start:stop],
        None if buffers.out is None else buffers.out[start:stop],
        old,
    )
