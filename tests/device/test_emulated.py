"""The emulated accelerator: modelled times, and every fault shown by what it does."""

from __future__ import annotations

import queue
import threading
import time
import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tests.device.contract import PATIENCE_S, slot
from zoff_async.device import DeviceMemory, EmulatedDevice, Faults
from zoff_async.errors import ClosedError, DeviceError, PinnedMemoryWarning

MB = 1_000_000


class Rig:
    """An emulated device whose completions are kept, in the order in which they were told."""

    def __init__(self, device: EmulatedDevice) -> None:
        self.device = device
        self.told: queue.Queue[tuple[str, BaseException | None, float, float]] = queue.Queue()

    def down(self, source: Tensor, view: Tensor, label: str = "d2h") -> None:
        self.device.copy_to_host([source], [view], view.view(-1), self.device.mark(), self._done(label))

    def up(self, view: Tensor, target: Tensor, label: str = "h2d") -> None:
        self.device.copy_to_device(view.view(-1), [view], [target], self.device.mark(), self._done(label))

    def next(self) -> tuple[str, BaseException | None, float, float]:
        return self.told.get(timeout=PATIENCE_S)

    def _done(self, label: str) -> object:
        return lambda error, start_s, end_s: self.told.put((label, error, start_s, end_s))


@pytest.fixture
def make() -> Iterator[object]:
    made: list[EmulatedDevice] = []

    def make(faults: Faults = Faults(), name: str = "emulated:v100-32g-dgx2") -> Rig:  # noqa: B008
        made.append(EmulatedDevice.from_name(name, faults=faults))
        return Rig(made[-1])

    yield make
    for device in made:
        device.close()


SLOW = "emulated:v100-32g-dgx2:d2h_GBps=0.1:h2d_GBps=0.05:latency_us=1000"


def test_a_copy_takes_latency_and_bytes_over_bandwidth(make) -> None:
    """1 MB at 0.1 GB/s and 1 ms: 11 ms down; at 0.05 GB/s: 21 ms up; told no earlier."""
    rig = make(name=SLOW)
    flat, views = slot(rig.device, ((250_000,),), torch.float32)
    rig.down(torch.ones(250_000), views[0])
    _, error, start_s, end_s = rig.next()
    assert error is None
    assert end_s - start_s == pytest.approx(11e-3)
    assert time.perf_counter() >= end_s
    rig.up(views[0], torch.zeros(250_000))
    _, _, start_s, end_s = rig.next()
    assert end_s - start_s == pytest.approx(21e-3)
    assert rig.device.kind == "emulated"
    assert bool((flat == 1).all())


def test_copies_of_a_lane_queue_without_gaps_and_lanes_run_side_by_side(make) -> None:
    """On a lane's own timeline a queued copy starts when the one before ends, however late its thread is."""
    rig = make(name=SLOW)
    _, views = slot(rig.device, ((25_000,),) * 4, torch.float32)
    rig.device.hold("d2h")
    for view in views[:3]:
        rig.down(torch.ones(25_000), view)
    rig.up(views[3], torch.zeros(25_000))
    rig.device.let("d2h")
    told = [rig.next() for _ in range(4)]
    d2h = [(start_s, end_s) for label, _, start_s, end_s in told if label == "d2h"]
    assert d2h[1][0] == d2h[0][1]
    assert d2h[2][0] == d2h[1][1]
    (h2d_start_s,) = [start_s for label, _, start_s, _ in told if label == "h2d"]
    assert h2d_start_s < d2h[1][0]


def test_modelled_compute_takes_its_time_and_no_core() -> None:
    """100 spans of 1 ms last 100 ms together (oversleeping is taken off the next one), mostly asleep."""
    device = EmulatedDevice()
    cpu_s, start_s = time.thread_time(), time.perf_counter()
    for _ in range(100):
        with device.compute(1e-3):
            pass
    wall_s, cpu_s = time.perf_counter() - start_s, time.thread_time() - cpu_s
    assert wall_s >= 0.099
    assert cpu_s < 0.5 * wall_s
    assert device.statistics().compute_s == pytest.approx(0.1)
    device.close()


