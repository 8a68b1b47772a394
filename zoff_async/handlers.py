"""What each kind of action does: copies on the device, sums and Adam in the pool, decisions on the loop.

All of it runs on the loop's thread, except ``_land`` and the kernels, which run in the pool. A handler that is
cancelled waits for the work it has handed out, so when a step has ended nothing of it is running.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from zoff_async.bucket import Entry
from zoff_async.cpu_ops import BoundUpdate, Kernel, Landing, Pool, Scalars
from zoff_async.device import Device, Done, Marker, Transfer
from zoff_async.errors import NonFiniteGradientError
from zoff_async.intake import Arrival, Intake
from zoff_async.portal import Portal
from zoff_async.scheduler import Action, Handler, LiveStep
from zoff_async.staging import Slots
from zoff_async.state import BucketState
from zoff_async.step import Piece, Step, total_norm
from zoff_async.trace import named
from zoff_async.weights import Weights, finite

T = TypeVar("T")


@dataclass
class Counters:
    """What ``statistics()`` tells that nothing else knows."""

    steps: int = 0
    skipped_steps: int = 0
    d2h_bytes: int = 0
    h2d_bytes: int = 0


@dataclass
class Handlers:
    """The table kind -> coroutine, and what those coroutines work with."""

    portal: Portal
    device: Device
    pool: Pool
    kernel: Kernel
    landing: Landing
    states: Sequence[BucketState]
    downloads: Slots
    uploads: Slots
    intake: Intake
    weights: Weights
    counters: Counters
    max_norm: float | None
    wide_store: bool  # gradients accumulate in fp32 from the first one on
    on_copied: Callable[[], None]
    _bound: dict[tuple[int, ...], BoundUpdate] = field(default_factory=dict)

    def __post_init__(self) -> None:
        entries = [entry for state in self.states for entry in state.bucket.entries]
        self._norm_order = np.argsort([entry.index for entry in entries], kind="stable")
        self._names = [entries[i].name for i in self._norm_order]
        self._most_bound = 8 * max(self.downloads.count, self.uploads.count)
        self._most_bound *= 1 + sum(state.bucket.chunks for state in self.states)

    def release_slots(self, step: Step) -> None:
        """Take back the slots of a step that was discarded: nothing of it is running."""
        for lease in step.direct.values():
            self.downloads.release(lease)
        step.direct.clear()
        if step.update is not None:
            for lease in step.update.uploads.values():
                self.uploads.release(lease)
            step.update.uploads.clear()

    def table(self) -> dict[str, Handler]:
        return {"d2h": self.d2h, "acc": self.acc, "norm": self.norm, "adam": self.adam, "h2d": self.h2d}

    # --- gradients ---

    async def d2h(self, action: Action, live: LiveStep) -> tuple[float, float] | None:
        """A bucket's gradients go into a staging slot."""
        arrival = _step(live).arrivals[_bucket(action), action.backward]
        if not arrival.gradients:
            self.on_copied()
            return None
        lease = arrival.lease = self.downloads.acquire(arrival.bucket)
        views = [lease.views[position] for position in arrival.positions]
        after = _known(arrival.marker)
        times = await self._until_done(
            lambda done: self.device.copy_to_host(arrival.gradients, views, lease.flat, after, done)
        )
        arrival.gradients = []  # the copy is done: the device may have the memory back
        self.counters.d2h_bytes += arrival.nbytes
        self.intake.copied(arrival.nbytes)
        self.on_copied()
        return times

    async def acc(self, action: Action, live: LiveStep) -> tuple[float, float] | None:
        """A staging slot goes into the gradient store; its squares and its finiteness are known afterwards."""
        step, bucket = _step(live), _bucket(action)
        arrival = step.arrivals.pop((bucket, action.backward))
        lease = arrival.lease
        if lease is None:
            return None
        keep = not _read_by_adam(live)
        job = partial(self._land, self.states[bucket], arrival, keep=keep)
        times = await self.run_in_pool(named(str(action), job))
        if keep:
            self.downloads.release(lease)
        else:
            step.direct[bucket] = lease
        self.intake.landed(bucket)
        return times

    def _land(self, state: BucketState, arrival: Arrival, *, keep: bool) -> None:
        bucket = arrival.bucket
        staged = _known(arrival.lease).flat
        store = None
        if keep:
            wide = self.wide_store or any(arrival.adds)
            store = state.ready_store(torch.float32 if wide else bucket.dtype)
        for first, last, add, factor in arrival.runs():
            start, stop = int(bucket.bounds[first]), int(bucket.bounds[last])
            if start == stop:  # parameters without elements
                state.squares[first:last] = 0.0
                continue
            target = None if store is None else store[start:stop]
            if target is not None and add and factor != 1.0:
                target.mul_(factor)
            self.landing.land(
                staged[start:stop],
                target,
                bucket.bounds[first : last + 1] - start,
                state.squares[first:last],
                add=add and target is not None,
            )

    def squares(self, piece: Tensor, out: np.ndarray) -> None:
        """The sum of squares of a flat piece, into a (1,) fp64 array, in the order of the landing."""
        if piece.numel():
            self.landing.land(piece, None, np.array([0, piece.numel()], dtype=np.int64), out, add=False)
        else:
            out[:] = 0.0

    # --- the norm ---

    async def norm(self, action: Action, live: LiveStep) -> None:
        """The global norm, the clip factor, and whether the step is skipped."""
        step = _step(live)
        step.norm, bad = total_norm(self.states, step, self._norm_order, self._names)
        if bad is not None and step.moved:
            raise _poison(bad)
        step.nonfinite = None if step.overflowed else bad
        step.skip = step.skip or step.overflowed or bad is not None
        if self.max_norm is not None and not step.skip:
            told = torch.tensor(step.norm, dtype=torch.float32)
            step.clip = float(torch.clamp(self.max_norm / (told + 1e-6), max=1.0))  # torch's own operations: its bits
        if any(present.any() for present in step.present):
            self.counters.steps += not step.skip
            self.counters.skipped_steps += step.skip
        step.norm_known.set()

    # --- the update ---

    async def adam(self, action: Action, live: LiveStep) -> tuple[float, float] | None:
        """One chunk's update; the new weights go into an upload slot."""
        step, bucket, chunk = _step(live).update, _bucket(action), _known(action.chunk)
        if step is None:
            return None
        state = self.states[bucket]
        chunks = step.begun.get(bucket)
        if chunks is None:
            chunks = self._begin_bucket(step, state)
        times = None
        if chunks and chunks[chunk]:
            job = partial(_run_all, self._bind(step, state, chunks[chunk]))
            times = await self.run_in_pool(named(str(action), job))
        step.chunks_left[bucket] -= 1
        if not step.chunks_left[bucket] and bucket in step.direct:
            self.downloads.release(step.direct.pop(bucket))
        return times

    def _begin_bucket(self, step: Step, state: BucketState) -> list[list[Piece]]:
        bucket = state.bucket.index
        step.chunks_left[bucket] = state.bucket.chunks
        present = step.present[bucket]
        if not step.skip and not finite(state, present):  # Adam inside backward: the norm is not known yet
            if step.moved:
                bad = next(p for p in np.flatnonzero(present) if not np.isfinite(state.squares[p]))
                raise _poison(state.bucket.entries[bad].name)
            step.skip = True
        if step.skip or not present.any():
            step.begun[bucket] = []
            return []
        step.moved.add(bucket)
        step.uploads[bucket] = self.uploads.acquire(state.bucket)
        return step.begin_bucket(state, self.kernel.rule)

    def _bind(self, step: Step, state: BucketState, pieces: list[Piece]) -> list[tuple[BoundUpdate, Scalars]]:
        """The kernels of a chunk's pieces, made once for each place they read and write."""
        bucket = state.bucket.index
        gradients = step.direct[bucket].flat if bucket in step.direct else _known(state.gradients)
        out = step.uploads[bucket].flat
        bound = []
        for start, stop, scalars in pieces:
            key = (bucket, start, stop, gradients.data_ptr(), gradients.itemsize, out.data_ptr())
            update = self._bound.get(key)
            if update is None:
                if len(self._bound) >= self._most_bound:
                    self._bound.clear()
                update = self._bound[key] = self.kernel.bind(
                    state.master[start:stop],
                    tuple(moment[start:stop] for moment in state.moments),
                    gradients[start:stop],
                    out[start:stop],
                )
            bound.append((update, scalars))
        return bound

    # --- uploads ---

    async def h2d(self, action: Action, live: LiveStep) -> tuple[float, float] | None:
        """A bucket's new weights go to the device; parameters without a gradient are not touched."""
        own, bucket = _step(live), _bucket(action)
        lease = None if own.update is None else own.update.uploads.pop(bucket, None)
        times = None
        if own.update is not None and lease is not None:
            present = own.update.present[bucket]
            entries = [e for e in self.states[bucket].bucket.entries if present[e.position]]
            for entry in entries:
                entry.expect_write()
            after = own.markers.get(bucket) or self.device.mark()
            views = [lease.views[entry.position] for entry in entries]
            upload = partial(self._upload, own, entries, lease.flat, views, after)
            times = await self._until_done(upload)
            self.counters.h2d_bytes += sum(view.nbytes for view in views)
            self.uploads.release(lease)
        self.weights.uploaded(own, bucket)
        return times

    def _upload(
        self,
        own: Step,
        entries: list[Entry],
        flat: Tensor,
        views: list[Tensor],
        after: Marker,
        done: Done,
    ) -> Transfer:
        def then() -> None:
            for entry in entries:
                entry.note_fingerprint()

        targets = [entry.parameter for entry in entries]
        transfer = self.device.copy_to_device(flat, views, targets, after, done, then)
        self.weights.enqueued(own, entries[0].bucket.index, transfer)
        return transfer

    # --- work of other threads ---

    async def run_in_pool(self, job: Callable[[], None]) -> tuple[float, float]:
        """Run ``job`` in the Adam pool; its start and end."""
        return await self._until_done(partial(self.pool.submit, job))

    async def _until_done(self, start: Callable[[Done], object]) -> tuple[float, float]:
        """Start work of another thread and wait for it; when cancelled, wait still, then be cancelled."""
        wait = _Wait(self.portal)
        started = start(wait.done)
        try:
            return await wait.future
        except asyncio.CancelledError:
            await wait.wait_over()
            raise
        finally:
            del started  # a transfer holds its tensors until here


