"""What the CUDA device gives to which stream, what waits for what, what is alive meanwhile: on the fake."""

from __future__ import annotations

import queue
import threading
import warnings
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tests.device.contract import PATIENCE_S, slot
from tests.device.fake_cuda import FakeCuda, FakeStream
from zoff_async.device import DeviceMemory
from zoff_async.device.cuda import CudaDevice
from zoff_async.errors import DeviceError, PinnedMemoryWarning

Told = queue.Queue[BaseException | None]


class Rig:
    """A device on a fake, small enough that 32 floats are a large tensor."""

    def __init__(self, **fake: object) -> None:
        self.fake = FakeCuda(**fake)  # type: ignore[arg-type]
        self.device = CudaDevice(self.fake, straight_bytes=128, staging_bytes=256)
        self.told: Told = queue.Queue()
        self.fake.log.clear()
        self.fake.waited_by.clear()

    def done(self, error: BaseException | None, start_s: float, end_s: float) -> None:
        self.told.put(error)

    def down(
        self, sources: list[Tensor], views: list[Tensor], flat: Tensor, streams: tuple[object, ...] = ()
    ) -> object:
        return self.device.copy_to_host(sources, views, flat, self.device.mark(streams), self.done)

    def wait_told(self) -> BaseException | None:
        return self.told.get(timeout=PATIENCE_S)


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.fake.gate.set()
    rig.device.close()


@pytest.fixture
def eager() -> Iterator[Rig]:
    rig = Rig(eager_lanes=True)
    yield rig
    rig.device.close()


SMALL, LARGE = (4,), (40,)


def test_small_gradients_cross_the_link_together_and_large_ones_alone(rig: Rig) -> None:
    """One gathering and one copy for three small neighbours, one copy for the large one, events around."""
    flat, views = slot(rig.device, (SMALL, SMALL, SMALL, LARGE, SMALL), torch.float32)
    rig.down([torch.ones(view.shape) for view in views], views, flat)
    assert rig.wait_told() is None

    assert rig.fake.lines("compute", "d2h") == [
        "compute: record E0",
        "d2h: wait E0",
        "d2h: record E1",
        "d2h: empty 256",
        "d2h: copy_many 3",
        "d2h: copy 48",
        "d2h: copy 160",
        "d2h: copy 16",
        "d2h: record E2",
    ]


def test_an_upload_is_one_copy_and_one_scatter(rig: Rig) -> None:
    """The same the other way round: copy into staging, scatter, both on the upload's stream."""
    flat, views = slot(rig.device, (SMALL, SMALL, LARGE), torch.float32)
    targets = [torch.zeros(view.shape) for view in views]
    rig.device.copy_to_device(flat, views, targets, rig.device.mark(), rig.done)
    assert rig.wait_told() is None

    assert rig.fake.lines("compute", "h2d") == [
        "compute: record E0",
        "h2d: wait E0",
        "h2d: record E1",
        "h2d: empty 256",
        "h2d: copy 32",
        "h2d: copy_many 2",
        "h2d: copy 160",
        "h2d: record E2",
    ]


def test_thousands_of_tiny_tensors_need_few_copies(rig: Rig) -> None:
    """2000 tensors of 64 elements: as many copies as the staging needs fillings, not one a tensor."""
    device = CudaDevice(FakeCuda())
    fake = device._surface
    flat, views = slot(device, ((64,),) * 2000, torch.float32)
    device.copy_to_host([torch.ones(64)] * 2000, views, flat, device.mark(), rig.done)
    assert rig.wait_told() is None
    assert isinstance(fake, FakeCuda)
    assert [line for line in fake.log if "copy" in line] == ["d2h: copy_many 2000", "d2h: copy 512000"]
    device.close()


