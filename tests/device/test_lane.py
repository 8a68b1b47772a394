"""The FIFO thread behind the host device."""

from __future__ import annotations

import threading

import pytest

from zoff_async.device.lane import LaneThread
from zoff_async.errors import ClosedError


def test_a_closed_lane_drops_what_has_not_begun_and_tells_it() -> None:
    """The copy under way is finished, the one behind it is told ClosedError, and close returns after both."""
    lane = LaneThread("zoff-test")
    begun, may_end = threading.Event(), threading.Event()
    told: list[BaseException | None] = []

    def long_copy() -> None:
        begun.set()
        assert may_end.wait(20)

    def done(error: BaseException | None, start_s: float, end_s: float) -> None:
        told.append(error)

    lane.submit(long_copy, done)
    dropped = lane.submit(lambda: pytest.fail("a copy began after close"), done)
    assert begun.wait(20)
    closing = threading.Thread(target=lane.close)
    closing.start()
    while not lane._closed:
        pass
    may_end.set()
    closing.join()
    assert told[0] is None
    assert isinstance(told[1], ClosedError)
    assert str(told[1]) == "copy dropped: zoff-test was closed before it started"
    with pytest.raises(ClosedError):
        dropped.make_current_stream_wait()
    with pytest.raises(ClosedError) as caught:
        lane.submit(lambda: None, done)
    assert str(caught.value) == "cannot enqueue a copy: zoff-test is closed"


def test_a_callback_that_raises_is_logged_and_the_lane_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    lane = LaneThread("zoff-test")
    told = threading.Event()

    def broken(error: BaseException | None, start_s: float, end_s: float) -> None:
        raise KeyError("gone")

    lane.submit(lambda: None, broken)
    lane.submit(lambda: None, lambda error, start_s, end_s: told.set())
    assert told.wait(20)
    lane.close()
    assert [record.message for record in caplog.records] == ["zoff-test: the callback of a finished copy raised"]


def test_a_callback_may_close_its_own_lane() -> None:
    """Closing from the lane's thread does not wait for itself."""
    lane = LaneThread("zoff-test")
    closed = threading.Event()

    def close(error: BaseException | None, start_s: float, end_s: float) -> None:
        lane.close()
        closed.set()

    lane.submit(lambda: None, close)
    assert closed.wait(20)
    lane.close()
