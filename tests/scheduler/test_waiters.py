"""Waiting on predicates."""

from __future__ import annotations

import asyncio

import pytest

from zoff_async.scheduler import run_virtual
from zoff_async.scheduler.waiters import Waiters


def test_a_predicate_that_holds_is_not_waited_for():
    async def main():
        await Waiters().wait_until(lambda: True)

    run_virtual(main())


def test_waking_lets_those_go_whose_predicate_holds():
    async def main():
        waiters, values, log = Waiters(), set(), []

        async def wait(name):
            await waiters.wait_until(lambda: name in values)
            log.append(name)

        tasks = [asyncio.create_task(wait(name)) for name in "ab"]
        await asyncio.sleep(0)
        values.add("b")
        waiters.wake()
        await asyncio.sleep(0.1)
        assert log == ["b"]
        assert waiters
        values.add("a")
        waiters.wake()
        await asyncio.gather(*tasks)
        assert not waiters

    run_virtual(main())


def test_a_predicate_that_ceased_to_hold_is_waited_for_again():
    async def main():
        waiters, open_ = Waiters(), [False]
        task = asyncio.create_task(waiters.wait_until(lambda: open_[0]))
        await asyncio.sleep(0)
        open_[0] = True
        waiters.wake()
        open_[0] = False  # somebody was quicker
        await asyncio.sleep(1)
        assert not task.done()
        open_[0] = True
        waiters.wake()
        await task

    run_virtual(main())


def test_a_failure_wakes_everybody_and_stays():
    async def main():
        waiters, boom = Waiters(), ValueError("gone")
        tasks = [asyncio.create_task(waiters.wait_until(lambda: False)) for _ in range(2)]
        await asyncio.sleep(0)
        tasks[0].cancel()
        await asyncio.sleep(0)
        waiters.failure = boom
        waiters.wake()
        with pytest.raises(ValueError, match="gone"):
            await tasks[1]
        with pytest.raises(ValueError, match="gone"):
            await waiters.wait_until(lambda: True)

    run_virtual(main())