def test_statistics_and_memory_say_what_was_done(make) -> None:
    rig = make(name=SLOW)
    flat, views = slot(rig.device, ((2500,),), torch.float32)
    rig.down(torch.ones(2500), views[0])
    rig.next()
    rig.device.release(flat)
    done = rig.device.statistics()
    assert (done.d2h_copies, done.d2h_bytes, done.h2d_copies) == (1, 10_000, 0)
    assert done.d2h_busy_s == pytest.approx(1.1e-3)
    assert (done.allocations, done.released, done.slower_than_modelled) == (1, 1, 0)
    assert rig.device.memory() == DeviceMemory(pinned_bytes=10_000, pageable_bytes=0, staging_bytes=0)


def test_held_copies_start_when_they_are_let_go(make) -> None:
    """An order without a clock: nothing moves, then one copy, then the rest."""
    rig = make()
    flat, views = slot(rig.device, ((10,),) * 3, torch.float32)
    rig.device.hold("d2h")
    for i, view in enumerate(views):
        rig.down(torch.ones(10), view, str(i))
    rig.device.let("d2h", 1)
    assert rig.next()[0] == "0"
    assert rig.told.empty()
    assert flat.tolist() == [1.0] * 10 + [0.0] * 20
    rig.device.let("d2h")
    assert [rig.next()[0] for _ in range(2)] == ["1", "2"]


def test_closing_drops_held_copies(make) -> None:
    rig = make()
    _, views = slot(rig.device, ((10,),), torch.float32)
    rig.device.hold("h2d")
    rig.up(views[0], torch.zeros(10))
    rig.device.close()
    assert isinstance(rig.next()[1], ClosedError)


def test_late_copies_arrive_at_the_end_of_a_longer_time(make) -> None:
    """Up to late_s more than modelled, the same delays for the same seed."""
    durations = []
    for _ in range(2):
        rig = make(Faults(late_s=5e-3, seed=3))
        _, views = slot(rig.device, ((10,),) * 4, torch.float32)
        for view in views:
            rig.down(torch.ones(10), view)
        durations.append([end_s - start_s for _, _, start_s, end_s in (rig.next() for _ in views)])
    assert all(took > 10e-6 for took in durations[0])
    assert max(durations[0]) > 1e-3


def test_a_reader_that_does_not_wait_finds_nan(make) -> None:
    """poison_slots: what is read before done is NaN, whatever the slot held before."""
    rig = make(Faults(poison_slots=True))
    flat, views = slot(rig.device, ((4,), (4,)), torch.float32)
    flat.fill_(8.0)
    rig.device.hold("d2h")
    rig.down(torch.ones(4), views[0])
    assert bool(views[0].isnan().all())
    assert bool((views[1] == 8).all()), "only what the copy will write may be touched"
    rig.device.let("d2h")
    rig.next()
    assert bool((views[0] == 1).all())


def test_a_forward_that_does_not_wait_finds_nan(make) -> None:
    """poison_weights: a weight is NaN from its upload's enqueuing to its arrival, without a version count."""
    rig = make(Faults(poison_weights=True))
    _, views = slot(rig.device, ((4,),), torch.bfloat16)
    weight = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    rig.device.hold("h2d")
    rig.up(views[0], weight)
    assert bool(weight.isnan().all())
    assert weight._version == 0
    rig.device.let("h2d")
    rig.next()
    assert bool((weight == 0).all())
    assert weight._version == 1


def test_a_slot_is_worthless_once_released(make) -> None:
    """scribble_freed: release and free leave NaN behind; a range that was not released stays."""
    rig = make(Faults(scribble_freed=True))
    flat, views = slot(rig.device, ((4,), (4,)), torch.float16)
    rig.device.release(views[0].view(-1))
    assert bool(views[0].isnan().all())
    assert bool((views[1] == 0).all())
    rig.device.free(flat)
    assert bool(flat.isnan().all())
    raw = rig.device.allocate(64, torch.uint8)
    rig.device.free(raw)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert bool(raw.view(dtype).isnan().all()), "a slab of bytes reads as NaN in every dtype"


