"""An asyncio loop whose clock jumps to the next timer: hours of schedule in milliseconds, always the same.

Only for coroutines of one thread: work in another thread takes no virtual time, and waiting for it looks
like a deadlock.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from zoff_async.errors import DeadlockError

T = TypeVar("T")
Waiting = Callable[[], Iterable[str]]


class _JumpingSelector(selectors.DefaultSelector):
    """Never sleeps: moves the loop's clock to the next timer instead."""

    loop: VirtualClockLoop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise DeadlockError(self.loop.deadlock_message())
        self.loop.now += timeout
        return []


class VirtualClockLoop(asyncio.SelectorEventLoop):
    """An event loop in virtual time.

    ``time()`` starts at 0 and moves only when every task waits: straight to the next timer. When no timer is
    armed either, nothing can ever happen again, and the loop raises ``DeadlockError``.

    Args:
        waiting: Lines that say who waits for what, for that error (``executor.waiting``); the loop's own
            tasks are named in any case.
    """

    def __init__(self, waiting: Waiting | None = None) -> None:
        self.now = 0.0
        self._waiting = waiting
        selector = _JumpingSelector()
        selector.loop = self
        super().__init__(selector)

    def time(self) -> float:
        return self.now

    def deadlock_message(self) -> str:
        """What stands still, at what time."""
        lines = list(self._waiting()) if self._waiting is not None else []
        tasks = sorted(task.get_name() for task in asyncio.all_tasks(self))
        more = [f"... and {len(lines) - 12} more"] if len(lines) > 12 else []
        shown = [*lines[:12], *more, f"tasks that wait: {', '.join(tasks) or 'none'}"]
        return f"nothing can move any more at {self.now:g} s, and no timer is armed\n  " + "\n  ".join(shown)


def run_virtual(main: Coroutine[Any, Any, T], *, waiting: Waiting | None = None) -> T:
    """Run ``main`` in virtual time and return its result.

    May be called while another event loop runs in this thread (a notebook), which stands still meanwhile.

    Raises:
        DeadlockError: if everything waits and nothing can wake it.
    """
    with _other_loop_aside():
        loop = VirtualClockLoop(waiting)
        try:
            return loop.run_until_complete(loop.create_task(main, name="main"))
        finally:
            _cancel_all(loop)
            loop.close()


@contextmanager
def _other_loop_aside() -> Iterator[None]:
    """asyncio allows one running loop a thread: put the present one away, and back at the end.

    Its current task is left and entered again, since newer Pythons keep one current task a thread.
    """
    outer = asyncio._get_running_loop()
    task = asyncio.current_task(outer) if outer is not None else None
    if outer is not None and task is not None:
        asyncio.tasks._leave_task(outer, task)
    asyncio._set_running_loop(None)
    try:
        yield
    finally:
        asyncio._set_running_loop(outer)
        if outer is not None and task is not None:
            asyncio.tasks._enter_task(outer, task)


def _cancel_all(loop: VirtualClockLoop) -> None:
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    if tasks:
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
    loop.run_until_complete(loop.shutdown_asyncgens())
