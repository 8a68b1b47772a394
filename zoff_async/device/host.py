"""The device without an accelerator: parameters live in host memory, and copies are copies."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from zoff_async.device.base import DeviceMemory, Done
from zoff_async.device.lane import LaneThread, LaneTransfer


class HostMarker:
    """Compute on the host is done when it returns, so a point is reached as soon as it is marked."""

    __slots__ = ("_reached_s",)

    def __init__(self) -> None:
        self._reached_s = time.perf_counter()

    def wait(self) -> None:
        return None

    def reached_s(self) -> float:
        return self._reached_s


class HostDevice:
    """Parameters on the CPU. One thread a direction copies, so the loop's thread never does."""

    kind = "host"

    def __init__(self, name: str = "host") -> None:
        self.name = name
        self.torch_device = torch.device("cpu")
        self._pageable_bytes = 0
        self._to_host = LaneThread("zoff-d2h")
        self._to_device = LaneThread("zoff-h2d")

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        staging = torch.zeros(numel, dtype=dtype)
        self._pageable_bytes += staging.nbytes
        return staging

    def free(self, staging: Tensor) -> None:
        self._pageable_bytes -= staging.nbytes

    def mark(self, streams: Sequence[object] = ()) -> HostMarker:
        return HostMarker()

    def current_stream(self) -> object:
        return None

    def copy_to_host(
        self, sources: Sequence[Tensor], views: Sequence[Tensor], flat: Tensor, after: object, done: Done
    ) -> LaneTransfer:
        def copy() -> None:
            for source, view in zip(sources, views, strict=True):
                view.copy_(source)

        return self._to_host.submit(copy, done)

    def copy_to_device(
        self,
        flat: Tensor,
        views: Sequence[Tensor],
        targets: Sequence[Tensor],
        after: object,
        done: Done,
        then: Callable[[], None] | None = None,
    ) -> LaneTransfer:
        def copy() -> None:
            for view, target in zip(views, targets, strict=True):
                target.copy_(view)
            if then is not None:
                then()

        return self._to_device.submit(copy, done)

    def release(self, flat: Tensor) -> None:
        return None

    def memory(self) -> DeviceMemory:
        return DeviceMemory(pinned_bytes=0, pageable_bytes=self._pageable_bytes, staging_bytes=0)

    def close(self) -> None:
        self._to_host.close()
        self._to_device.close()
