"""NVIDIA and AMD accelerators through torch.cuda: copies on streams of their own, beside compute.

Note [Streams are made once]
    One stream a direction and one for the clock, made with the device and kept to its end: streams made
    each step would each get a pool of the caching allocator and memory would climb. They have high
    priority: their packing kernels are tiny and should not queue behind a large matrix product. No call
        here or in the modules below synchronizes the
    device or a stream; all waiting is for single events, and the loop's thread never waits.

Note [Who waits for whom]
    D2H reads gradients: its stream waits for the marker that was recorded behind the kernels that made them
    (on every stream that did). H2D writes weights: its stream waits for the marker behind the last kernels
    that read them. Compute reads uploaded weights: the stream that is current where a weight is read waits
    for the upload's event, the thread does not. Pinned memory is read and reused by the host only after
    ``done``, which follows the event.

Note [One copy for many small tensors]
    Launching a copy costs some microseconds, as much as moving 256 KiB. Tensors below 1 MiB that lie side
    by side in the pinned range are gathered on the device by one ``_foreach_copy_`` and cross the link as
    one copy (and the other way round). Larger ones go straight from and to where they live: they fill the
    link alone, and need no second place on the device. The staging holds 8 MiB a direction, beyond the 4
    MiB from which the link is full; a longer run of small tensors goes in several copies. Gaps between
    views end a run, so nothing outside the views is written.

Note [Weights are written by copy_]
    Under no_grad, through ``copy_`` and ``_foreach_copy_``: both count a version, so autograd notices a
    weight that changes between a forward and its backward. ``.data`` would not. A source of another dtype
    is converted on the device.

Note [Pinned by registration]
    Memory is allocated as ordinary pages and then registered. torch's own pinned allocator rounds up to a
    power of two and keeps what is freed. Slabs start on a page of their own, since a page may be registered
    once only. Where registering fails (locked-memory limit, WSL2, no right) the slab stays pageable and one
    PinnedMemoryWarning says why.
"""

from __future__ import annotations

import logging
import mmap
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch._utils import _unflatten_dense_tensors

from zoff_async.device.base import DeviceMemory, Done, Marker
from zoff_async.device.cuda_clock import DeviceClock
from zoff_async.device.cuda_lane import CudaLane, CudaMarker, CudaTransfer
from zoff_async.device.surface import Stream, Surface, TorchCuda
from zoff_async.errors import ClosedError, DeviceError, PinnedMemoryWarning

logger = logging.getLogger(__name__)

#: A tensor of at least this many bytes is copied alone: see Note [One copy for many small tensors].
STRAIGHT_BYTES = 1 << 20
#: Device memory a direction for gathering and scattering small tensors.
STAGING_BYTES = 8 << 20


