"""A kernel is a way to run an update rule on the host; this is the interface every kernel has.

``Kernel.bind`` takes one chunk's buffers once and checks them; ``BoundUpdate.run`` is called every step, in any
thread of the pool, and does nothing but arithmetic: views, scratch and compiled objects exist already.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from zoff_async.cpu_ops.rule import Scalars, UpdateRule

#: dtypes a gradient may arrive in and weights may leave in; the arithmetic is fp32 whichever it is.
TRANSFER_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Buffers(NamedTuple):
    """One chunk: flat, contiguous, host tensors of one length n. In place where the outs are the ins."""

    master: Tensor  # (n,) fp32
    state: tuple[Tensor, ...]  # each (n,) fp32, in the rule's order
    grad: Tensor  # (n,) fp32, bf16 or fp16, read only
    out: Tensor | None  # (n,) fp32, bf16 or fp16: the new weights, or nothing
    master_out: Tensor  # (n,) fp32; `master` itself unless a second buffer was given
    state_out: tuple[Tensor, ...]  # each (n,) fp32; `state` itself unless second buffers were given

    @property
    def in_place(self) -> bool:
        """Whether the new state replaces the old one."""
        return self.master_out is self.master


class BoundUpdate(Protocol):
    """One chunk's update, ready to run."""

    def run(self, scalars: Scalars) -> None:
        """Update the chunk. Releases the GIL; not to be called twice at once for one chunk."""
        ...


class Kernel(ABC):
    """One way to run ``rule``. Kernels with the same ``order`` give the same bits."""

    name: ClassVar[str]
    order: ClassVar[str]

    def __init__(self, rule: UpdateRule) -> None:
        self.rule = rule

    def bind(
        self,
        master: Tensor,
        state: Sequence[Tensor],
        grad: Tensor,
        out: Tensor | None,
        *,
        master_out: Tensor | None = None,
        state_out: Sequence[Tensor] | None = None,
    ) -> BoundUpdate:
        """Check one chunk's buffers and make everything its update will need.

        Args:
            master: (n,) fp32, n >= 1, contiguous, on the CPU; updated in place unless ``master_out`` is given.
            state: one (n,) fp32 tensor for each of ``rule.state_names``; likewise ``state_out``.
            grad: (n,) fp32, bf16 or fp16; never written.
            out: (n,) fp32, bf16 or fp16, overwritten with ``master.to(out.dtype)`` of the new master; or None.
            master_out: (n,) fp32 second buffer for the new master; the old one is then left as it is.
            state_out: second buffers for the new state; given exactly when ``master_out`` is.

        The buffers must not overlap one another. They are referenced, not copied: writing to them between runs is
        what they are for.

        Raises:
            ValueError: if lengths differ (all are named), a buffer is not flat, contiguous and on the CPU, or the
                number of states is not the rule's.
            TypeError: if a dtype is not one of the above.
        """
        state = tuple(state)
        if (master_out is None) != (state_out is None):
            raise ValueError("master_out and state_out go together: give both second buffers or neither")
        names = self.rule.state_names
        second = state if state_out is None else tuple(state_out)
        if not len(state) == len(second) == len(names):
            raise ValueError(
                f"{self.rule.name} has {len(names)} states {names}, got {len(state)} in state and {len(second)} in "
                "state_out"
            )
        buffers = Buffers(master, state, grad, out, master if master_out is None else master_out, second)
        _check(buffers, names)
        return self._bind(buffers)

    @abstractmethod
    def _bind(self, buffers: Buffers) -> BoundUpdate: ...


def _check(buffers: Buffers, names: Sequence[str]) -> None:
    exact = {"master": buffers.master, **dict(zip(names, buffers.state, strict=True))}
    if not buffers.in_place:
        exact["master_out"] = buffers.master_out
        exact.update((f"{name}_out", t) for name, t in zip(names, buffers.state_out, strict=True))
    loose = {"grad": buffers.grad} if buffers.out is None else {"grad": buffers.grad, "out": buffers.out}
    for name, tensor in exact.items():
        if tensor.dtype != torch.float32:
            raise TypeError(f"{name} must be torch.float32, got {tensor.dtype}")
    for name, tensor in loose.items():
        if tensor.dtype not in TRANSFER_DTYPES:
            allowed = ", ".join(str(d) for d in TRANSFER_DTYPES)
            raise TypeError(f"{name} must be one of {allowed}, got {tensor.dtype}")
    everything = {**exact, **loose}
    for name, tensor in everything.items():
        if tensor.dim() != 1 or not tensor.is_contiguous() or tensor.device.type != "cpu":
            raise ValueError(
                f"{name} must be a flat contiguous tensor on the cpu, got shape {tuple(tensor.shape)}, "
                f"stride {tensor.stride()}, device {tensor.device}; pass a view of a flat buffer"
            )
    if len({t.numel() for t in everything.values()}) != 1 or not buffers.master.numel():
        lengths = ", ".join(f"{name}={t.numel()}" for name, t in everything.items())
        raise ValueError(f"tensors must have one length of at least 1, got {lengths}")
