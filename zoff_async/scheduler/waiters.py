"""Coroutines that wait until something holds of an executor, or until it has failed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Waiters:
    """Each waits on a predicate, which ``wake`` asks; a failure wakes all of them with it."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Callable[[], bool], asyncio.Future[None]]] = []
        self.failure: BaseException | None = None

    def __bool__(self) -> bool:
        return bool(self._waiting)

    async def wait_until(self, predicate: Callable[[], bool]) -> None:
        """Until ``predicate()`` holds; it may have ceased to hold a moment later, so it is asked again.

        Raises:
            BaseException: the failure, if there is one.
        """
        while True:
            if self.failure is not None:
                raise self.failure
            if predicate():
                return
            waiter = asyncio.get_running_loop().create_future()
            self._waiting.append((predicate, waiter))
            await waiter

    def wake(self) -> None:
        """Something has changed: let those go on whose predicate holds now."""
        kept = []
        for predicate, waiter in self._waiting:
            if waiter.done():
                continue
            if self.failure is not None:
                waiter.set_exception(self.failure)
            elif predicate():
                waiter.set_result(None)
            else:
                kept.append((predicate, waiter))
        self._waiting = kept
