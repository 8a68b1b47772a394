"""What an emulated device may do wrong, or merely differently, on purpose.

Everything here that is not named a failure is within a device's rights: a correct runtime gives the same
bits under all of it. Whoever reads a slot too early, writes one too soon or trusts the order of two lanes
gets NaN or stale values.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Faults:
    """How an emulated device behaves. The default is a device that does nothing unusual.

    Args:
        late_s: Every copy takes up to this much longer than modelled (a share drawn from ``seed``), and its
            bytes arrive at the very end of that time.
        early: Copies take no modelled time, and ``done`` is told before the call that enqueued the copy
            returns.
        reordered: Completions of one lane are told in another order than the copies ran, wherever two are
            at hand.
        poison_slots: A D2H's views hold NaN from the moment it is enqueued until its bytes arrive.
        poison_weights: An H2D's targets hold NaN from the moment compute has reached its marker until its
            bytes arrive.
        scribble_freed: ``release`` and ``free`` fill the range with NaN.
        fail_d2h_at: Numbers of the D2H copies (the first is 1) that fail with DeviceError and move nothing.
        fail_h2d_at: The same for H2D copies.
        fail_allocation_at: Numbers of the ``allocate`` calls (the first is 1) that raise DeviceError.
        pinned_limit_bytes: Allocations beyond this many pinned bytes are pageable, with the usual warning.
        seed: For ``late_s`` and ``reordered``.
    """

    late_s: float = 0.0
    early: bool = False
    reordered: bool = False
    poison_slots: bool = False
    poison_weights: bool = False
    scribble_freed: bool = False
    fail_d2h_at: tuple[int, ...] = ()
    fail_h2d_at: tuple[int, ...] = ()
    fail_allocation_at: tuple[int, ...] = ()
    pinned_limit_bytes: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.late_s < 60:
            raise ValueError(f"late_s must be from 0 to 60 seconds, got {self.late_s!r}")
        if self.early and self.late_s:
            raise ValueError("a device cannot be early and late: set early=True or late_s, not both")

    @property
    def bytes_arrive_last(self) -> bool:
        """Bytes move at the end of a copy's time, so that a premature reader or writer is caught."""
        return self.late_s > 0 or self.poison_slots or self.poison_weights


NO_FAULTS = Faults()

#: Every harmless fault at once, on a device whose copies arrive late: what a race test runs under.
HOSTILE_LATE = Faults(late_s=2e-3, reordered=True, poison_slots=True, poison_weights=True, scribble_freed=True)
#: The same on a device whose copies are over before anybody looks.
HOSTILE_EARLY = Faults(early=True, poison_slots=True, poison_weights=True, scribble_freed=True)


def poison(tensors: list[Tensor]) -> None:
    """Fill tensors with NaN, or with bytes that read as NaN; autograd's version counters do not see it."""
    for tensor in tensors:
        tensor.data.fill_(torch.nan if tensor.is_floating_point() else -1 if tensor.dtype.is_signed else 255)
