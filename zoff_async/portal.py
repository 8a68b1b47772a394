"""The event loop in its own thread: where every executor runs, and the way into it from other threads."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from zoff_async.errors import ClosedError, ScheduleError

T = TypeVar("T")


def make_loop(name: str) -> asyncio.AbstractEventLoop:
    """A new event loop: ``uvloop``, ``asyncio``, or ``auto`` (uvloop where it is installed)."""
    if name != "asyncio":
        try:
            import uvloop
        except ImportError:
            if name == "uvloop":
                raise ValueError(
                    "event_loop='uvloop' needs uvloop: pip install uvloop, or event_loop='asyncio'"
                ) from None
        else:
            return uvloop.new_event_loop()
    return asyncio.new_event_loop()


class Portal:
    """One loop in one daemon thread.

    ``post`` hands a call over and returns; calls run in the order of posting, and a burst of them costs one wake-up.
    ``run`` hands a coroutine over and waits for its result. The thread never blocks: what may block runs elsewhere.
    What a posted call raises goes to ``on_error``, on the loop's thread.
    """

    def __init__(self, event_loop: str = "auto", on_error: Callable[[BaseException], None] | None = None) -> None:
        self.loop = make_loop(event_loop)
        self._on_error = on_error
        self._calls: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._awake = False
        self._lock = threading.Lock()
        self._closed = False
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run_loop, name="zoff-portal", daemon=True)
        self._thread.start()

    @property
    def here(self) -> bool:
        """Whether the calling thread is the loop's."""
        return threading.current_thread() is self._thread

    def post(self, call: Callable[..., None], *args: Any) -> None:
        """Run ``call(*args)`` on the loop's thread, soon. Calls posted after close are dropped."""
        with self._lock:
            if self._closed:
                return
            self._calls.append((call, args))
            wake = not self._awake
            self._awake = True
        if wake:
            self.loop.call_soon_threadsafe(self._drain)

    def run(self, function: Callable[..., Coroutine[Any, Any, T]], *args: Any) -> T:
        """Run ``function(*args)`` on the loop, after what was posted before, and return its result."""
        if self.here:
            raise ScheduleError("the loop's own thread cannot wait for the loop: call this from another thread")
        self._check_process()
        result: Future[T] = Future()

        def start() -> None:
            task = self.loop.create_task(function(*args), name=getattr(function, "__name__", "portal"))
            task.add_done_callback(lambda done: _copy_result(done, result))

        with self._lock:
            if self._closed:
                raise ClosedError("the event loop of this optimizer has been closed")
        self.post(start)
        return result.result()

    def close(self) -> None:
        """Stop the loop and join its thread. Idempotent; what was posted before has run."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        if os.getpid() != self._pid:
            return  # a forked child has no such thread
        self.loop.call_soon_threadsafe(self._drain)
        self.loop.call_soon_threadsafe(self.loop.stop)
        if not self.here:
            self._thread.join()

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise ScheduleError(
                "this optimizer was made in another process: its threads do not exist after a fork; "
                "make a new optimizer in the child"
            )

    def _drain(self) -> None:
        with self._lock:
            self._awake = False
            calls, self._calls = self._calls, deque()
        for call, args in calls:
            try:
                call(*args)
            except Exception as error:  # one bad call may not swallow the others
                if self._on_error is None:
                    self.loop.call_exception_handler({"message": "a posted call failed", "exception": error})
                else:
                    self._on_error(error)

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
        finally:
            tasks = asyncio.all_tasks(self.loop)
            for task in tasks:
                task.cancel()
            self.loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            with contextlib.suppress(Exception):
                self.loop.run_until_complete(self.loop.shutdown_asyncgens())
            self.loop.close()


def _copy_result(task: asyncio.Task[T], result: Future[T]) -> None:
    if task.cancelled():
        result.set_exception(ClosedError("the event loop was closed while this call waited"))
    elif (error := task.exception()) is not None:
        result.set_exception(error)
    else:
        result.set_result(task.result())


class SwitchInterval:
    """The interpreter's switch interval while optimizers are open.

    With Python code in the caller's thread the default of 5 ms makes every hand-over to the loop up to 5 ms late.
    """

    _lock = threading.Lock()
    _holders = 0
    _before = 0.0

    @classmethod
    def hold(cls, interval_s: float | None) -> None:
        """Set it, and remember what it was if nobody holds it yet; None leaves it alone."""
        if interval_s is None:
            return
        with cls._lock:
            if not cls._holders:
                cls._before = sys.getswitchinterval()
            cls._holders += 1
            sys.setswitchinterval(min(interval_s, sys.getswitchinterval()))

    @classmethod
    def release(cls, interval_s: float | None) -> None:
        """Put it back when the last holder has gone."""
        if interval_s is None:
            return
        with cls._lock:
            cls._holders -= 1
            if not cls._holders:
                sys.setswitchinterval(cls._before)
