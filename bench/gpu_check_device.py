"""The sections of gpu_check.py that need a device and no optimizer. Each yields its findings as it has them."""

from __future__ import annotations

import contextlib
import queue
import statistics
import threading
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zoff_async.device import Device, EmulatedDevice, open_device
from zoff_async.device.cuda import CudaDevice
from zoff_async.device.surface import TorchCuda
from zoff_async.errors import DeviceError, PinnedMemoryWarning

Finding = dict[str, object]
MIB = 1 << 20
PATIENCE_S = 60.0


@dataclass(frozen=True)
class Place:
    """Where the check runs: on the GPU, or on the CPU to try the script."""

    torch_device: torch.device
    small: bool  # sizes for trying the script

    @classmethod
    def of(cls, on: str) -> Place:
        if on == "cuda":
            return cls(torch.device("cuda", torch.cuda.current_device()), small=False)
        return cls(torch.device("cpu"), small=True)

    @property
    def on_gpu(self) -> bool:
        return self.torch_device.type == "cuda"

    def open(self) -> Device:
        return open_device("auto", self.torch_device) if self.on_gpu else EmulatedDevice("v100-32g-dgx2")

    def synchronize(self) -> None:
        """Between measurements only; the package never does this."""
        if self.on_gpu:
            torch.cuda.synchronize(self.torch_device)

    def compute(self, seconds: float) -> None:
        """Keep the current stream busy about that long."""
        if self.on_gpu:
            torch.cuda._sleep(int(seconds * 1.5e9))
        else:
            time.sleep(seconds)


class _Unpinnable(TorchCuda):
    """A GPU whose host memory cannot be pinned."""

    def pin(self, staging: Tensor) -> None:
        raise DeviceError("pinning is switched off for this check")


class Completions:
    """The news of copies, in order, with the time at which each arrived."""

    def __init__(self) -> None:
        self._told: queue.SimpleQueue[tuple[BaseException | None, float, float, float]] = queue.SimpleQueue()

    def done(self, error: BaseException | None, start_s: float, end_s: float) -> None:
        self._told.put((error, start_s, end_s, time.perf_counter()))

    def wait(self) -> tuple[float, float, float]:
        """(start, end, told) of the next one, in seconds."""
        error, start_s, end_s, told_s = self._told.get(timeout=PATIENCE_S)
        if error is not None:
            raise error
        return start_s, end_s, told_s


@contextlib.contextmanager
def opened(place: Place) -> Iterator[Device]:
    device = place.open()
    try:
        yield device
    finally:
        device.close()


def contract(place: Place) -> Iterator[Finding]:
    """Every promise on a fresh device."""
    from tests.device.contract import CONTRACT, Bench

    devices: dict[str, Any] = {"pinned": place.open}
    if place.on_gpu:
        devices["pageable"] = lambda: CudaDevice(_Unpinnable(place.torch_device))
        devices["tiny-staging"] = lambda: CudaDevice(
            TorchCuda(place.torch_device), straight_bytes=4096, staging_bytes=8192
        )
    for name, make in devices.items():
        broken = {}
        for promise in CONTRACT:
            bench = Bench(make())
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", PinnedMemoryWarning)
                    promise(bench)
            except Exception as error:
                broken[promise.__name__] = repr(error)
            finally:
                bench.device.close()
        yield {"ok": not broken, "device": name, "promises": len(CONTRACT), "broken": broken}


def transfers(place: Place, repeats: int = 200) -> Iterator[Finding]:
    """Values that change every time, in memory that is reused every time."""
    numel = (1 if place.small else 32) * MIB // 4
    with opened(place) as device:
        yield {"ok": True, "memory": vars(device.memory()) | {"note": "before any allocation"}}
        yield _downloads(place, device, numel, repeats)
        yield _uploads(place, device, numel, repeats)


