"""The reference kernel: numexpr evaluates the rule's own lines, block by block, in the calling thread.

numexpr spends about the same time on every operation, so the number of operations is what there is to save; low
precision passes through scratch that stays in L2. ``numexpr_machine`` says how several threads may do this at once.
"""

from __future__ import annotations

import threading
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from zoff_async.cpu_ops.kernel import Buffers, Kernel
from zoff_async.cpu_ops.numexpr_machine import ROOT, Compiled, Machine
from zoff_async.cpu_ops.rule import GRADIENT, MASTER, Line, Scalars, UpdateRule

Array = np.ndarray[Any, np.dtype[np.float32]]


class _Block(NamedTuple):
    """Views of one block of a chunk, made once."""

    arrays: dict[str, Array]  # name in the program -> what its lines read before anything is assigned
    targets: dict[str, Array]  # name -> where its line writes (the gradient's is scratch)
    numel: int
    narrow_grad: Tensor | None  # bf16 or fp16, to be widened first
    master: Tensor
    out: Tensor | None


class _Plan(NamedTuple):
    """What one thread does for each block with one set of scalars."""

    scalars: Scalars
    numbers: dict[str, Any]  # name -> 0-d fp32 array
    steps: list[tuple[str, Compiled]]  # (target, its expression), in order


class _Scratch(NamedTuple):
    """One thread's own arrays of a block's length."""

    grad: Array
    grad_tensor: Tensor  # the same memory
    root: Array


class _Local(threading.local):
    """One thread's own: its plan, and its scratch cut to each length (0: whole)."""

    def __init__(self) -> None:
        self.plan: _Plan | None = None
        self.scratch: dict[int, _Scratch] = {}


class NumexprKernel(Kernel):
    """``rule.programs`` in numexpr."""

    name: ClassVar[str] = "numexpr"
    order: ClassVar[str] = "rule"

    def __init__(self, rule: UpdateRule) -> None:
        super().__init__(rule)
        self.machine = Machine()
        self._local = _Local()

    def _bind(self, buffers: Buffers) -> _NumexprUpdate:
        return _NumexprUpdate(self, buffers)

    def plan(self, scalars: Scalars) -> _Plan:
        """This thread's plan for ``scalars``; the chunks of a step share one."""
        plan = self._local.plan
        if plan is None or plan.scalars is not scalars:
            program = self.rule.programs[scalars.program]
            numbers = dict(zip(program.scalars, scalars.values, strict=True))
            texts = [(line, _shortest(line, numbers)) for line in program.lines]
            steps = [(x.target, self.machine.compiled(text, double=x.double)) for x, text in texts if text]
            plan = _Plan(scalars, {name: np.asarray(value) for name, value in numbers.items()}, steps)
            self._local.plan = plan
        return plan

    def scratch(self, numel: int) -> _Scratch:
        """The first ``numel`` elements of this thread's scratch."""
        cuts = self._local.scratch
        found = cuts.get(numel)
        if found is None:
            tensor = cuts[0].grad_tensor if cuts else torch.empty(self.machine.block_numel)
            root = cuts[0].root if cuts else np.empty(self.machine.block_numel, np.float32)
            if len(cuts) > 64:  # chunks have few lengths; what is dropped is made again
                cuts.clear()
            for size in (0, numel):
                part = tensor[: size or None]
                cuts[size] = _Scratch(part.numpy(), part, root[: size or None])
            found = cuts[numel]
        return found


class _NumexprUpdate:
    def __init__(self, kernel: NumexprKernel, buffers: Buffers) -> None:
        self._kernel = kernel
        numel, block_numel = buffers.master.numel(), kernel.machine.block_numel
        self._blocks = [
            _cut(buffers, tuple(kernel.rule.states), start, min(start + block_numel, numel))
            for start in range(0, numel, block_numel)
        ]

    def run(self, scalars: Scalars) -> None:
        plan = self._kernel.plan(scalars)
        for block in self._blocks:
            _run_block(block, plan, self._kernel.scratch(block.numel))


def _run_block(block: _Block, plan: _Plan, scratch: _Scratch) -> None:
    values = {**plan.numbers, **block.arrays}
    if block.narrow_grad is not None:
        scratch.grad_tensor.copy_(block.narrow_grad)
        values[GRADIENT] = scratch.grad
    for target, (run, names, root_of) in plan.steps:
        if root_of is not None:
            values[ROOT] = np.sqrt(values[root_of], out=scratch.root)
        out = scratch.grad if target == GRADIENT else block.targets[target]
        run(*[values[name] for name in names], out=out, ex_uses_vml=False)
        values[target] = out
    if block.out is not None:
        block.out.copy_(block.master)


def _shortest(line: Line, numbers: dict[str, np.float32]) -> str | None:
    """The fewest operations that give the line's bits this step; None where there is nothing to do."""
    return line.shorter if line.unit is not None and numbers[line.unit] == 1 else line.expression


def _cut(buffers: Buffers, states: tuple[str, ...], start: int, stop: int) -> _Block:
    def arrays(master: Tensor, state: tuple[Tensor, ...]) -> dict[str, Array]:
        tensors = zip((MASTER, *states), (master, *state), strict=True)
        return {name: tensor.detach()[start:stop].numpy() for name, tensor in tensors}

    read = arrays(buffers.master, buffers.state)
    written = read if buffers.in_place else arrays(buffers.master_out, buffers.state_out)
    grad = buffers.grad.detach()[start:stop]
    if grad.dtype == torch.float32:
        read = {**read, GRADIENT: grad.numpy()}
    return _Block(
        read,
        written,
        stop - start,
        None if grad.dtype == torch.float32 else grad,
        buffers.master_out.detach()[start:stop],
        None if buffers.out is None else buffers.out.detach()[start:stop],
    )
