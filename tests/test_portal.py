"""The loop in its own thread: order, results, errors, closing, forks, and the switch interval."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Iterator

import pytest

from tests.runtime.scenes import PATIENCE_S, Beside, within
from zoff_async.errors import ClosedError, ScheduleError
from zoff_async.portal import Portal, SwitchInterval, make_loop


@pytest.fixture(params=["asyncio", "uvloop"])
def portal(request: pytest.FixtureRequest) -> Iterator[Portal]:
    made = Portal(request.param)
    yield made
    within(PATIENCE_S, made.close)


def test_a_coroutine_runs_on_the_loops_thread_and_gives_its_result(portal):
    async def where() -> tuple[str, bool]:
        return threading.current_thread().name, asyncio.get_running_loop() is portal.loop

    assert portal.run(where) == ("zoff-portal", True)
    assert not portal.here


def test_what_a_coroutine_raises_is_raised_here(portal):
    error = KeyError("mine")

    async def fails() -> None:
        raise error

    with pytest.raises(KeyError) as caught:
        portal.run(fails)
    assert caught.value is error


def test_posted_calls_run_in_order_and_before_what_runs_after_them(portal):
    seen: list[int] = []

    async def read() -> list[int]:
        return list(seen)

    for i in range(200):
        portal.post(seen.append, i)

    assert portal.run(read) == list(range(200))


def test_calls_of_one_thread_keep_their_order_beside_those_of_another(portal):
    seen: list[tuple[str, int]] = []

    def burst(name: str) -> None:
        for i in range(200):
            portal.post(seen.append, (name, i))

    others = [Beside(lambda name=name: burst(name)) for name in "ab"]
    for other in others:
        other.result()

    async def read() -> list[tuple[str, int]]:
        return list(seen)

    told = portal.run(read)
    assert [i for name, i in told if name == "a"] == list(range(200))
    assert [i for name, i in told if name == "b"] == list(range(200))


def test_one_bad_call_does_not_swallow_the_others_and_is_told():
    told: list[BaseException] = []
    portal = Portal("asyncio", on_error=told.append)
    seen: list[int] = []
    error = ZeroDivisionError("in a posted call")

    def fails() -> None:
        raise error

    async def read() -> list[int]:
        return list(seen)

    portal.post(seen.append, 1)
    portal.post(fails)
    portal.post(seen.append, 2)
    assert portal.run(read) == [1, 2]
    assert told == [error]
    portal.close()


def test_the_loops_own_thread_may_not_wait_for_the_loop(portal):
    async def never() -> None:
        raise AssertionError

    async def waits_for_itself() -> str:
        with pytest.raises(ScheduleError) as caught:
            portal.run(never)
        return str(caught.value)

    assert portal.run(waits_for_itself) == (
        "the loop's own thread cannot wait for the loop: call this from another thread"
    )


def test_closing_runs_what_was_posted_and_refuses_what_comes_later():
    portal = Portal("asyncio")
    seen: list[int] = []
    for i in range(50):
        portal.post(seen.append, i)
    portal.close()
    portal.close()
    assert seen == list(range(50))

    portal.post(seen.append, -1)
    assert -1 not in seen

    async def late() -> None:
        raise AssertionError

    with pytest.raises(ClosedError) as caught:
        portal.run(late)
    assert str(caught.value) == "the event loop of this optimizer has been closed"
    assert portal.loop.is_closed()


def test_closing_while_somebody_waits_does_not_leave_them_waiting():
    """A caller whose coroutine has not ended when the loop is stopped gets an answer."""
    portal = Portal("asyncio")
    entered = threading.Event()

    async def for_ever() -> None:
        entered.set()
        await portal.loop.create_future()

    waiting = Beside(lambda: portal.run(for_ever))
    assert entered.wait(PATIENCE_S)
    within(PATIENCE_S, portal.close)
    with pytest.raises(ClosedError):
        waiting.result(5.0)


def test_the_loop_can_be_closed_from_its_own_thread():
    portal = Portal("asyncio")
    portal.post(portal.close)
    portal._thread.join(PATIENCE_S)

    assert not portal._thread.is_alive()


def test_the_loop_that_is_asked_for_is_made():
    import uvloop

    for name, kind in (("uvloop", uvloop.Loop), ("auto", uvloop.Loop)):
        loop = make_loop(name)
        assert isinstance(loop, kind)
        loop.close()
    loop = make_loop("asyncio")
    assert not isinstance(loop, uvloop.Loop)
    loop.close()


def test_a_loop_that_is_not_installed_is_refused_by_name(monkeypatch):
    monkeypatch.setitem(sys.modules, "uvloop", None)
    loop = make_loop("auto")
    assert isinstance(loop, asyncio.AbstractEventLoop)
    loop.close()
    with pytest.raises(ValueError) as caught:
        make_loop("uvloop")

    assert str(caught.value) == "event_loop='uvloop' needs uvloop: pip install uvloop, or event_loop='asyncio'"


def test_a_process_that_was_forked_later_is_told(portal, monkeypatch):
    here = os.getpid()

    async def nothing() -> None:
        return None

    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: here + 1)
        with pytest.raises(ScheduleError) as caught:
            portal.run(nothing)
    assert str(caught.value) == (
        "this optimizer was made in another process: its threads do not exist after a fork; make a new optimizer "
        "in the "
        "child"
    )


class TestSwitchInterval:
    def test_it_is_set_while_held_and_put_back_by_the_last_one(self):
        before_s = sys.getswitchinterval()
        SwitchInterval.hold(1e-3)
        assert sys.getswitchinterval() == pytest.approx(1e-3)
        SwitchInterval.hold(5e-4)
        assert sys.getswitchinterval() == pytest.approx(5e-4)
        SwitchInterval.release(1e-3)
        assert sys.getswitchinterval() == pytest.approx(5e-4)
        SwitchInterval.release(5e-4)
        assert sys.getswitchinterval() == before_s

    def test_a_shorter_one_of_the_users_own_stays(self):
        before_s = sys.getswitchinterval()
        a_little_s = 3e-6  # the interpreter cuts to whole microseconds, each time anew
        try:
            sys.setswitchinterval(1e-4)
            SwitchInterval.hold(5e-4)
            assert sys.getswitchinterval() == pytest.approx(1e-4, abs=a_little_s)
            SwitchInterval.release(5e-4)
            assert sys.getswitchinterval() == pytest.approx(1e-4, abs=a_little_s)
        finally:
            sys.setswitchinterval(before_s)

    def test_none_leaves_it_alone(self):
        before_s = sys.getswitchinterval()
        SwitchInterval.hold(None)
        assert sys.getswitchinterval() == before_s
        SwitchInterval.release(None)
        assert sys.getswitchinterval() == before_s
