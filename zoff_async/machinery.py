"""What an optimizer opens and closes: device, threads, staging, and the executor on its loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from zoff_async.bucket import Entry
from zoff_async.config import OffloadConfig
from zoff_async.cpu_ops import Kernel, Pool, available_cpus, make_landing
from zoff_async.device import Device, open_device
from zoff_async.handlers import Counters, Handlers
from zoff_async.intake import Intake, Receiver
from zoff_async.planning import Planner
from zoff_async.portal import Portal, SwitchInterval
from zoff_async.scheduler import Action, Executor, LiveStep, Span
from zoff_async.staging import Slots
from zoff_async.state import BucketState
from zoff_async.weights import Weights

logger = logging.getLogger("zoff_async")

#: Gradients that have been delivered may occupy so many times the largest bucket on the device.
MOST_HELD_BUCKETS = 2


class Machinery:
    """Opened as a whole or, on an error, not at all; ``close`` ends every thread and always returns.

    ``fit`` makes what depends on the buckets: staging slots, intake and handlers.
    """

    def __init__(
        self,
        config: OffloadConfig,
        kernel: Kernel,
        workers: int,
        planner: Planner,
        weights: Weights,
        counters: Counters,
        *,
        max_norm: float | None,
        receiver: Receiver,
        record: Callable[[Span], None] | None,
        on_failure: Callable[[BaseException], None],
    ) -> None:
        self._config = config
        self._kernel = kernel
        self._landing = make_landing(kernel.name)
        self._planner = planner
        self._weights = weights
        self._counters = counters
        self._max_norm = max_norm
        self._receiver = receiver
        self._on_failure = on_failure
        self._workers = workers
        self._record = record
        self._pid = os.getpid()

    def open(self, states: Sequence[BucketState], entries: Sequence[Entry]) -> None:
        """Open everything for these buckets."""
        with contextlib.ExitStack() as undo:
            self.open_device(entries)
            undo.callback(lambda: self.device.close())
            self.portal = Portal(self._config.event_loop, self._on_failure)
            undo.callback(self.portal.close)
            cpus = available_cpus() if self._config.cpu_affinity is None else self._config.cpu_affinity
            self.pool = Pool(self._workers, cpus or None)
            undo.callback(self.pool.close)
            self.fit(states)
            self.executor = Executor(
                {kind: partial(self._handle, kind) for kind in self._table},
                external=frozenset(self._planner.plan.external),
                record=self._record,
                bytes_of=self._bytes_of,
                on_failure=lambda error, live: self._on_failure(error),
                # A job waits behind each running one, so that no thread and no stream idles during a hand-over.
                ahead={"cpu": self._workers, "d2h": 1, "h2d": 1},
            )
            self.portal.run(self._start_executor)
            undo.pop_all()
        SwitchInterval.hold(self._config.switch_interval_s)

    def open_device(self, entries: Sequence[Entry]) -> None:
        """The device where all parameters are."""
        first = entries[0]
        for entry in entries:
            if entry.parameter.device != first.parameter.device:
                raise ValueError(
                    f"parameters must be on one device, got {first.name!r} on {first.parameter.device} and "
                    f"{entry.name!r} on {entry.parameter.device}: move the model, or use one optimizer a device"
                )
        self.device: Device = open_device(self._config.device, first.parameter.device)

    def fit(self, states: Sequence[BucketState]) -> None:
        """Staging, intake and handlers for these buckets."""
        buckets = [state.bucket for state in states]
        bound_bytes = MOST_HELD_BUCKETS * max(bucket.nbytes for bucket in buckets)
        self.intake = Intake(states, self.device, self._receiver, bound_bytes)
        planner = self._planner
        self.intake.max_waves = planner.declared_backwards if planner.adam_in_backward else None
        self.handlers = Handlers(
            portal=self.portal,
            device=self.device,
            pool=self.pool,
            kernel=self._kernel,
            landing=self._landing,
            states=states,
            downloads=Slots("D2H", self.device, buckets, planner.slots("d2h")),
            uploads=Slots("H2D", self.device, buckets, planner.slots("h2d")),
            intake=self.intake,
            weights=self._weights,
            counters=self._counters,
            max_norm=self._max_norm,
            wide_store=planner.accumulates,
            on_copied=self._note_progress_soon,
        )
        self._table = self.handlers.table()

    def unfit(self) -> None:
        """Give the staging back."""
        self.handlers.downloads.close()
        self.handlers.uploads.close()

    def close(self) -> None:
        """End every thread. What one of them raises is logged."""
        stop_executor = partial(self.portal.run, self._close_executor)
        for end in (stop_executor, self.pool.close, self.device.close, self.portal.close):
            try:
                end()
            except Exception:
                logger.exception("while closing an optimizer")
        SwitchInterval.release(self._config.switch_interval_s)

    @property
    def in_own_thread(self) -> bool:
        """Whether the calling thread is one of those that ``close`` joins."""
        return self.portal.here or threading.current_thread().name.startswith(("zoff-", "adam"))

    def note_progress(self) -> None:
        """On the loop: hooks may wait for room only while a copy is under way."""
        self.intake.set_stalled(not self.executor.lane_busy("d2h"))

    def _note_progress_soon(self) -> None:
        asyncio.get_running_loop().call_soon(self.note_progress)

    async def _start_executor(self) -> None:
        self._supervisor = asyncio.get_running_loop().create_task(self.executor.run(), name="zoff-executor")
        await asyncio.sleep(0)

    async def _close_executor(self) -> None:
        await self.executor.close()
        await asyncio.wait([self._supervisor])

    def _handle(self, kind: str, action: Action, live: LiveStep) -> Awaitable[tuple[float, float] | None]:
        return self._table[kind](action, live)

    def _bytes_of(self, action: Action) -> int:
        if action.bucket is None or action.kind not in ("d2h", "h2d"):
            return 0
        return self.handlers.states[action.bucket].bucket.nbytes