def test_an_early_copy_is_told_before_its_call_returns(make) -> None:
    """Whoever files the transfer away after the call has already missed done."""
    rig = make(Faults(early=True))
    _, views = slot(rig.device, ((4,),), torch.float32)
    rig.down(torch.ones(4), views[0])
    label, error, _, _ = rig.told.get_nowait()
    assert (label, error) == ("d2h", None)
    assert bool((views[0] == 1).all())


def test_reordered_completions_come_in_another_order_and_none_is_lost(make) -> None:
    """With three copies at hand the later ones are told first; a waiter of the transfer is not held up."""
    rig = make(Faults(reordered=True))
    _, views = slot(rig.device, ((4,),) * 3, torch.float32)
    rig.device.hold("d2h")
    for i, view in enumerate(views):
        rig.down(torch.ones(4), view, str(i))
    rig.device.let("d2h")
    assert [rig.next()[0] for _ in range(3)] == ["2", "1", "0"]


def test_the_nth_copy_fails_and_moves_nothing(make) -> None:
    rig = make(Faults(fail_d2h_at=(2,), fail_h2d_at=(1,)))
    flat, views = slot(rig.device, ((4,),) * 3, torch.float32)
    for i, view in enumerate(views):
        rig.down(torch.ones(4), view, str(i))
    told = [rig.next() for _ in views]
    assert [type(error) for _, error, _, _ in told] == [type(None), DeviceError, type(None)]
    assert str(told[1][1]) == "injected failure of zoff-d2h copy 2"
    assert flat.view(3, 4)[:, 0].tolist() == [1.0, 0.0, 1.0]
    rig.up(views[0], torch.zeros(4))
    assert str(rig.next()[1]) == "injected failure of zoff-h2d copy 1"


def test_the_nth_allocation_fails(make) -> None:
    rig = make(Faults(fail_allocation_at=(2,)))
    rig.device.allocate(4, torch.float32)
    with pytest.raises(DeviceError) as caught:
        rig.device.allocate(8, torch.float32)
    assert str(caught.value) == "injected failure of allocation 2 (8 elements of torch.float32)"
    rig.device.allocate(4, torch.float32)


def test_a_limit_on_pinned_memory_warns_once_and_goes_on(make) -> None:
    rig = make(Faults(pinned_limit_bytes=20))
    rig.device.allocate(4, torch.float32)
    with pytest.warns(PinnedMemoryWarning) as caught:
        second = rig.device.allocate(4, torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rig.device.allocate(4, torch.float32)
    assert str(caught[0].message) == (
        "cannot pin 16 bytes of host memory (emulated limit of 20 bytes): using pageable memory; "
        "lower bucket_bytes or slots"
    )
    assert rig.device.memory() == DeviceMemory(pinned_bytes=16, pageable_bytes=32, staging_bytes=0)
    rig.device.free(second)
    assert rig.device.memory() == DeviceMemory(pinned_bytes=16, pageable_bytes=16, staging_bytes=0)


def test_closing_does_not_sleep_a_modelled_hour(make) -> None:
    """A copy that would take 40 000 s is cut short when the device closes."""
    rig = make(name="emulated:v100-32g-dgx2:d2h_GBps=1e-9")
    _, views = slot(rig.device, ((10_000,),), torch.float32)
    rig.down(torch.ones(10_000), views[0])
    closing = threading.Thread(target=rig.device.close)
    closing.start()
    closing.join(PATIENCE_S)
    assert not closing.is_alive()
    rig.next()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"late_s": -1.0}, "late_s must be from 0 to 60 seconds, got -1.0"),
        (
            {"late_s": 0.1, "early": True},
            "a device cannot be early and late: set early=True or late_s, not both",
        ),
    ],
)
def test_faults_that_contradict_are_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        Faults(**arguments)  # type: ignore[arg-type]
    assert str(caught.value) == message


def test_an_early_device_cannot_be_held(make) -> None:
    rig = make(Faults(early=True))
    with pytest.raises(ValueError) as caught:
        rig.device.hold("d2h")
    assert str(caught.value) == "an early lane cannot be held: its callers wait for their copies"


def test_a_latency_that_is_no_time_is_refused() -> None:
    with pytest.raises(ValueError) as caught:
        EmulatedDevice(latency_s=-1e-6)
    assert str(caught.value) == "latency_s must be a number of seconds from 0, got -1e-06"