def _downloads(place: Place, device: Device, numel: int, repeats: int) -> Finding:
    """A gradient is dropped as soon as its copy is enqueued, and its memory is asked for again."""
    slots = [device.allocate(numel, torch.float32) for _ in range(2)]
    news = Completions()
    wrong = 0
    for i in range(repeats):
        gradient = torch.full((numel,), float(i), device=place.torch_device)
        slot = slots[i % 2]
        device.copy_to_host([gradient], [slot], slot, device.mark(), news.done)
        del gradient
        torch.full((numel,), -1.0, device=place.torch_device)  # the allocator would hand out the same block
        news.wait()
        wrong += not bool((slot == float(i)).all())
        device.release(slot)
    for slot in slots:
        device.free(slot)
    return {"ok": wrong == 0, "what": "d2h of a dropped gradient", "repeats": repeats, "wrong": wrong}


def _uploads(place: Place, device: Device, numel: int, repeats: int) -> Finding:
    """A slot is overwritten as soon as its upload is told; a kernel behind the gate must see what was sent."""
    slot = device.allocate(numel, torch.float32)
    weight = torch.zeros(numel, device=place.torch_device)
    news = Completions()
    seen: list[tuple[int, Tensor, Tensor]] = []
    for i in range(repeats):
        slot.fill_(float(i))
        transfer = device.copy_to_device(slot, [slot], [weight], device.mark(), news.done)
        transfer.make_current_stream_wait()
        seen.append((i, weight.min(), weight.max()))  # reads every element, and must be over before the next upload
        news.wait()
        slot.fill_(-1.0)
    wrong = sum(low.item() != i or high.item() != i for i, low, high in seen)
    device.free(slot)
    return {"ok": wrong == 0, "what": "h2d into a weight that is being read", "repeats": repeats, "wrong": wrong}


def latency(place: Place, repeats: int = 300) -> Iterator[Finding]:
    """How late the news of a small copy is; and what waiting for a long one costs the host."""
    with opened(place) as device:
        slot = device.allocate(1024, torch.float32)
        gradient = torch.ones(1024, device=place.torch_device)
        news = Completions()
        late_us, enqueue_us = [], []
        for _ in range(repeats):
            before_s = time.perf_counter()
            device.copy_to_host([gradient], [slot], slot, device.mark(), news.done)
            enqueue_us.append((time.perf_counter() - before_s) * 1e6)
            _, end_s, told_s = news.wait()
            late_us.append((told_s - end_s) * 1e6)
            time.sleep(1e-4)
        yield {
            "ok": True,
            "what": "copy end to news on the host, one at a time",
            "median_us": round(statistics.median(late_us), 1),
            "p99_us": round(sorted(late_us)[int(0.99 * repeats)], 1),
            "enqueue_median_us": round(statistics.median(enqueue_us), 1),
        }
        yield _waiter_burns(place, device)


def _waiter_burns(place: Place, device: Device) -> Finding:
    """CPU time of the whole process while everybody waits for the accelerator: a spinning waiter shows as one core."""
    slot = device.allocate(1024, torch.float32)
    gradient = torch.ones(1024, device=place.torch_device)
    news = Completions()
    place.synchronize()
    cpu_s, wall_s = time.process_time(), time.perf_counter()
    for _ in range(10):
        place.compute(0.03)
        device.copy_to_host([gradient], [slot], slot, device.mark(), news.done)
    for _ in range(10):
        news.wait()
    share = (time.process_time() - cpu_s) / (time.perf_counter() - wall_s)
    return {"ok": share < 0.2, "what": "cpu share while waiting 0.3 s for compute", "cpu_share": round(share, 3)}


def bandwidth(place: Place) -> Iterator[Finding]:
    """GB/s of large copies by size, then of one direction beside the other and beside compute."""
    with opened(place) as device:
        for mib in (1, 4) if place.small else (1, 4, 16, 64):
            down, up = _rates(place, device, mib, ways=("d2h",)), _rates(place, device, mib, ways=("h2d",))
            yield {"ok": True, "what": "alone", "mib": mib, "d2h_GBps": down["d2h"], "h2d_GBps": up["h2d"]}
        mib = 4 if place.small else 64
        both = _rates(place, device, mib, ways=("d2h", "h2d"))
        yield {"ok": True, "what": "together", "mib": mib, "d2h_GBps": both["d2h"], "h2d_GBps": both["h2d"]}
        yield _beside_matmul(place, device, mib)
        yield _tiny_tensors(place, device)


