"""What every device promises the runtime, as functions that run with and without pytest.

Each takes a ``Bench``: the device, and how a tensor gets to where its parameters live. ``CONTRACT`` lists
them.
"""

from __future__ import annotations

import gc
import queue
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from zoff_async.device import Device, Transfer
from zoff_async.errors import ClosedError

#: A wait that takes this long has failed, in seconds.
PATIENCE_S = 20.0


@dataclass
class Bench:
    """A device under test. ``told`` receives every completion: (label, error, start_s, end_s, thread)."""

    device: Device
    keeps_order: bool = True
    #: What a kernel of this thread's current stream sees.
    read: Callable[[Tensor], Tensor] = torch.clone
    told: queue.Queue[tuple[str, BaseException | None, float, float, str]] = field(default_factory=queue.Queue)

    def place(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device.torch_device)

    def done(self, label: str) -> Callable[[BaseException | None, float, float], None]:
        def done(error: BaseException | None, start_s: float, end_s: float) -> None:
            self.told.put((label, error, start_s, end_s, threading.current_thread().name))

        return done

    def wait_told(self) -> tuple[str, BaseException | None, float, float, str]:
        return self.told.get(timeout=PATIENCE_S)

    def down(self, sources: list[Tensor], views: list[Tensor], flat: Tensor, label: str = "d2h") -> Transfer:
        return self.device.copy_to_host(sources, views, flat, self.device.mark(), self.done(label))

    def up(self, flat: Tensor, views: list[Tensor], targets: list[Tensor], label: str = "h2d") -> Transfer:
        return self.device.copy_to_device(flat, views, targets, self.device.mark(), self.done(label))

    def wait_ok(self) -> None:
        _, error, _, _, _ = self.wait_told()
        assert error is None, error


SHAPES = ((3, 5), (), (7,), (0,), (2, 3, 4), (1024, 300), (11,), (1,))


def slot(
    device: Device, shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype, gap: int = 0
) -> tuple[Tensor, list[Tensor]]:
    """A staging range and its views, ``gap`` elements apart."""
    sizes = [torch.Size(shape).numel() for shape in shapes]
    flat = device.allocate(sum(sizes) + gap * len(sizes), dtype)
    views, offset = [], 0
    for shape, size in zip(shapes, sizes, strict=True):
        views.append(flat[offset : offset + size].view(shape))
        offset += size + gap
    return flat, views