class CudaDevice:
    """An accelerator with streams, seen through ``surface``. See the notes in the module's text."""

    kind = "cuda"

    def __init__(
        self, surface: Surface, *, straight_bytes: int = STRAIGHT_BYTES, staging_bytes: int = STAGING_BYTES
    ) -> None:
        self._surface = surface
        self.torch_device = surface.torch_device
        self.name = str(surface.torch_device)
        self._straight_bytes = min(straight_bytes, staging_bytes)
        self._staging_limit_bytes = staging_bytes
        self._lock = threading.Lock()
        self._slabs: dict[int, tuple[Tensor, bool]] = {}  # data_ptr -> (whole pages, pinned)
        self._warned = False
        self._closed = False
        clock = DeviceClock(surface)
        self._clock = clock
        # Overlaps with backward on the compute stream, and with the H2D stream: the link runs both ways at
        # once.
        self._d2h = CudaLane("zoff-d2h", surface, clock, staging_bytes)
        # Overlaps with the tail of the update on the host, and with the next forward on the compute stream.
        self._h2d = CudaLane("zoff-h2d", surface, clock, staging_bytes)

    @classmethod
    def open(cls, torch_device: torch.device) -> CudaDevice:
        """The device for parameters on ``torch_device``.

        Raises:
            DeviceError: torch sees no such accelerator, or it refused.
        """
        try:
            return cls(TorchCuda(torch_device))
        except (RuntimeError, AssertionError) as error:  # torch's CPU build raises AssertionError
            raise DeviceError(f"cannot open {torch_device}: {error}") from error

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        if self._closed:
            raise ClosedError(f"cannot allocate staging: {self.name} is closed")
        nbytes = numel * dtype.itemsize
        if nbytes == 0:
            return torch.zeros(0, dtype=dtype)
        pages = _whole_pages(nbytes)
        try:
            self._surface.pin(pages)
            reason: DeviceError | None = None
        except DeviceError as error:
            reason = error
            self._d2h.enqueue_in_thread = self._h2d.enqueue_in_thread = True
        with self._lock:
            self._slabs[pages.data_ptr()] = (pages, reason is None)
            warn, self._warned = reason is not None and not self._warned, self._warned or reason is not None
        if warn:
            warnings.warn(
                f"cannot pin {nbytes} bytes of host memory ({reason}): using pageable memory, copies are "
                "slower; raise the locked-memory limit (ulimit -l), or lower bucket_bytes or slots",
                PinnedMemoryWarning,
                stacklevel=2,
            )
        return pages[:nbytes].view(dtype)

    def free(self, staging: Tensor) -> None:
        with self._lock:
            pages, pinned = self._slabs.pop(staging.data_ptr(), (staging, False))
        if pinned:
            self._unpin(pages)

    def mark(self, streams: Sequence[object] = ()) -> CudaMarker:
        events = []
        for stream in dict.fromkeys((self._surface.current_stream(), *streams)):
            event = self._surface.make_event()
            event.record(stream)
            events.append(event)
        return CudaMarker(tuple(events), self._clock)

    def current_stream(self) -> Stream:
        return self._surface.current_stream()

    def copy_to_host(
        self, sources: Sequence[Tensor], views: Sequence[Tensor], flat: Tensor, after: Marker, done: Done
    ) -> CudaTransfer:
        def copy() -> None:
            _check_lengths("sources", sources, views)
            for members, host in self._runs(views, flat):
                if len(members) == 1:
                    self._surface.copy_(views[members[0]], sources[members[0]])
                    continue
                staged = self._d2h.staging()[: host.nbytes].view(host.dtype)
                pieces = _pieces(staged, [views[i] for i in members])
                self._surface.copy_many_(pieces, [sources[i] for i in members])
                self._surface.copy_(host, staged)

        return self._d2h.submit(copy, _cuda_marker(after), done)

    def copy_to_device(
        self,
        flat: Tensor,
        views: Sequence[Tensor],
        targets: Sequence[Tensor],
        after: Marker,
        done: Done,
        then: Callable[[], None] | None = None,
    ) -> CudaTransfer:
        def copy() -> None:
            _check_lengths("targets", targets, views)
            for members, host in self._runs(views, flat):
                if len(members) == 1:
                    self._surface.copy_(targets[members[0]], views[members[0]])
                    continue
                staged = self._h2d.staging()[: host.nbytes].view(host.dtype)
                self._surface.copy_(staged, host)
                pieces = _pieces(staged, [views[i] for i in members])
                self._surface.copy_many_([targets[i] for i in members], pieces)
            if then is not None:
                then()

        return self._h2d.submit(copy, _cuda_marker(after), done)

    def release(self, flat: Tensor) -> None:
        return None

    def memory(self) -> DeviceMemory:
        with self._lock:
            held = list(self._slabs.values())
        pinned_bytes = sum(pages.nbytes for pages, pinned in held if pinned)
        pageable_bytes = sum(pages.nbytes for pages, pinned in held if not pinned)
        return DeviceMemory(pinned_bytes, pageable_bytes, self._d2h.staging_bytes + self._h2d.staging_bytes)

    def close(self) -> None:
        self._closed = True
        self._d2h.close()
        self._h2d.close()
        with self._lock:
            slabs, self._slabs = self._slabs, {}
        for pages, pinned in slabs.values():
            if pinned:
                self._unpin(pages)

    def _unpin(self, pages: Tensor) -> None:
        try:
            self._surface.unpin(pages)
        except DeviceError as error:  # closing goes on; the surface keeps the memory alive
            logger.warning("%s: %s", self.name, error)

    def _runs(self, views: Sequence[Tensor], flat: Tensor) -> Iterator[tuple[list[int], Tensor]]:
        """Indices of views that cross the link together, and the range of ``flat`` they fill."""
        base, itemsize = flat.data_ptr(), flat.element_size()
        members: list[int] = []
        begin = end = 0  # bytes from the start of flat that the members fill
        last_is_small = False
        for i, view in enumerate(views):
            nbytes = view.nbytes
            if nbytes == 0:
                continue
            offset = view.data_ptr() - base
            is_small = nbytes < self._straight_bytes
            fits = offset == end and offset + nbytes - begin <= self._staging_limit_bytes
            if members and not (last_is_small and is_small and fits):
                yield members, flat[begin // itemsize : end // itemsize]
                members = []
            if not members:
                begin = offset
            members.append(i)
            end, last_is_small = offset + nbytes, is_small
        if members:
            yield members, flat[begin // itemsize : end // itemsize]


def _whole_pages(nbytes: int) -> Tensor:
    """Zeroed host memory (uint8) of whole pages that it shares with nobody."""
    page = mmap.PAGESIZE
    size = -(-nbytes // page) * page
    raw = torch.zeros(size + page, dtype=torch.uint8)
    return raw[-raw.data_ptr() % page :][:size]


def _cuda_marker(after: Marker) -> CudaMarker:
    assert isinstance(after, CudaMarker), "a marker of another device"
    return after


def _pieces(staged: Tensor, views: list[Tensor]) -> tuple[Tensor, ...]:
    """Views of ``staged`` shaped like ``views``, one behind the other; made in one call, not one a tensor."""
    pieces: tuple[Tensor, ...] = _unflatten_dense_tensors(staged, views)  # type: ignore[no-untyped-call]
    return pieces


def _check_lengths(name: str, tensors: Sequence[Tensor], views: Sequence[Tensor]) -> None:
    if len(tensors) != len(views):
        raise ValueError(f"views and {name} must be as many, got {len(views)} and {len(tensors)}")