def test_a_run_longer_than_the_staging_goes_in_several_copies(rig: Rig) -> None:
    """256 bytes of staging hold sixteen tensors of four floats."""
    flat, views = slot(rig.device, (SMALL,) * 20, torch.float32)
    rig.down([torch.full(SMALL, float(i)) for i in range(20)], views, flat)
    assert rig.wait_told() is None
    assert [line for line in rig.fake.lines("d2h") if "copy" in line] == [
        "d2h: copy_many 16",
        "d2h: copy 256",
        "d2h: copy_many 4",
        "d2h: copy 64",
    ]
    assert flat.view(20, 4)[:, 0].tolist() == list(range(20))


def test_a_gap_between_views_ends_a_run(rig: Rig) -> None:
    """What lies between two views belongs to somebody else: two copies, not one over the gap."""
    flat, views = slot(rig.device, (SMALL, SMALL), torch.float32, gap=2)
    flat.fill_(-1.0)
    rig.down([torch.ones(SMALL)] * 2, views, flat)
    assert rig.wait_told() is None
    assert [line for line in rig.fake.lines("d2h") if "copy" in line] == ["d2h: copy 16", "d2h: copy 16"]


def test_a_gradient_is_read_only_when_compute_has_made_it(eager: Rig) -> None:
    """The copy could run at once and the kernel that makes the gradient runs late: the copy still sees it."""
    flat, views = slot(eager.device, (LARGE, SMALL, SMALL), torch.float32)
    gradients = [torch.full(view.shape, torch.nan) for view in views]
    eager.fake.launch(lambda: [gradient.fill_(3.0) for gradient in gradients])
    eager.down(gradients, views, flat)
    assert eager.wait_told() is None
    assert bool((flat == 3.0).all())


def test_a_bucket_made_on_two_streams_waits_for_both(eager: Rig) -> None:
    """mark(streams) covers streams that are not current: gradients of a bucket may come from several."""
    side = FakeStream(eager.fake, "side", eager=False)
    flat, views = slot(eager.device, (SMALL, SMALL), torch.float32)
    gradients = [torch.full(SMALL, torch.nan) for _ in range(2)]
    eager.fake.launch(lambda: gradients[0].fill_(1.0))
    with eager.fake.on(side):
        eager.fake.launch(lambda: gradients[1].fill_(2.0))
        side_stream = eager.device.current_stream()
    eager.down(gradients, views, flat, (side_stream, eager.device.current_stream()))
    assert eager.wait_told() is None
    assert flat.tolist() == [1.0] * 4 + [2.0] * 4
    assert len([line for line in eager.fake.log if line.startswith("d2h: wait")]) == 2


def test_weights_are_written_only_when_compute_has_read_them(eager: Rig) -> None:
    """A kernel enqueued before the marker sees the old weights, however late it runs."""
    flat, views = slot(eager.device, (LARGE,), torch.float32)
    flat.fill_(9.0)
    weight = torch.ones(LARGE)
    seen: list[float] = []
    eager.fake.launch(lambda: seen.append(weight[0].item()))
    eager.device.copy_to_device(flat, views, [weight], eager.device.mark(), eager.done)
    assert eager.wait_told() is None
    assert seen == [1.0]
    assert weight[0].item() == 9.0


def test_a_gate_makes_the_stream_wait_and_not_the_thread(rig: Rig) -> None:
    """With every sleep blocked, the gate returns at once and the next kernel sees the new weights."""
    flat, views = slot(rig.device, (LARGE,), torch.float32)
    flat.fill_(5.0)
    weight = torch.ones(LARGE)
    rig.fake.gate.clear()
    transfer = rig.device.copy_to_device(flat, views, [weight], rig.device.mark(), rig.done)
    transfer.make_current_stream_wait()
    seen: list[float] = []
    rig.fake.launch(lambda: seen.append(weight[0].item()))
    assert rig.fake.lines("compute", "h2d") == [
        "compute: record E0",
        "h2d: wait E0",
        "h2d: record E1",
        "h2d: copy 160",
        "h2d: record E2",
        "compute: wait E2",
    ]
    assert rig.told.empty()
    rig.fake.gate.set()
    assert rig.wait_told() is None
    rig.fake.run_all()
    assert seen == [5.0]


