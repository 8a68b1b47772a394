"""Device times on the host's clock, with both clocks in the test's hand."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from zoff_async.device import cuda_clock
from zoff_async.device.cuda_clock import DeviceClock


class Clocks:
    """A host clock and a device clock that starts elsewhere and runs a little fast."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, delays_s: tuple[float, ...]) -> None:
        self.host_s = 100.0
        self.rate = 1.0 + 20e-6
        self.delays_s = itertools.cycle(delays_s)
        self.anchors = 0
        self.refuse_backwards = False
        monkeypatch.setattr(cuda_clock.time, "perf_counter", lambda: self.host_s)

    def make_stream(self) -> str:
        return "clock"

    def make_event(self, *, sleeping: bool) -> ClockEvent:
        assert not sleeping, "an anchor that sleeps is told late"
        return ClockEvent(self)


class ClockEvent:
    def __init__(self, clocks: Clocks) -> None:
        self.clocks = clocks

    def record(self, stream: Any) -> None:
        self.clocks.anchors += stream == "clock"
        delay_s = next(self.clocks.delays_s)
        self.clocks.host_s += delay_s / 2
        self.device_s = self.clocks.host_s * self.clocks.rate - 7.0
        self.clocks.host_s += delay_s / 2

    def synchronize(self) -> None:
        return None

    def elapsed_time(self, end: ClockEvent) -> float:
        assert not (self.clocks.refuse_backwards and end.device_s < self.device_s), "the end lies before the start"
        return (end.device_s - self.device_s) * 1e3


def at(clocks: Clocks, host_s: float) -> ClockEvent:
    event = ClockEvent(clocks)
    event.device_s = host_s * clocks.rate - 7.0
    return event


def test_an_event_is_told_in_the_hosts_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = Clocks(monkeypatch, (10e-6,))
    clock = DeviceClock(clocks)  # type: ignore[arg-type]
    assert clock.seconds_at(at(clocks, 100.5)) == pytest.approx(100.5, abs=20e-6)


def test_the_anchor_is_the_tightest_of_three(monkeypatch: pytest.MonkeyPatch) -> None:
    """A try during which the host was away is not believed."""
    clocks = Clocks(monkeypatch, (4e-3, 10e-6, 2e-3))
    clock = DeviceClock(clocks)  # type: ignore[arg-type]
    assert clocks.anchors == 3
    assert clock.seconds_at(at(clocks, 100.01)) == pytest.approx(100.01, abs=5e-6)


def test_an_old_anchor_is_renewed_so_that_drift_does_not_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    """After an hour at 20 us a second the first anchor alone would be 72 ms off."""
    clocks = Clocks(monkeypatch, (10e-6,))
    clock = DeviceClock(clocks)  # type: ignore[arg-type]
    clocks.host_s += 4.0
    clock.seconds_at(at(clocks, clocks.host_s))
    assert clocks.anchors == 3, "a young anchor is kept"
    clocks.host_s += 3600.0
    ended_s = clocks.host_s - 0.25
    assert clock.seconds_at(at(clocks, ended_s)) == pytest.approx(ended_s, abs=20e-6)
    assert clocks.anchors == 6
    assert clock.seconds_at(at(clocks, clocks.host_s + 1.0)) == pytest.approx(clocks.host_s + 1.0, abs=30e-6)
    assert clocks.anchors == 6


def test_an_event_is_never_measured_against_an_anchor_that_came_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Elapsed time is asked for from the earlier event to the later one: the library promises nothing else."""
    clocks = Clocks(monkeypatch, (10e-6,))
    clock = DeviceClock(clocks)  # type: ignore[arg-type]
    ended = at(clocks, clocks.host_s + 50.0)
    clocks.host_s += 51.0
    clocks.refuse_backwards = True
    assert clock.seconds_at(ended) == pytest.approx(clocks.host_s - 1.0, abs=60e-6)
