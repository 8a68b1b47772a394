"""The threads that do the host arithmetic: pinned, each in a known floating-point mode, fed through one queue."""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from zoff_async.errors import PoolClosedError

log = logging.getLogger(__name__)

Job = Callable[[], None]
#: Called in the worker's thread with (what the job raised or None, start_s, end_s), in ``time.perf_counter`` time.
Done = Callable[[BaseException | None, float, float], None]


@dataclass(frozen=True)
class PoolStatistics:
    """What a pool has done since it was made."""

    workers: int
    cpus: tuple[int, ...] | None
    jobs: int
    busy_s: float


class _Tally:
    """One worker's counts, written by it alone."""

    __slots__ = ("busy_s", "jobs")

    def __init__(self) -> None:
        self.jobs = 0
        self.busy_s = 0.0


class Pool:
    """Worker threads that run jobs in the order they were submitted.

    Each thread is pinned to one processor (two threads left to the scheduler can share one for whole steps), flushes
    subnormals to zero (they make arithmetic about 35 times slower, and every result must not depend on the thread
    that made it), and uses one torch thread. The maker's ``torch.get_num_threads()`` is left as found.

    A job must not wait for another job. Whatever it raises, ``BaseException`` included, goes to its ``done``; the
    thread lives on. The threads are daemons: a pool that is never closed does not keep the interpreter alive. A
    forked child has no workers, so there ``submit`` raises and ``close`` has nothing to join.

    Args:
        workers: Number of threads, at least 1.
        cpus: Processors to pin to, worker i to ``cpus[i % len(cpus)]``; None leaves the threads unpinned.
        name: Prefix of the threads' names.

    Raises:
        ValueError: if ``workers`` is below 1 or ``cpus`` is empty.
        OSError: if the process may not run on one of ``cpus``.
    """

    def __init__(self, workers: int, cpus: tuple[int, ...] | None, name: str = "adam") -> None:
        if workers < 1:
            raise ValueError(f"workers must be at least 1, got {workers}")
        if cpus is not None and not cpus:
            raise ValueError("cpus must name at least one processor, or be None to leave the threads unpinned")
        self._cpus = cpus
        self._owner = os.getpid()
        self._jobs: queue.SimpleQueue[tuple[Job, Done] | None] = queue.SimpleQueue()
        self._tallies = [_Tally() for _ in range(workers)]
        # Reentrant: a finalizer may close the pool in the middle of a submit. Never waited for in a forked child.
        self._accepting = threading.RLock()
        self._closed = False
        ready: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        found = torch.get_num_threads()
        self._threads = [
            threading.Thread(target=self._work, args=(i, ready), name=f"{name}-{i}", daemon=True)
            for i in range(workers)
        ]
        for thread in self._threads:
            thread.start()
        failures = [error for error in (ready.get() for _ in self._threads) if error is not None]
        # Setting it in a worker also sets what threads made later start with.
        torch.set_num_threads(found)
        if failures:
            self.close()
            raise failures[0]

    def submit(self, job: Job, done: Done) -> None:
        """Have a worker call ``job()`` and then ``done(error, start_s, end_s)``.

        Raises:
            PoolClosedError: if the pool is closed, or was made by the process this one was forked from.
        """
        if os.getpid() != self._owner:
            raise PoolClosedError(
                f"the pool is of process {self._owner}, its threads do not exist after a fork; make a new one"
            )
        with self._accepting:
            if self._closed:
                raise PoolClosedError("the pool is closed; make a new one")
            self._jobs.put((job, done))

    def close(self) -> None:
        """Let running jobs end, tell the others ``done(PoolClosedError)`` and join the threads. Idempotent."""
        if os.getpid() != self._owner:
            return
        with self._accepting:
            if self._closed:
                return
            self._closed = True
        self._drop_queued()
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()

    def statistics(self) -> PoolStatistics:
        """Counts so far; a job is counted when it has ended."""
        return PoolStatistics(
            workers=len(self._threads),
            cpus=self._cpus,
            jobs=sum(tally.jobs for tally in self._tallies),
            busy_s=sum(tally.busy_s for tally in self._tallies),
        )

    def _drop_queued(self) -> None:
        while True:
            try:
                item = self._jobs.get_nowait()
            except queue.Empty:
                return
            assert item is not None  # the end is put behind the last job
            now = time.perf_counter()
            _report(item[1], PoolClosedError("the pool was closed before this job started"), now, now)

    def _work(self, index: int, ready: queue.SimpleQueue[BaseException | None]) -> None:
        try:
            self._prepare(index)
        except BaseException as error:
            ready.put(error)
            return
        ready.put(None)
        get, clock, tally = self._jobs.get, time.perf_counter, self._tallies[index]
        while (item := get()) is not None:
            job, done = item
            start_s = clock()
            raised = _run(job)
            end_s = clock()
            tally.jobs += 1
            tally.busy_s += end_s - start_s
            _report(done, raised, start_s, end_s)
            del item, job, done, raised  # a waiting worker keeps no buffers alive

    def _prepare(self, index: int) -> None:
        if self._cpus is not None and hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, {self._cpus[index % len(self._cpus)]})
        torch.get_num_threads()  # else torch would set this thread to the process's number at its first operator
        torch.set_num_threads(1)
        if not torch.set_flush_denormal(True):
            log.info("this processor has no flush-to-zero mode: subnormal moments will be slow")


def _run(job: Job) -> BaseException | None:
    try:
        job()
    except BaseException as error:
        return error
    return None


def _report(done: Done, error: BaseException | None, start_s: float, end_s: float) -> None:
    try:
        done(error, start_s, end_s)
    except BaseException:
        log.exception("done() of a pool job raised")