def test_a_gate_after_the_upload_is_done_costs_no_call(rig: Rig) -> None:
    """Work that is enqueued after done sees the copy anyway."""
    flat, views = slot(rig.device, (LARGE,), torch.float32)
    transfer = rig.device.copy_to_device(flat, views, [torch.ones(LARGE)], rig.device.mark(), rig.done)
    assert rig.wait_told() is None
    rig.fake.log.clear()
    transfer.make_current_stream_wait()
    assert rig.fake.log == []


def test_gradients_live_until_their_event_and_not_longer(rig: Rig) -> None:
    """The only reference is the device's: alive while the copy is in the stream, gone once done is told."""
    flat, views = slot(rig.device, (SMALL, SMALL, LARGE), torch.float32)
    sources = [torch.ones(view.shape) for view in views]
    alive = [weakref.ref(source) for source in sources]
    rig.fake.gate.clear()
    kept = rig.down(list(sources), views, flat)
    sources.clear()
    assert all(ref() is not None for ref in alive)
    assert rig.told.empty()
    rig.fake.gate.set()
    assert rig.wait_told() is None
    assert all(ref() is None for ref in alive)
    assert kept is not None


def test_only_the_lanes_threads_ever_sleep(rig: Rig) -> None:
    """Copies, marks and gates of the caller wait for nothing; each lane waits for its own end events."""
    flat, views = slot(rig.device, (SMALL, LARGE), torch.float32)
    for _ in range(3):
        rig.down([torch.ones(view.shape) for view in views], views, flat)
        up = rig.device.copy_to_device(flat, views, [torch.ones(v.shape) for v in views], rig.device.mark(), rig.done)
        up.make_current_stream_wait()
    for _ in range(6):
        assert rig.wait_told() is None
    assert sorted(thread for thread, _ in rig.fake.waited_by) == ["zoff-d2h"] * 3 + ["zoff-h2d"] * 3
    assert sorted(rig.fake.entered) == ["zoff-d2h", "zoff-h2d"]


def test_streams_and_staging_are_made_once(rig: Rig) -> None:
    """Fifty steps use three streams (the fake refuses a fourth) and one staging buffer a direction."""
    flat, views = slot(rig.device, (SMALL, SMALL), torch.float32)
    for _ in range(50):
        rig.down([torch.ones(SMALL)] * 2, views, flat)
        assert rig.wait_told() is None
    assert [line for line in rig.fake.log if "empty" in line] == ["d2h: empty 256"]
    assert rig.device.memory().staging_bytes == 256


def test_a_failure_while_enqueuing_is_told_behind_what_was_enqueued(rig: Rig) -> None:
    """The first tensor's copy is in the stream when the second fails: its event is waited for anyway."""
    flat, views = slot(rig.device, (LARGE, (41,)), torch.float32)
    transfer = rig.down([torch.ones(LARGE), torch.ones(2, 2)], views, flat)
    error = rig.wait_told()
    assert isinstance(error, RuntimeError)
    assert bool((views[0] == 1).all()), "done came before the copy that was under way"
    assert rig.fake.lines("d2h")[-1] == "d2h: record E2"
    with pytest.raises(RuntimeError) as raised:
        transfer.make_current_stream_wait()  # type: ignore[attr-defined]
    assert raised.value is error


def test_an_error_of_the_accelerator_reaches_done(rig: Rig) -> None:
    """Asynchronous errors appear when the event is waited for."""
    rig.fake.fail_synchronize = RuntimeError("an illegal memory access was encountered")
    flat, views = slot(rig.device, (LARGE,), torch.float32)
    rig.down([torch.ones(LARGE)], views, flat)
    assert rig.wait_told() is rig.fake.fail_synchronize