def _rates(place: Place, device: Device, mib: int, ways: tuple[str, ...], copies: int = 12) -> dict[str, float]:
    numel = mib * MIB // 2
    near = {way: device.allocate(numel, torch.bfloat16) for way in ways}
    far = {way: torch.zeros(numel, dtype=torch.bfloat16, device=place.torch_device) for way in ways}
    news = {way: Completions() for way in ways}
    marker = device.mark()
    for _ in range(copies):
        if "d2h" in ways:
            device.copy_to_host([far["d2h"]], [near["d2h"]], near["d2h"], marker, news["d2h"].done)
        if "h2d" in ways:
            device.copy_to_device(near["h2d"], [near["h2d"]], [far["h2d"]], marker, news["h2d"].done)
    rates = {}
    for way in ways:
        times = [news[way].wait() for _ in range(copies)]
        # The first two make staging, touch pages and let the clocks rise.
        rates[way] = round((copies - 2) * numel * 2 / (times[-1][1] - times[1][1]) / 1e9, 2)
        device.free(near[way])
    return rates


def _beside_matmul(place: Place, device: Device, mib: int) -> Finding:
    """Both directions while the compute stream multiplies: what each loses."""
    side = 256 if place.small else 8192
    a = torch.randn(side, side, dtype=torch.bfloat16, device=place.torch_device)
    rounds = 30

    def multiply() -> float:
        place.synchronize()
        start_s = time.perf_counter()
        for _ in range(rounds):
            torch.mm(a, a)
        place.synchronize()
        return time.perf_counter() - start_s

    multiply()
    alone_s = multiply()
    stop = threading.Event()
    rates: list[dict[str, float]] = []

    def copy() -> None:
        while not stop.is_set():
            rates.append(_rates(place, device, mib, ways=("d2h", "h2d")))

    copier = threading.Thread(target=copy)
    copier.start()
    while not rates and copier.is_alive():
        time.sleep(1e-3)
    beside_s = statistics.median(multiply() for _ in range(5))
    stop.set()
    copier.join()
    return {
        "ok": True,
        "what": "beside a matrix product",
        "matmul_slower": round(beside_s / alone_s, 3),
        "tflops_alone": round(2 * side**3 * rounds / alone_s / 1e12, 1),
        "d2h_GBps": statistics.median(rate["d2h"] for rate in rates),
        "h2d_GBps": statistics.median(rate["h2d"] for rate in rates),
    }


def _tiny_tensors(place: Place, device: Device, count: int = 2000, numel: int = 64) -> Finding:
    """Thousands of tiny gradients and weights: gathered, they cost little more than one copy."""
    flat = device.allocate(count * numel, torch.bfloat16)
    views = list(flat.view(count, numel).unbind(0))
    tensors = list(torch.ones(count, numel, dtype=torch.bfloat16, device=place.torch_device).unbind(0))
    news = Completions()
    ms: dict[str, list[float]] = {"d2h": [], "h2d": []}
    for _ in range(10):
        start_s = time.perf_counter()
        device.copy_to_host(tensors, views, flat, device.mark(), news.done)
        ms["d2h"].append((news.wait()[2] - start_s) * 1e3)
        start_s = time.perf_counter()
        device.copy_to_device(flat, views, tensors, device.mark(), news.done)
        ms["h2d"].append((news.wait()[2] - start_s) * 1e3)
    device.free(flat)
    return {
        "ok": True,
        "what": f"{count} tensors of {numel} elements",
        "d2h_ms": round(statistics.median(ms["d2h"]), 2),
        "h2d_ms": round(statistics.median(ms["h2d"]), 2),
        "staging_bytes": device.memory().staging_bytes,
    }