class _Wait:
    """One job of another thread, as the loop waits for it."""

    def __init__(self, portal: Portal) -> None:
        self._portal = portal
        self._over = False
        self._late: asyncio.Future[None] | None = None
        self.future: asyncio.Future[tuple[float, float]] = portal.loop.create_future()

    def done(self, error: BaseException | None, start_s: float, end_s: float) -> None:
        self._portal.post(self._settle, error, start_s, end_s)

    def _settle(self, error: BaseException | None, start_s: float, end_s: float) -> None:
        self._over = True
        if self._late is not None:
            self._late.set_result(None)
        elif self.future.cancelled():
            return
        elif error is not None:
            self.future.set_exception(error)
        else:
            self.future.set_result((start_s, end_s))

    async def wait_over(self) -> None:
        if self._over:
            return
        self._late = self._portal.loop.create_future()
        while not self._over:
            try:
                await asyncio.shield(self._late)
            except asyncio.CancelledError:
                continue


def _step(live: LiveStep) -> Step:
    assert isinstance(live.context, Step)
    return live.context


def _bucket(action: Action) -> int:
    return _known(action.bucket)


def _known(value: T | None) -> T:
    assert value is not None
    return value


def _read_by_adam(live: LiveStep) -> bool:
    """Whether Adam reads the staging slots itself, so that there is no gradient store."""
    return any(staging.name == "d2h" and staging.freed_by == "adam" for staging in live.plan.staging)


def _poison(name: str) -> NonFiniteGradientError:
    return NonFiniteGradientError(
        f"the gradient of {name!r} is not finite, and Adam inside backward has already updated other parameters"
    )


def _run_all(bound: list[tuple[BoundUpdate, Scalars]]) -> None:
    for update, scalars in bound:
        update.run(scalars)
