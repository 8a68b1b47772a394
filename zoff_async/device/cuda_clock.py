"""When something happened on the accelerator, as a time of the host's clock.

Note [Device times on the host's clock]
    A timing event knows only how far it lies from another event, in float32 milliseconds. So one event, the anchor, is
    recorded on an empty stream of its own and waited for by spinning: it lies between two readings of the host's clock
    some ten microseconds apart. Everything else is told from the anchor. The two clocks drift apart by some
    microseconds a second, and float32 keeps a microsecond only up to sixteen seconds: whoever finds the anchor older
    than a few seconds takes a new one, some 0.1 ms of a waiting thread. The stream is empty, so the anchor never waits
    for anybody. An event that was reached before the anchor is told backwards from it.
"""

from __future__ import annotations

import time

from zoff_async.device.surface import Event, Surface

#: Seconds after which an anchor is old.
_ANCHOR_LIFE_S = 5.0
#: An anchor is the tightest of this many.
_TRIES = 3


class DeviceClock:
    """Maps timing events of one accelerator to ``time.perf_counter`` seconds. Read from any thread."""

    def __init__(self, surface: Surface) -> None:
        self._surface = surface
        # Overlaps with everything: nothing but anchors is ever given to it.
        self._stream = surface.make_stream()
        self._anchor = self._take_anchor()

    def seconds_at(self, event: Event) -> float:
        """When ``event`` was reached. It must have been."""
        anchor, anchor_s = self._anchor
        if time.perf_counter() - anchor_s <= _ANCHOR_LIFE_S:
            return anchor_s + anchor.elapsed_time(event) * 1e-3
        self._anchor = anchor, anchor_s = self._take_anchor()
        return anchor_s - event.elapsed_time(anchor) * 1e-3

    def _take_anchor(self) -> tuple[Event, float]:
        return min((self._try_anchor() for _ in range(_TRIES)), key=lambda tried: tried[0])[1]

    def _try_anchor(self) -> tuple[float, tuple[Event, float]]:
        event = self._surface.make_event(sleeping=False)
        before_s = time.perf_counter()
        event.record(self._stream)
        event.synchronize()
        after_s = time.perf_counter()
        return after_s - before_s, (event, (before_s + after_s) / 2)
