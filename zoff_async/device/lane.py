"""A FIFO thread that plays a copy stream where the hardware has none."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from zoff_async.device.base import Done
from zoff_async.errors import ClosedError

logger = logging.getLogger(__name__)


class LaneTransfer:
    """A copy in a lane thread: done when the thread says so."""

    def __init__(self) -> None:
        self._finished = threading.Event()
        self.error: BaseException | None = None

    def finish(self, error: BaseException | None) -> None:
        self.error = error
        self._finished.set()

    def make_current_stream_wait(self) -> None:
        self._finished.wait()
        if self.error is not None:
            raise self.error


@dataclass(slots=True)
class LaneJob:
    """One copy on its way through a lane. ``copy`` holds the tensors; it is dropped once it has run."""

    copy: Callable[[], None] | None
    transfer: LaneTransfer
    done: Done
    nbytes: int
    enqueued_s: float


class LaneThread:
    """Runs copies one after the other, in the order of ``submit``.

    After ``close`` no copy starts; the ones that had not started are told ``ClosedError``.
    """

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[LaneJob | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # no job may be put behind the None that ends the thread
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, copy: Callable[[], None], done: Done, nbytes: int = 0) -> LaneTransfer:
        job = LaneJob(copy, LaneTransfer(), done, nbytes, time.perf_counter())
        with self._lock:
            if self._closed:
                raise ClosedError(f"cannot enqueue a copy: {self._thread.name} is closed")
            self._jobs.put(job)
        return job.transfer

    def close(self) -> None:
        with self._lock:
            if not self._closed:
                self._closed = True
                self._jobs.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        torch.set_grad_enabled(False)
        while (job := self._jobs.get()) is not None:
            self._run_one(job)
            del job

    def _run_one(self, job: LaneJob) -> None:
        start_s = time.perf_counter()
        error = self._copy(job)
        self._tell(job, error, start_s, time.perf_counter())

    def _copy(self, job: LaneJob) -> BaseException | None:
        copy, job.copy = job.copy, None
        if self._closed or copy is None:
            return ClosedError(f"copy dropped: {self._thread.name} was closed before it started")
        try:
            copy()
        except BaseException as error:  # told to the caller of the copy, whatever it is
            return error
        return None

    def _tell(self, job: LaneJob, error: BaseException | None, start_s: float, end_s: float) -> None:
        job.transfer.finish(error)  # before done, which may let a thread go that reads through the transfer
        try:
            job.done(error, start_s, end_s)
        except Exception:  # the lane goes on: the copies behind this one must still be told
            logger.exception("%s: the callback of a finished copy raised", self._thread.name)
