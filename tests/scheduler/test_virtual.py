"""The loop in virtual time."""

from __future__ import annotations

import asyncio
import time

import pytest

from zoff_async.errors import DeadlockError
from zoff_async.scheduler import VirtualClockLoop, run_virtual


def test_time_jumps_to_the_next_timer():
    async def main():
        loop = asyncio.get_running_loop()
        log = []

        async def sleeper(seconds):
            await asyncio.sleep(seconds)
            log.append(loop.time())

        await asyncio.gather(sleeper(600), sleeper(0.25), sleeper(1e6))
        return log

    start_s = time.perf_counter()
    assert run_virtual(main()) == [0.25, 600, 1e6]
    assert time.perf_counter() - start_s < 60


def test_timers_of_one_instant_fire_in_one_turn():
    async def main():
        loop = asyncio.get_running_loop()
        await asyncio.gather(*(asyncio.sleep(0.1 + 0.2) for _ in range(3)), asyncio.sleep(0.3))
        return loop.time()

    assert run_virtual(main()) == pytest.approx(0.3, abs=1e-12)


def test_the_result_and_the_exception_come_back():
    async def result():
        return 3

    async def failure():
        raise LookupError("lost")

    assert run_virtual(result()) == 3
    with pytest.raises(LookupError, match="lost"):
        run_virtual(failure())


def test_when_nothing_can_move_the_tasks_that_wait_are_named():
    async def main():
        await asyncio.sleep(2)
        forever = asyncio.get_running_loop().create_future()
        asyncio.create_task(asyncio.wait([forever]), name="copy")  # noqa: RUF006 - never ends
        await forever

    with pytest.raises(DeadlockError) as caught:
        run_virtual(main(), waiting=lambda: ["adam:3.0 waits for norm"])
    assert str(caught.value) == (
        "nothing can move any more at 2 s, and no timer is armed\n"
        "  adam:3.0 waits for norm\n"
        "  tasks that wait: copy, main"
    )


def test_a_long_story_is_cut():
    async def main():
        await asyncio.get_running_loop().create_future()

    with pytest.raises(DeadlockError) as caught:
        run_virtual(main(), waiting=lambda: [f"line {i}" for i in range(40)])
    assert str(caught.value).splitlines()[-3:] == ["  line 11", "  ... and 28 more", "  tasks that wait: main"]


def test_after_a_deadlock_every_task_is_cancelled():
    seen = []

    async def main():
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            seen.append("cleaned up")

    with pytest.raises(DeadlockError):
        run_virtual(main())
    assert seen == ["cleaned up"]


async def test_it_runs_beside_a_running_loop():
    outer, me = asyncio.get_running_loop(), asyncio.current_task()

    async def main():
        assert asyncio.get_running_loop() is not outer
        await asyncio.sleep(60)
        return asyncio.get_running_loop().time()

    assert run_virtual(main()) == 60
    assert asyncio.get_running_loop() is outer
    assert asyncio.current_task() is me
    await asyncio.sleep(0)


async def test_beside_a_running_loop_a_failure_leaves_that_loop_whole():
    outer = asyncio.get_running_loop()

    async def main():
        await asyncio.get_running_loop().create_future()

    with pytest.raises(DeadlockError):
        run_virtual(main())
    assert asyncio.get_running_loop() is outer
    await asyncio.sleep(0)


def test_the_loop_can_be_used_by_hand():
    loop = VirtualClockLoop()
    try:
        loop.run_until_complete(asyncio.sleep(5))
        assert loop.time() == 5
    finally:
        loop.close()
