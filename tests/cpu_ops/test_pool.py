"""The threads of the pool: what they are set to, what they tell, and how they end."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
import weakref

import numpy as np
import pytest
import torch

from zoff_async.cpu_ops import Pool, available_cpus
from zoff_async.errors import PoolClosedError

PINNING = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system does not pin threads")
WAIT_S = 30.0  # only ever reached by a failure


@pytest.fixture
def pools():
    """Makes pools and closes them."""
    made: list[Pool] = []

    def make(workers: int = 1, cpus: tuple[int, ...] | None = None) -> Pool:
        made.append(Pool(workers, cpus))
        return made[-1]

    yield make
    for pool in made:
        pool.close()


def results_of(pool: Pool, *jobs):
    """Submit ``jobs`` and return [(error, end - start >= 0, thread name)] in the order they ended."""
    told: queue.SimpleQueue = queue.SimpleQueue()
    for job in jobs:
        pool.submit(job, lambda error, start, end: told.put((error, end >= start, threading.current_thread().name)))
    return [told.get(timeout=WAIT_S) for _ in jobs]


def value_of(pool: Pool, function):
    """What ``function`` returns in a worker."""
    values: list = []
    ((error, *_),) = results_of(pool, lambda: values.append(function()))
    assert error is None
    return values[0]


def test_jobs_run_in_the_order_they_were_submitted(pools):
    order: list[int] = []
    results_of(pools(1), *(lambda i=i: order.append(i) for i in range(50)))

    assert order == list(range(50))


def test_done_is_told_the_times_in_the_workers_thread(pools):
    assert results_of(pools(1), lambda: None) == [(None, True, "adam-0")]


@pytest.mark.parametrize("error", [ValueError("x"), KeyboardInterrupt(), SystemExit(3), MemoryError()])
def test_whatever_a_job_raises_goes_to_done_and_the_thread_lives_on(pools, error):
    pool = pools(1)

    def fail() -> None:
        raise error

    assert results_of(pool, fail) == [(error, True, "adam-0")]
    assert results_of(pool, lambda: None) == [(None, True, "adam-0")]


def test_a_done_that_raises_is_logged_and_the_thread_lives_on(pools, caplog):
    pool = pools(1)

    def bad(*_: object) -> None:
        raise RuntimeError("told you")

    pool.submit(lambda: None, bad)
    assert results_of(pool, lambda: None)[0][0] is None
    assert "told you" in caplog.text


def test_two_workers_run_two_jobs_at_once(pools):
    """Each waits for the other: one worker alone would never end."""
    barrier = threading.Barrier(2)
    found = results_of(pools(2), *(lambda: barrier.wait(timeout=WAIT_S) for _ in range(2)))

    assert {error for error, *_ in found} == {None}
    assert {name for *_, name in found} == {"adam-0", "adam-1"}


@PINNING
def test_each_worker_is_pinned_and_more_workers_than_processors_wrap_round(pools):
    cpus = available_cpus()
    workers = len(cpus) + 1
    pool = pools(workers, cpus)
    barrier = threading.Barrier(workers)
    found: queue.SimpleQueue = queue.SimpleQueue()

    def look() -> None:
        barrier.wait(timeout=WAIT_S)  # so that every worker takes one
        found.put((threading.current_thread().name, os.sched_getaffinity(0)))

    results_of(pool, *[look] * workers)
    seen = dict(found.get_nowait() for _ in range(workers))

    assert seen == {f"adam-{i}": {cpus[i % len(cpus)]} for i in range(workers)}
    assert available_cpus() == cpus


@PINNING
def test_unpinned_workers_may_run_anywhere_the_caller_may(pools):
    assert value_of(pools(1, None), lambda: os.sched_getaffinity(0)) == set(available_cpus())


@PINNING
def test_a_processor_that_is_not_ours_is_an_error_and_leaves_no_thread():
    before = set(threading.enumerate())
    with pytest.raises(OSError, match="Invalid argument"):
        Pool(2, (10_000,))

    assert set(threading.enumerate()) == before


def test_workers_flush_subnormals_and_the_caller_does_not(pools):
    def smallest() -> tuple[bool, bool]:
        tiny = np.full(4, 1e-38, np.float32) * np.float32(0.1)
        return bool((tiny == 0).all()), bool((torch.full((4,), 1e-38) * 0.1 == 0).all())

    if not torch.set_flush_denormal(False):
        pytest.skip("this processor cannot flush subnormals")
    assert value_of(pools(1), smallest) == (True, True)
    assert smallest() == (False, False)


def test_workers_use_one_torch_thread_and_nobody_elses_count_changes(pools):
    found = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        pool = pools(2)
        later: list[int] = []
        thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
        thread.start()
        thread.join()

        assert value_of(pool, torch.get_num_threads) == 1
        assert torch.get_num_threads() == 3
        assert later == [3]
        pool.close()
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(found)


def test_closing_ends_the_running_job_and_drops_the_others(pools):
    pool = pools(1)
    started, release = threading.Event(), threading.Event()
    told: queue.SimpleQueue = queue.SimpleQueue()
    ran: list[str] = []

    def first() -> None:
        started.set()
        release.wait(timeout=WAIT_S)
        ran.append("first")

    def tell(name: str):
        return lambda error, start, end: told.put((name, error, start == end))

    pool.submit(first, tell("first"))
    started.wait(timeout=WAIT_S)
    pool.submit(lambda: ran.append("second"), tell("second"))
    closing = threading.Thread(target=pool.close)
    closing.start()
    name, error, instant = told.get(timeout=WAIT_S)  # told before the running job has ended
    assert (name, type(error), instant) == ("second", PoolClosedError, True)
    assert str(error) == "the pool was closed before this job started"
    release.set()
    closing.join(timeout=WAIT_S)

    assert told.get(timeout=WAIT_S)[:2] == ("first", None)
    assert ran == ["first"]


def test_closing_twice_is_closing_once_and_later_jobs_are_refused(pools):
    pool = pools(2)
    pool.close()
    pool.close()

    with pytest.raises(PoolClosedError) as caught:
        pool.submit(lambda: None, lambda *_: None)
    assert str(caught.value) == "the pool is closed; make a new one"


def test_closing_leaves_no_thread(pools):
    before = set(threading.enumerate())
    pool = pools(3)
    assert len(set(threading.enumerate()) - before) == 3
    pool.close()

    assert set(threading.enumerate()) == before


def test_a_job_may_close_its_own_pool(pools):
    before = set(threading.enumerate())
    pool = pools(2)
    ours = set(threading.enumerate()) - before

    assert results_of(pool, pool.close)[0][0] is None
    for thread in ours:
        thread.join(timeout=WAIT_S)
        assert not thread.is_alive()


def test_no_job_is_lost_between_submitting_and_closing(pools):
    """Every job that was taken is told, run or dropped, whoever wins."""
    for _ in range(20):
        pool, told, taken = pools(2), [], []
        start = threading.Barrier(2)

        def submit(pool=pool, told=told, taken=taken, start=start) -> None:
            start.wait(timeout=WAIT_S)
            for i in range(200):
                try:
                    pool.submit(lambda: None, lambda error, start_s, end_s: told.append(error))
                except PoolClosedError:
                    return
                taken.append(i)

        thread = threading.Thread(target=submit)
        thread.start()
        start.wait(timeout=WAIT_S)
        pool.close()
        thread.join(timeout=WAIT_S)

        assert len(told) == len(taken)


def test_statistics_count_jobs_and_busy_time(pools):
    pool = pools(2)
    results_of(pool, *[lambda: None] * 5, lambda: 1 / 0)
    results_of(pool, lambda: None)
    pool.close()
    counted = pool.statistics()

    assert (counted.workers, counted.cpus, counted.jobs) == (2, None, 7)
    assert counted.busy_s > 0


def test_a_waiting_worker_keeps_nothing_of_its_last_job_alive(pools):
    class Buffer:
        pass

    pool, buffer = pools(1), Buffer()
    dead = weakref.ref(buffer)
    results_of(pool, lambda buffer=buffer: None)
    del buffer
    pool.close()

    assert dead() is None


@pytest.mark.parametrize(
    ("workers", "cpus", "message"),
    [
        (0, None, "workers must be at least 1, got 0"),
        (-1, (0,), "workers must be at least 1, got -1"),
        (1, (), "cpus must name at least one processor, or be None to leave the threads unpinned"),
    ],
)
def test_a_pool_without_workers_or_processors_is_refused(workers, cpus, message):
    with pytest.raises(ValueError) as caught:
        Pool(workers, cpus)

    assert str(caught.value) == message


FORK = """
import os, sys, warnings
warnings.simplefilter("ignore", DeprecationWarning)  # forking with threads is what is tested
from zoff_async.cpu_ops import Pool
from zoff_async.errors import PoolClosedError

pool = Pool(2, None)
child = os.fork()
if child == 0:
    try:
        pool.submit(lambda: None, lambda *_: None)
    except PoolClosedError as error:
        print("child:", str(error).replace(str(os.getppid()), "PARENT"), flush=True)
    pool.close()
    sys.exit(0)
print("child left with", os.waitpid(child, 0)[1], flush=True)
sys.exit(0)  # with the pool open
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_forked_child_is_told_and_both_processes_leave():
    done = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, timeout=60, check=False)

    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "child: the pool is of process PARENT, its threads do not exist after a fork; make a new one",
        "child left with 0",
    ]
