"""Staging slots: one owner at a time, the bucket's last slot first, and an error of the plan when there is none."""

from __future__ import annotations

import pytest
import torch

from zoff_async.bucket import Bucket, Entry, pack
from zoff_async.device import EmulatedDevice, Faults
from zoff_async.errors import ScheduleError
from zoff_async.staging import Slots


def buckets(*sizes: int) -> list[Bucket]:
    made = [Entry(torch.nn.Parameter(torch.zeros(size)), f"p{i}", i, 0) for i, size in enumerate(sizes)]
    return pack(made, 1, 100)


def test_a_slot_is_as_large_as_the_largest_bucket_and_has_one_owner():
    small, large = buckets(30, 3)
    slots = Slots("D2H", EmulatedDevice(), [small, large], 2)
    first, second = slots.acquire(small), slots.acquire(large)

    assert (first.flat.numel(), second.flat.numel()) == (3, 30)
    assert first.flat.dtype is torch.float32
    assert first.flat.data_ptr() != second.flat.data_ptr()
    assert slots.statistics().slots == 2
    assert slots.statistics().slot_bytes == 128
    assert slots.statistics().most_taken == 2


def test_being_out_of_slots_is_an_error_of_the_plan():
    one, two = buckets(3, 3)
    slots = Slots("H2D", EmulatedDevice(), [one, two], 1)
    lease = slots.acquire(one)
    with pytest.raises(ScheduleError) as caught:
        slots.acquire(two)
    assert str(caught.value) == (
        "bucket 1 found none of the 1 H2D staging slots free: the step plan lets more copies be under way than "
        "there are "
        "slots (rule slot-reuse)"
    )
    slots.release(lease)
    assert slots.acquire(two).slot == lease.slot


def test_a_bucket_comes_back_to_its_slot_and_views():
    """Kernels are bound to addresses: the same slot means the same kernel."""
    one, two, three = buckets(3, 3, 3)
    slots = Slots("D2H", EmulatedDevice(), [one, two, three], 3)
    leases = [slots.acquire(bucket) for bucket in (one, two, three)]
    for lease in leases:
        slots.release(lease)

    assert [slots.acquire(bucket) for bucket in (three, one, two)] == [leases[2], leases[0], leases[1]]


def test_there_are_no_more_slots_than_buckets():
    assert Slots("D2H", EmulatedDevice(), buckets(3, 3), 8).count == 2


def test_what_is_released_may_be_overwritten():
    """The device is told: one that scribbles into freed slots shows a late reader."""
    (bucket,) = buckets(3)
    slots = Slots("D2H", EmulatedDevice(faults=Faults(scribble_freed=True)), [bucket], 1)
    lease = slots.acquire(bucket)
    lease.flat.fill_(1.0)
    slots.release(lease)

    assert lease.flat.isnan().all()


def test_after_a_failure_every_slot_is_free_again():
    one, two = buckets(3, 3)
    slots = Slots("D2H", EmulatedDevice(), [one, two], 2)
    slots.acquire(one)
    slots.acquire(two)
    slots.reset()

    assert {slots.acquire(one).slot, slots.acquire(two).slot} == {0, 1}


def test_closing_gives_the_memory_back():
    device = EmulatedDevice()
    slots = Slots("D2H", device, buckets(1000, 3), 2)
    assert device.memory().pinned_bytes == 2 * 4032
    slots.close()

    assert device.memory().pinned_bytes == 0


def test_a_bucket_without_elements_has_a_slot_too():
    (bucket,) = buckets(0)
    lease = Slots("D2H", EmulatedDevice(), [bucket], 1).acquire(bucket)

    assert lease.flat.numel() == 0
    assert [tuple(view.shape) for view in lease.views] == [(0,)]
