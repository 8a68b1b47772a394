"""An accelerator played by host memory: real bytes, real threads, modelled time.

Parameters live on the CPU. Copies run on FIFO lanes of a modelled bandwidth and latency, compute takes
modelled time where a model says so (``compute``), everything else is what really happens on this machine.
So overlap can be measured and races can be found without hardware. Every figure from such a device is
labelled ``emulated``.

A name says which machine is played:

    emulated:PRESET[:KEY=VALUE]...      for example  emulated:v100-32g-dgx2:scale=0.01

PRESET is one of ``hardware_names()``. Keys: ``scale`` (all rates times this: a model that much smaller then
has a step of the same length), ``d2h_GBps``, ``h2d_GBps`` (measured bandwidths, in 1e9 bytes/s, taken as
they are), ``latency_us`` (time a copy takes before its first byte; default 10).
"""

from __future__ import annotations

import dataclasses
import math
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from zoff_async.device.base import DeviceMemory, Done, Marker
from zoff_async.device.faults import NO_FAULTS, Faults, poison
from zoff_async.device.hardware import GB, Hardware, hardware, hardware_names
from zoff_async.device.host import HostMarker
from zoff_async.device.lane import LaneTransfer
from zoff_async.device.modelled_lane import ModelledLane
from zoff_async.errors import DeviceError, PinnedMemoryWarning

PREFIX = "emulated:"
_KEYS = ("scale", "d2h_GBps", "h2d_GBps", "latency_us")
#: What a copy over PCIe takes before its first byte arrives, about; in seconds.
LATENCY_S = 10e-6


@dataclass(frozen=True)
class EmulatedStatistics:
    """What an emulated device has done so far. ``*_busy_s`` are modelled seconds.

    ``slower_than_modelled`` counts copies whose real bytes took longer than the model: a preset too fast
    for this host.
    """

    d2h_copies: int
    d2h_bytes: int
    d2h_busy_s: float
    h2d_copies: int
    h2d_bytes: int
    h2d_busy_s: float
    compute_s: float
    allocations: int
    released: int
    slower_than_modelled: int