def values(shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def gradients_arrive_exactly(bench: Bench) -> None:
    """Every dtype and shape arrives bit for bit, empty and scalar tensors too."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        flat, views = slot(bench.device, SHAPES, dtype)
        sent = values(SHAPES, dtype)
        bench.down([bench.place(tensor) for tensor in sent], views, flat)
        bench.wait_ok()
        assert all(torch.equal(view, tensor) for view, tensor in zip(views, sent, strict=True))
        bench.device.free(flat)


def a_transposed_gradient_arrives_in_order(bench: Bench) -> None:
    """A source that is not contiguous lands in its view's own order, alone and beside others."""
    for shapes in (((6, 4),), ((6, 4), (6, 4))):
        flat, views = slot(bench.device, shapes, torch.float32)
        sent = [tensor.t() for tensor in values(tuple(shape[::-1] for shape in shapes), torch.float32)]
        bench.down([bench.place(tensor.t()).t() for tensor in sent], views, flat)
        bench.wait_ok()
        assert all(torch.equal(view, tensor) for view, tensor in zip(views, sent, strict=True))
        bench.device.free(flat)


def nothing_outside_the_views_is_written(bench: Bench) -> None:
    """Gaps between views keep their values, and so does what lies before and behind them."""
    flat, views = slot(bench.device, SHAPES, torch.float32, gap=3)
    flat.fill_(-7.0)
    covered = torch.zeros(flat.numel(), dtype=torch.bool)
    for view in views:
        covered[view.storage_offset() - flat.storage_offset() :][: view.numel()] = True
    bench.down([bench.place(tensor.abs()) for tensor in values(SHAPES, torch.float32)], views, flat)
    bench.wait_ok()
    assert torch.equal(flat == -7.0, ~covered)
    bench.device.free(flat)


def weights_arrive_and_count_a_version(bench: Bench) -> None:
    """An upload writes parameters in place, in a way that autograd's version counters see."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        flat, views = slot(bench.device, SHAPES, dtype)
        for view, tensor in zip(views, values(SHAPES, dtype), strict=True):
            view.copy_(tensor)
        targets = [torch.nn.Parameter(bench.place(torch.zeros(shape, dtype=dtype))) for shape in SHAPES]
        before = [target._version for target in targets if target.numel()]
        transfer = bench.up(flat, views, targets)
        bench.wait_ok()
        transfer.make_current_stream_wait()
        assert all(torch.equal(target.cpu(), view) for target, view in zip(targets, views, strict=True))
        after = [target._version for target in targets if target.numel()]
        assert all(new > old for new, old in zip(after, before, strict=True))
        assert all(target.requires_grad and target.is_leaf for target in targets)
        bench.device.free(flat)


def what_follows_a_gate_sees_the_upload(bench: Bench) -> None:
    """After make_current_stream_wait this thread's work reads the new weights, before done or after it."""
    flat, views = slot(bench.device, ((512, 512),), torch.float32)
    target = bench.place(torch.zeros(512, 512))
    for round_ in range(5):
        views[0].fill_(round_ + 1.0)
        bench.up(flat, views, [target]).make_current_stream_wait()
        read = bench.read(target)
        bench.wait_ok()
        assert bool((read.cpu() == round_ + 1.0).all())
    bench.device.free(flat)


def a_later_copy_of_the_same_slot_brings_the_later_values(bench: Bench) -> None:
    """A slot that is used again after done holds the second copy's values."""
    flat, views = slot(bench.device, ((64, 64),), torch.float32)
    for value in (1.0, 2.0, 3.0):
        bench.down([bench.place(torch.full((64, 64), value))], views, flat)
        bench.wait_ok()
        assert bool((flat == value).all())
        bench.device.release(flat)
    bench.device.free(flat)


def completions_come_once_in_order_from_a_thread_of_the_device(bench: Bench) -> None:
    """done is told once a copy, in the lane's order, with times that fit, not by the caller's own thread."""
    flat, views = slot(bench.device, ((32, 32),) * 6, torch.float32)
    source = bench.place(torch.ones(32, 32))
    before_s = time.perf_counter()
    for i, view in enumerate(views):
        bench.down([source], [view], view.view(-1), label=str(i))
    told = [bench.wait_told() for _ in views]
    after_s = time.perf_counter()
    assert sorted(label for label, *_ in told) == [str(i) for i in range(6)]
    if bench.keeps_order:
        assert [label for label, *_ in told] == [str(i) for i in range(6)]
    for _, error, start_s, end_s, thread in told:
        assert error is None
        # A clock of the device's own may be a little off the host's.
        assert before_s - 1e-3 <= start_s <= end_s <= after_s
        assert thread != threading.current_thread().name
    assert bench.told.empty()
    bench.device.free(flat)


def both_directions_run_side_by_side(bench: Bench) -> None:
    """Copies of the two lanes do not disturb each other."""
    down_flat, down_views = slot(bench.device, ((256, 64),) * 4, torch.float32)
    up_flat, up_views = slot(bench.device, ((256, 64),) * 4, torch.float32)
    sent = values(((256, 64),) * 4, torch.float32, seed=1)
    up_flat.normal_()
    targets = [bench.place(torch.zeros(256, 64)) for _ in range(4)]
    for i in range(4):
        bench.down([bench.place(sent[i])], [down_views[i]], down_views[i].view(-1))
        bench.up(up_views[i].view(-1), [up_views[i]], [targets[i]]).make_current_stream_wait()
    for _ in range(8):
        bench.wait_ok()
    assert all(torch.equal(view, tensor) for view, tensor in zip(down_views, sent, strict=True))
    assert all(torch.equal(target.cpu(), view) for target, view in zip(targets, up_views, strict=True))
    bench.device.free(down_flat)
    bench.device.free(up_flat)


def an_error_reaches_done_and_the_lane_goes_on(bench: Bench) -> None:
    """A copy that cannot be made is told to its caller and to whoever waits for it; the next one works."""
    flat, views = slot(bench.device, ((4, 4), (4,)), torch.float32)
    transfer = bench.down([bench.place(torch.ones(5, 5)), bench.place(torch.ones(4))], views, flat)
    _, error, start_s, end_s, _ = bench.wait_told()
    assert error is not None
    assert start_s <= end_s
    assert _raised_by(transfer.make_current_stream_wait) is error
    bench.down([bench.place(torch.ones(4, 4)), bench.place(torch.ones(4))], views, flat)
    bench.wait_ok()
    assert bool((flat == 1).all())
    bench.device.free(flat)


def tensors_are_dropped_when_done_is_told(bench: Bench) -> None:
    """The device and the transfer hold nothing after done: a gradient's memory goes back at once."""
    flat, views = slot(bench.device, ((16, 16), (16, 16)), torch.float32)
    sources = [bench.place(torch.ones(16, 16)).clone() for _ in range(2)]
    watched = [weakref.ref(source) for source in sources]
    kept = bench.down(list(sources), views, flat)
    sources.clear()
    bench.wait_ok()
    deadline_s = time.perf_counter() + PATIENCE_S
    while any(ref() is not None for ref in watched) and time.perf_counter() < deadline_s:
        gc.collect()
    assert [ref() for ref in watched] == [None, None]
    kept.make_current_stream_wait()
    bench.device.free(flat)


def a_mark_is_reached_and_knows_when(bench: Bench) -> None:
    """A marker covers this thread's stream and those named; its time is a time of the host's clock."""
    before_s = time.perf_counter()
    marker = bench.device.mark((bench.device.current_stream(),))
    marker.wait()
    reached_s = marker.reached_s()
    assert reached_s is not None
    assert before_s - 1e-3 <= reached_s <= time.perf_counter() + 1e-3
    hash(bench.device.current_stream())


def staging_is_zeroed_and_counted(bench: Bench) -> None:
    """allocate gives zeros and is counted in memory(); free takes it off again."""
    before = bench.device.memory()
    staging = bench.device.allocate(10_000, torch.bfloat16)
    assert staging.shape == (10_000,)
    assert staging.dtype is torch.bfloat16
    assert staging.device.type == "cpu"
    assert not staging.any()
    held = bench.device.memory()
    grown_bytes = held.pinned_bytes + held.pageable_bytes - before.pinned_bytes - before.pageable_bytes
    assert 20_000 <= grown_bytes <= 20_000 + 8192
    bench.device.free(staging)
    assert bench.device.memory() == before


def it_is_a_device(bench: Bench) -> None:
    """Names, kind and methods are there."""
    assert isinstance(bench.device, Device)
    assert bench.device.name
    assert bench.device.kind in ("host", "emulated", "cuda")


def closing_tells_every_copy_and_ends_the_threads(bench: Bench) -> None:
    """Every copy enqueued before close is told; afterwards copies raise; closing twice is nothing."""
    threads = set(threading.enumerate())
    _, views = slot(bench.device, ((64, 64),) * 8, torch.float32)
    source = bench.place(torch.ones(64, 64))
    for view in views:
        bench.down([source], [view], view.view(-1))
    bench.device.close()
    for _ in views:
        _, error, _, _, _ = bench.told.get_nowait()
        assert error is None or isinstance(error, ClosedError)
    bench.device.close()
    refused = _raised_by(lambda: bench.down([source], views[:1], views[0].view(-1)))
    assert isinstance(refused, ClosedError)
    assert "is closed" in str(refused)
    assert not [thread for thread in threads if thread.name in ("zoff-d2h", "zoff-h2d") and thread.is_alive()]


def _raised_by(call: Callable[[], object]) -> BaseException | None:
    try:
        call()
    except Exception as error:
        return error
    return None


#: In this order; the last one closes the device.
CONTRACT: tuple[Callable[[Bench], None], ...] = (
    it_is_a_device,
    gradients_arrive_exactly,
    a_transposed_gradient_arrives_in_order,
    nothing_outside_the_views_is_written,
    weights_arrive_and_count_a_version,
    what_follows_a_gate_sees_the_upload,
    a_later_copy_of_the_same_slot_brings_the_later_values,
    completions_come_once_in_order_from_a_thread_of_the_device,
    both_directions_run_side_by_side,
    an_error_reaches_done_and_the_lane_goes_on,
    tensors_are_dropped_when_done_is_told,
    a_mark_is_reached_and_knows_when,
    staging_is_zeroed_and_counted,
    closing_tells_every_copy_and_ends_the_threads,
)
