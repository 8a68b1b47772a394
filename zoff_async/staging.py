"""Staging slots: host buffers with one owner at a time.

A direction has ``slots`` buffers, each as large as the largest bucket. The step plan's ``slot-reuse`` edges see to it
that a bucket never asks for a slot while all are taken, so ``acquire`` does not wait: being out of slots is an error of
the plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zoff_async.bucket import Bucket
from zoff_async.device import Device
from zoff_async.errors import ScheduleError


class Lease:
    """A slot in a bucket's hands: its flat range and one view a parameter, in the bucket's dtype."""

    def __init__(self, slot: int, flat: Tensor, views: tuple[Tensor, ...]) -> None:
        self.slot = slot
        self.flat = flat
        self.views = views


@dataclass(frozen=True)
class SlotStatistics:
    """How many slots a direction has, their bytes, and how many were taken at once at most."""

    slots: int
    slot_bytes: int
    most_taken: int


class Slots:
    """The slots of one direction. Used on the loop's thread only."""

    def __init__(self, direction: str, device: Device, buckets: Sequence[Bucket], slots: int) -> None:
        self.direction = direction
        self._device = device
        self._slot_bytes = -(-max(bucket.nbytes for bucket in buckets) // 64) * 64
        self.count = min(slots, len(buckets))
        self._slab = device.allocate(max(self._slot_bytes, 64) * self.count, torch.uint8)
        self._free = list(range(self.count))
        self._leases: dict[tuple[int, int], Lease] = {}  # (bucket, slot) -> views made once
        self._last: dict[int, int] = {}  # the slot a bucket had last: the same views, and kernels bound to them
        self._most_taken = 0

    def acquire(self, bucket: Bucket) -> Lease:
        """A free slot, the bucket's last one if possible."""
        if not self._free:
            raise ScheduleError(
                f"bucket {bucket.index} found none of the {self.count} {self.direction} staging slots free: "
                "the step plan lets more copies be under way than there are slots (rule slot-reuse)"
            )
        slot = self._last.get(bucket.index, self._free[0])
        if slot not in self._free:
            slot = self._free[0]
        self._free.remove(slot)
        self._last[bucket.index] = slot
        self._most_taken = max(self._most_taken, self.count - len(self._free))
        return self._lease(bucket, slot)

    def release(self, lease: Lease) -> None:
        """Give a slot back: what it held has been used, and may be overwritten from now on."""
        self._device.release(lease.flat)
        self._free.append(lease.slot)

    def reset(self) -> None:
        """Take every slot back, after a failure: nothing that used one is running."""
        self._free = list(range(self.count))

    def statistics(self) -> SlotStatistics:
        return SlotStatistics(self.count, self._slot_bytes, self._most_taken)

    def close(self) -> None:
        self._leases.clear()
        self._device.free(self._slab)

    def _lease(self, bucket: Bucket, slot: int) -> Lease:
        lease = self._leases.get((bucket.index, slot))
        if lease is None:
            start = slot * self._slot_bytes
            flat = self._slab[start : start + bucket.nbytes].view(bucket.dtype)
            lease = self._leases[bucket.index, slot] = Lease(slot, flat, bucket.views(flat))
        return lease