class EmulatedDevice:
    """Host memory plays the device. See the module's text.

    Args:
        machine: The machine played, or the name of a preset.
        scale: All its rates times this.
        latency_s: Seconds a copy takes before its first byte.
        faults: What it does wrong on purpose; tests only.

    ``hold`` and ``let`` stop and release copies by number, for tests that need an order without a clock.
    """

    kind = "emulated"

    def __init__(
        self,
        machine: Hardware | str = "v100-32g-dgx2",
        *,
        scale: float = 1.0,
        latency_s: float = LATENCY_S,
        faults: Faults = NO_FAULTS,
    ) -> None:
        if not (isinstance(latency_s, int | float) and 0 <= latency_s < math.inf):
            raise ValueError(f"latency_s must be a number of seconds from 0, got {latency_s!r}")
        self.hardware = (hardware(machine) if isinstance(machine, str) else machine).scaled(scale)
        self.faults = faults
        self.name = f"{PREFIX}{self.hardware.name}" + (f":scale={scale:g}" if scale != 1 else "")
        self.torch_device = torch.device("cpu")
        links = (
            ("d2h", self.hardware.d2h_bytes_per_s, faults.fail_d2h_at),
            ("h2d", self.hardware.h2d_bytes_per_s, faults.fail_h2d_at),
        )
        self._lanes = {
            lane: ModelledLane(f"zoff-{lane}", bytes_per_s=rate, latency_s=latency_s, faults=faults, fail_at=fail_at)
            for lane, rate, fail_at in links
        }
        self._lock = threading.Lock()
        self._pinned: dict[int, int] = {}  # data_ptr -> bytes of what counts as pinned
        self._pageable: dict[int, int] = {}
        self._warned = False
        self._allocations = 0
        self._released = 0
        self._compute_s = 0.0
        self._overslept = threading.local()

    @classmethod
    def from_name(cls, name: str, *, faults: Faults = NO_FAULTS) -> EmulatedDevice:
        """The device that ``emulated:PRESET[:KEY=VALUE]...`` names.

        Raises:
            ValueError: for an unknown preset or key (with the list) or a value that is no positive number.
        """
        machine, scale, latency_s = read_name(name)
        device = cls(machine, scale=scale, latency_s=latency_s, faults=faults)
        device.name = name
        return device

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        with self._lock:
            self._allocations += 1
            number = self._allocations
        if number in self.faults.fail_allocation_at:
            raise DeviceError(f"injected failure of allocation {number} ({numel} elements of {dtype})")
        staging = torch.zeros(numel, dtype=dtype)
        with self._lock:
            limit_bytes = self.faults.pinned_limit_bytes
            pageable = limit_bytes is not None and sum(self._pinned.values()) + staging.nbytes > limit_bytes
            (self._pageable if pageable else self._pinned)[staging.data_ptr()] = staging.nbytes
            warn, self._warned = pageable and not self._warned, self._warned or pageable
        if warn:
            warnings.warn(
                f"cannot pin {staging.nbytes} bytes of host memory (emulated limit of {limit_bytes} bytes): "
                "using pageable memory; lower bucket_bytes or slots",
                PinnedMemoryWarning,
                stacklevel=2,
            )
        return staging

    def free(self, staging: Tensor) -> None:
        if self.faults.scribble_freed:
            poison([staging])
        with self._lock:
            self._pinned.pop(staging.data_ptr(), None)
            self._pageable.pop(staging.data_ptr(), None)

    def mark(self, streams: Sequence[object] = ()) -> HostMarker:
        return HostMarker()

    def current_stream(self) -> object:
        return None

    def copy_to_host(
        self, sources: Sequence[Tensor], views: Sequence[Tensor], flat: Tensor, after: Marker, done: Done
    ) -> LaneTransfer:
        if self.faults.poison_slots:
            poison(list(views))

        def copy() -> None:
            for source, view in zip(sources, views, strict=True):
                view.copy_(source)

        return self._lanes["d2h"].submit(copy, done, _nbytes(views))

    def copy_to_device(
        self,
        flat: Tensor,
        views: Sequence[Tensor],
        targets: Sequence[Tensor],
        after: Marker,
        done: Done,
        then: Callable[[], None] | None = None,
    ) -> LaneTransfer:
        if self.faults.poison_weights:
            after.wait()  # compute may still read the targets until then
            poison(list(targets))

        def copy() -> None:
            for view, target in zip(views, targets, strict=True):
                target.copy_(view)
            if then is not None:
                then()

        return self._lanes["h2d"].submit(copy, done, _nbytes(views))

    def release(self, flat: Tensor) -> None:
        with self._lock:
            self._released += 1
        if self.faults.scribble_freed:
            poison([flat])

    @contextmanager
    def compute(self, seconds: float) -> Iterator[None]:
        """Modelled compute: leaves ``seconds`` after it was entered (or later, if its body took longer).

        The thread sleeps for the rest, so no core is burnt. What a sleep overshoots is taken off this
        thread's next one.
        """
        entered_s = time.perf_counter()
        yield
        due_s = entered_s + seconds - getattr(self._overslept, "seconds", 0.0)
        now_s = time.perf_counter()
        if due_s > now_s:
            time.sleep(due_s - now_s)
        late_s = time.perf_counter() - due_s
        self._overslept.seconds = min(late_s, seconds) if due_s > now_s else 0.0
        with self._lock:
            self._compute_s += seconds

    def hold(self, lane: str) -> None:
        """Start no further copy of ``"d2h"`` or ``"h2d"`` until ``let``."""
        self._lanes[lane].hold()

    def let(self, lane: str, copies: int | None = None) -> None:
        """Let that many held copies start, in order; None lets all go."""
        self._lanes[lane].let(copies)

    def memory(self) -> DeviceMemory:
        with self._lock:
            return DeviceMemory(sum(self._pinned.values()), sum(self._pageable.values()), 0)

    def statistics(self) -> EmulatedStatistics:
        d2h, h2d = self._lanes["d2h"], self._lanes["h2d"]
        return EmulatedStatistics(
            d2h_copies=d2h.copies,
            d2h_bytes=d2h.bytes,
            d2h_busy_s=d2h.busy_s,
            h2d_copies=h2d.copies,
            h2d_bytes=h2d.bytes,
            h2d_busy_s=h2d.busy_s,
            compute_s=self._compute_s,
            allocations=self._allocations,
            released=self._released,
            slower_than_modelled=d2h.slower_than_modelled + h2d.slower_than_modelled,
        )

    def close(self) -> None:
        for lane in self._lanes.values():
            lane.close()


def _nbytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def read_name(name: str) -> tuple[Hardware, float, float]:
    """The machine, scale and latency (seconds) that ``emulated:PRESET[:KEY=VALUE]...`` names.

    Raises:
        ValueError: for an unknown preset or key (with the list) or a value that is no positive number.
    """
    preset, *pairs = name.removeprefix(PREFIX).split(":")
    if not name.startswith(PREFIX) or preset not in hardware_names():
        raise ValueError(
            f"device {name!r} names no emulated machine: write {PREFIX}PRESET with PRESET one of "
            f"{', '.join(hardware_names())}"
        )
    given = {"scale": 1.0, "latency_us": LATENCY_S * 1e6}
    for pair in pairs:
        key, _, text = pair.partition("=")
        if key not in _KEYS:
            raise ValueError(f"device {name!r}: unknown key {key!r}, allowed are {', '.join(_KEYS)}")
        given[key] = _positive(name, key, text)
    machine = hardware(preset)
    scale = given["scale"]
    # Divided here because the device multiplies every rate by the scale: a measured one stays as it is.
    if (d2h := given.get("d2h_GBps")) is not None:
        machine = dataclasses.replace(machine, d2h_bytes_per_s=d2h * GB / scale)
    if (h2d := given.get("h2d_GBps")) is not None:
        machine = dataclasses.replace(machine, h2d_bytes_per_s=h2d * GB / scale)
    return machine, scale, given["latency_us"] * 1e-6


def _positive(name: str, key: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise ValueError(f"device {name!r}: {key} must be a positive number, got {text!r}")
    return value