def test_a_callback_that_raises_does_not_end_the_lane(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    """It is logged; the copies behind it are told."""
    flat, views = slot(rig.device, (LARGE,), torch.float32)

    def broken(error: BaseException | None, start_s: float, end_s: float) -> None:
        raise KeyError("gone")

    rig.device.copy_to_host([torch.ones(LARGE)], views, flat, rig.device.mark(), broken)
    rig.down([torch.ones(LARGE)], views, flat)
    assert rig.wait_told() is None
    assert [record.message for record in caplog.records] == ["zoff-d2h: the callback of a finished copy raised"]


def test_memory_that_cannot_be_pinned_is_pageable_with_one_warning() -> None:
    """The warning says how much, why and what to do; the figures say what is held."""
    rig = Rig(pinned_limit_bytes=8192)
    rig.device.allocate(1024, torch.float32)
    with pytest.warns(PinnedMemoryWarning) as caught:
        rig.device.allocate(2048, torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rig.device.allocate(2048, torch.float32)
    assert str(caught[0].message) == (
        "cannot pin 8192 bytes of host memory (injected: too many pinned bytes): using pageable memory, "
        "copies are slower; raise the locked-memory limit (ulimit -l), or lower bucket_bytes or slots"
    )
    assert rig.device.memory() == DeviceMemory(pinned_bytes=4096, pageable_bytes=16384, staging_bytes=0)
    rig.device.close()
    assert rig.device.memory() == DeviceMemory(0, 0, 0)


def test_with_pageable_memory_the_caller_still_does_not_wait() -> None:
    """A copy to pageable memory blocks whoever enqueues it: so the lane's thread does, behind the marker."""
    rig = Rig(pinned_limit_bytes=0)
    with pytest.warns(PinnedMemoryWarning):
        flat, views = slot(rig.device, (LARGE,), torch.float32)
    rig.fake.gate.clear()
    gradient = torch.full(LARGE, torch.nan)
    rig.fake.launch(lambda: gradient.fill_(2.0))
    rig.down([gradient], views, flat)
    assert rig.fake.lines("d2h") == [], "the calling thread touched the stream"
    rig.fake.gate.set()
    assert rig.wait_told() is None
    assert bool((flat == 2.0).all())
    assert [thread for thread, _ in rig.fake.waited_by] == ["zoff-d2h", "zoff-d2h"]
    rig.device.close()


def test_pinned_pages_are_shared_with_nobody_and_given_back(rig: Rig) -> None:
    """Slabs are whole pages; free and close undo every registration."""
    slabs = [rig.device.allocate(10, torch.bfloat16) for _ in range(5)]
    pages = [range(start // 4096, (start + size) // 4096) for start, size in rig.fake.pinned.items()]
    assert all(start % 4096 == 0 and size % 4096 == 0 for start, size in rig.fake.pinned.items())
    assert len({page for run in pages for page in run}) == sum(len(run) for run in pages) == 5
    rig.device.free(slabs[0])
    assert len(rig.fake.pinned) == 4
    rig.device.free(torch.zeros(3))  # not ours: nothing happens
    rig.device.close()
    assert rig.fake.pinned == {}


def test_a_thread_may_mark_while_another_copies(rig: Rig) -> None:
    """Hooks run on autograd's threads: a mark is of the thread's own stream."""
    side = FakeStream(rig.fake, "side", eager=False)
    markers = []

    def hook() -> None:
        with rig.fake.on(side):
            markers.append(rig.device.mark())

    thread = threading.Thread(target=hook)
    thread.start()
    thread.join()
    assert rig.fake.lines("side", "compute") == ["side: record E0"]
    assert markers[0].reached_s() is None
    markers[0].wait()
    assert markers[0].reached_s() is not None


def test_a_device_that_torch_does_not_see_is_refused() -> None:
    """On a CPU build, or without the card, the error is ours and keeps torch's words."""
    if torch.cuda.is_available():
        pytest.skip("torch sees a CUDA device here")
    with pytest.raises(DeviceError) as caught:
        CudaDevice.open(torch.device("cuda", 0))
    assert str(caught.value).startswith("cannot open cuda:0: ")
