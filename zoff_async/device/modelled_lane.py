"""A copy stream with a modelled bandwidth: real bytes, then nothing until the modelled time has passed."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

from zoff_async.device.base import Done
from zoff_async.device.faults import Faults
from zoff_async.device.lane import LaneJob, LaneThread, LaneTransfer
from zoff_async.errors import DeviceError

#: A sleeping lane looks this often whether it has been closed, in seconds.
_LOOK_S = 0.05
#: The most completions a reordering lane keeps back.
_KEPT = 3
#: An early lane's caller waits at most this long for ``done``: one that needs the caller first must not hang.
_EARLY_S = 1.0


class ModelledLane(LaneThread):
    """Copies of ``n`` bytes take ``latency_s + n / bytes_per_s``, one after the other.

    The lane keeps a timeline of its own, as hardware does: a copy starts when it was enqueued or when the
    one before it ended, whichever is later, so a late wake-up of this thread delays the news of one copy
    and not the copies behind it. Where moving the real bytes takes longer than modelled, the real time
    counts.
    """

    def __init__(
        self, name: str, *, bytes_per_s: float, latency_s: float, faults: Faults, fail_at: tuple[int, ...]
    ) -> None:
        self._bytes_per_s = bytes_per_s
        self._latency_s = latency_s
        self._faults = faults
        self._fail_at = frozenset(fail_at)
        self._random = random.Random(f"{name} {faults.seed}")
        self._free_at_s = 0.0
        self._kept: list[tuple[LaneJob, BaseException | None, float, float]] = []  # finished, not yet told
        self._gate = threading.Condition()
        self._passes: int | None = None  # how many copies may still start; None: any number
        self.copies = 0
        self.bytes = 0
        self.busy_s = 0.0
        self.slower_than_modelled = 0
        super().__init__(name)

    def submit(self, copy: Callable[[], None], done: Done, nbytes: int = 0) -> LaneTransfer:
        if not self._faults.early:
            return super().submit(copy, done, nbytes)
        told = threading.Event()

        def done_before_return(error: BaseException | None, start_s: float, end_s: float) -> None:
            try:
                done(error, start_s, end_s)
            finally:
                told.set()

        transfer = super().submit(copy, done_before_return, nbytes)
        told.wait(_EARLY_S)
        return transfer

    def hold(self) -> None:
        """Start no further copy until ``let``."""
        if self._faults.early:
            raise ValueError("an early lane cannot be held: its callers wait for their copies")
        with self._gate:
            self._passes = 0

    def let(self, copies: int | None = None) -> None:
        """Let that many more held copies start; None lets all go, and those to come."""
        with self._gate:
            self._passes = None if copies is None or self._passes is None else self._passes + copies
            self._gate.notify_all()

    def close(self) -> None:
        with self._lock:
            if not self._closed:
                self._closed = True  # before the gate opens, so that held copies are dropped
                self._jobs.put(None)
        self.let()
        super().close()

    def _run(self) -> None:
        super()._run()
        self._tell_kept()

    def _run_one(self, job: LaneJob) -> None:
        let_go_s = self._wait_at_gate()
        self.copies += 1
        start_s = max(job.enqueued_s, self._free_at_s, let_go_s)
        due_s = start_s + self._seconds(job.nbytes)
        if self._faults.bytes_arrive_last:
            self._sleep_until(due_s)
        error = self._copy_or_fail(job)
        real_end_s = time.perf_counter()
        if not (self._faults.early or self._faults.bytes_arrive_last):
            self.slower_than_modelled += real_end_s > due_s
        end_s = max(due_s, real_end_s) if error is None else real_end_s
        if error is None and not self._faults.early:
            self._sleep_until(end_s)
            self.bytes += job.nbytes
            self.busy_s += end_s - start_s
        self._free_at_s = end_s
        job.transfer.finish(error)
        self._kept.append((job, error, min(start_s, end_s), end_s))
        if not (self._faults.reordered and len(self._kept) < _KEPT and not self._jobs.empty()):
            self._tell_kept()

    def _copy_or_fail(self, job: LaneJob) -> BaseException | None:
        if self.copies not in self._fail_at:
            return self._copy(job)
        job.copy = None
        return DeviceError(f"injected failure of {self._thread.name} copy {self.copies}")

    def _seconds(self, nbytes: int) -> float:
        if self._faults.early:
            return 0.0
        late_s = self._faults.late_s * self._random.random() if self._faults.late_s else 0.0
        return self._latency_s + nbytes / self._bytes_per_s + late_s

    def _sleep_until(self, deadline_s: float) -> None:
        while not self._closed and (remaining_s := deadline_s - time.perf_counter()) > 0:
            time.sleep(min(remaining_s, _LOOK_S))

    def _wait_at_gate(self) -> float:
        """When a held copy was let go; 0.0 for one that was not held."""
        held = self._passes == 0
        if held:
            self._tell_kept()
        with self._gate:
            self._gate.wait_for(lambda: self._closed or self._passes is None or self._passes > 0)
            if self._passes is not None:
                self._passes -= 1
        return time.perf_counter() if held else 0.0

    def _tell_kept(self) -> None:
        kept, self._kept = self._kept, []
        if self._faults.reordered:
            kept.reverse()
        for job, error, start_s, end_s in kept:
            self._tell(job, error, start_s, end_s)
