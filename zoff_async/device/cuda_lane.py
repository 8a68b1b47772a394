"""One direction of copies on an accelerator: a stream, the thread that waits for it, and staging on the
device.

Note [One sleeping thread a lane]
    Each copy ends in a blocking event. The lane's thread sleeps in its ``synchronize`` (GIL released, no
    core burnt) and tells ``done`` in the order of the stream. When it wakes late, the copies that ended
    meanwhile are told in one go, for their events are over already. Host callbacks of a stream are not
    used: they may not call into Python, and native ones can stall other streams.
        ``torch.Event(blocking=True)`` is not used: only ``torch.cuda.Event`` honours the flag.

Note [References instead of record_stream]
    A gradient was allocated on the compute stream and is read by the lane's. If its last reference went
    early, the caching allocator would hand its memory to the next kernel while the copy still reads it. The
    job keeps every tensor until the event behind the copy has been waited for; then the memory goes back at
    once. ``record_stream`` would do the same, but memory would come back only when the allocator looks, and
    would grow meanwhile. After a failure in the middle of enqueuing, the event is recorded all the same:
    what was enqueued before the failure must be over first.

Note [Pageable memory goes through the lane's thread]
    A copy from or to pageable memory makes the calling thread wait, in the D2H case for all of backward.
    The loop's thread must not. So once the device has had to hand out pageable memory, the lane's thread
    enqueues too: it waits for the marker, enqueues, waits for the copy. Slower (no copy is queued behind
    another), the same order, the same values.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from zoff_async.device.base import Done
from zoff_async.device.cuda_clock import DeviceClock
from zoff_async.device.surface import Event, Stream, Surface
from zoff_async.errors import ClosedError

logger = logging.getLogger(__name__)


class CudaMarker:
    """A point in one or several compute streams."""

    def __init__(self, events: tuple[Event, ...], clock: DeviceClock) -> None:
        self._events = events
        self._clock = clock

    def wait(self) -> None:
        for event in self._events:
            event.synchronize()

    def reached_s(self) -> float | None:
        if not all(event.query() for event in self._events):
            return None
        return max(self._clock.seconds_at(event) for event in self._events)

    def make_wait(self, stream: Stream) -> None:
        """What ``stream`` is given from now on runs after the point. The calling thread does not wait."""
        for event in self._events:
            stream.wait_event(event)


class CudaTransfer:
    """A copy in a lane's stream. ``start`` and ``end`` are timing events around it."""

    def __init__(self, surface: Surface) -> None:
        self._surface = surface
        self.start = surface.make_event()
        self.end = surface.make_event()
        self.enqueued = threading.Event()
        self.finished = False
        self.error: BaseException | None = None

    def make_current_stream_wait(self) -> None:
        # Set already, except on pageable memory: see Note [Pageable memory goes through the lane's thread].
        self.enqueued.wait()
        if self.error is not None:
            raise self.error
        if not self.finished:  # else every later kernel sees the copy anyway
            self._surface.current_stream().wait_event(self.end)


@dataclass(slots=True)
class CudaJob:
    """One copy on its way through a lane. ``copy`` holds the tensors and is dropped once the copy is over."""

    copy: Callable[[], None] | None
    after: CudaMarker
    done: Done
    transfer: CudaTransfer
    recorded: bool = False  # the end event is in the stream


class CudaLane:
    """Copies of one direction, in the order of ``submit``. ``close`` finishes what is in the stream."""

    def __init__(self, name: str, surface: Surface, clock: DeviceClock, staging_bytes: int) -> None:
        self._surface = surface
        self._clock = clock
        self._staging: Tensor | None = None
        self._staging_bytes = staging_bytes
        self.stream = surface.make_stream()
        #: Set once, for good, when the device hands out pageable memory.
        self.enqueue_in_thread = False
        self._jobs: queue.SimpleQueue[CudaJob | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # the queue's order is the stream's order
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def staging_bytes(self) -> int:
        """Device memory held now."""
        return 0 if self._staging is None else self._staging.nbytes

    def staging(self) -> Tensor:
        """The lane's device memory, made on first use; within the lane's stream only.

        The stream is its only user, so what is enqueued later never meets what was enqueued before.
        """
        if self._staging is None:
            self._staging = self._surface.empty(self._staging_bytes)
        return self._staging

    def submit(self, copy: Callable[[], None], after: CudaMarker, done: Done) -> CudaTransfer:
        job = CudaJob(copy, after, done, CudaTransfer(self._surface))
        with self._lock:
            if self._closed:
                raise ClosedError(f"cannot enqueue a copy: {self._thread.name} is closed")
            if not self.enqueue_in_thread:
                self._enqueue(job)
            self._jobs.put(job)
        return job.transfer

    def close(self) -> None:
        with self._lock:
            if not self._closed:
                self._closed = True
                self._jobs.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join()
            self._staging = None

    def _enqueue(self, job: CudaJob) -> None:
        assert job.copy is not None
        transfer = job.transfer
        try:
            with torch.no_grad(), self._surface.on(self.stream):
                job.after.make_wait(self.stream)
                transfer.start.record(self.stream)
                try:
                    job.copy()
                finally:
                    transfer.end.record(self.stream)
                    job.recorded = True
        except BaseException as error:  # reaches done, and whoever waits for the transfer
            transfer.error = error
        transfer.enqueued.set()

    def _run(self) -> None:
        self._surface.enter_thread()
        torch.set_grad_enabled(False)
        while (job := self._jobs.get()) is not None:
            self._finish(job)
            del job

    def _finish(self, job: CudaJob) -> None:
        transfer = job.transfer
        if not transfer.enqueued.is_set():
            self._enqueue_here(job)
        start_s = end_s = time.perf_counter()
        if job.recorded:
            try:
                transfer.end.synchronize()
                start_s, end_s = self._times(transfer)
            except Exception as error:
                transfer.error = transfer.error or error
        job.copy = None  # the tensors may go: see Note [References instead of record_stream]
        transfer.finished = True
        try:
            job.done(transfer.error, start_s, end_s)
        except Exception:  # the lane goes on: the copies behind this one must still be told
            logger.exception("%s: the callback of a finished copy raised", self._thread.name)

    def _enqueue_here(self, job: CudaJob) -> None:
        if self._closed:
            job.transfer.error = ClosedError(f"copy dropped: {self._thread.name} was closed before it started")
            job.transfer.enqueued.set()
            return
        job.after.wait()
        self._enqueue(job)

    def _times(self, transfer: CudaTransfer) -> tuple[float, float]:
        """Start and end of the copy on the host's clock; never in the future."""
        now_s = time.perf_counter()
        end_s = min(self._clock.seconds_at(transfer.end), now_s)
        return end_s - transfer.start.elapsed_time(transfer.end) * 1e-3, end_s
