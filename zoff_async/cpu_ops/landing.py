"""What happens to a gradient that has reached the host: stored or added in fp32, and its squares summed, in one pass.

Squares are exact in fp64 (a 24-bit significand squared has 48 bits) and summed in an order that only the position in
the parameter decides, the same for both implementations here, so a norm does not depend on kernel, workers or buckets:

- a parameter is cut into blocks of 65,536 elements;
- within a block, element i is added to lane ``i % 256``, in order of i;
- lanes are halved: lane j takes lane ``j + 128``, then ``j + 64``, ..., until one is left;
- the blocks' sums are added in order.

fp32 data that is finite never overflows fp64 here; an inf or NaN anywhere makes the sum inf or NaN, which is the
finite check.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from zoff_async.cpu_ops.kernel import TRANSFER_DTYPES

#: Elements of a block, and lanes within it. A parameter's sum is its blocks' sums added in order, so a caller may
#: land the blocks of one parameter as if they were parameters.
BLOCK_NUMEL = 65_536
LANES = 256

Offsets = np.ndarray[Any, np.dtype[np.int64]]
Sums = np.ndarray[Any, np.dtype[np.float64]]


class Landing(ABC):
    """Lands gradients; the subclasses differ in speed only."""

    def land(self, source: Tensor, target: Tensor | None, bounds: Offsets, squares: Sums, *, add: bool) -> None:
        """Bring k consecutive parameters' gradients from ``source`` to ``target`` and sum their squares.

        Args:
            source: (n,) fp32, bf16 or fp16, flat, on the CPU.
            target: (n,) of source's dtype (copied) or fp32 (widened, or added to with ``add``); None only sums.
            bounds: (k+1,) int64 ascending offsets: parameter i is ``source[bounds[i]:bounds[i+1]]``. What lies
                outside ``bounds[0]:bounds[-1]`` is neither read nor written.
            squares: (k,) fp64, overwritten with the sum of squares of what each parameter's part of ``target`` holds
                afterwards (of ``source`` without a target). Finite exactly when all of those are.
            add: ``target += source`` in fp32 rather than ``target = source``.

        Raises:
            ValueError: if lengths or bounds do not fit together.
            TypeError: if the dtypes are not as above.
        """
        _check(source, target, bounds, squares, add)
        if squares.size:
            self._land(source.detach(), None if target is None else target.detach(), bounds, squares, add)

    def squares(self, source: Tensor, bounds: Offsets, out: Sums) -> None:
        """Sum of squares of each parameter in ``source``: ``land`` without a target."""
        self.land(source, None, bounds, out, add=False)

    def prepare(self, source: torch.dtype, target: torch.dtype | None, *, add: bool) -> None:
        """Compile what such a call will need, so that no step waits for it."""
        one = np.array([0, 1], dtype=np.int64)
        into = None if target is None else torch.zeros(1, dtype=target)
        self.land(torch.zeros(1, dtype=source), into, one, np.empty(1), add=add)

    @abstractmethod
    def _land(self, source: Tensor, target: Tensor | None, bounds: Offsets, squares: Sums, add: bool) -> None: ...


def _check(source: Tensor, target: Tensor | None, bounds: Offsets, squares: Sums, add: bool) -> None:
    if source.dtype not in TRANSFER_DTYPES:
        raise TypeError(f"source must be one of {', '.join(map(str, TRANSFER_DTYPES))}, got {source.dtype}")
    if target is None and add:
        raise ValueError("add=True needs a target to add to")
    if target is not None:
        allowed = (torch.float32,) if add else (torch.float32, source.dtype)
        if target.dtype not in allowed:
            raise TypeError(
                f"target must be {' or '.join(map(str, allowed))} for a source of {source.dtype} with add={add}, "
                f"got {target.dtype}"
            )
        if target.numel() != source.numel():
            raise ValueError(f"source and target must have one length, got {source.numel()} and {target.numel()}")
    for name, tensor in (("source", source), ("target", target)):
        if tensor is not None and (tensor.dim() != 1 or not tensor.is_contiguous() or tensor.device.type != "cpu"):
            raise ValueError(f"{name} must be a flat contiguous tensor on the cpu, got shape {tuple(tensor.shape)}")
    if bounds.dtype != np.int64 or squares.dtype != np.float64:
        raise TypeError(f"bounds must be int64 and squares float64, got {bounds.dtype} and {squares.dtype}")
    if len(bounds) != len(squares) + 1:
        raise ValueError(f"bounds must have one more entry than squares, got {len(bounds)} and {len(squares)}")
    if bounds[0] < 0 or bounds[-1] > source.numel() or (np.diff(bounds) < 0).any():
        raise ValueError(f"bounds must ascend within 0..{source.numel()}, got {bounds.tolist()}")
