"""A training machine whose numbers are hashes: any race changes the result, or is caught in the act.

Every action reads at its start and writes at its end. What is being written holds ``BUSY`` meanwhile, and
what was read must still be there at the end, so an edge that is missing shows even if the hash would not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from zoff_async.scheduler import Action, Executor, Layout, LiveStep, StepPlan, run_virtual

BUSY = object()


class Race(Exception):
    """Two actions touched the same thing at once."""


class FakeMachine:
    """Weights, gradients, slots, store and masters of a model of a few buckets."""

    def __init__(self, layout: Layout, plan: StepPlan, seconds: Callable[[Action], float]) -> None:
        self.layout, self.plan, self.seconds = layout, plan, seconds
        self.memory: dict[tuple, object] = {}
        for bucket, chunks in enumerate(layout.chunks):
            self.memory["weights", bucket] = tuple(("w", bucket, c) for c in range(chunks))
            for chunk in range(chunks):
                self.memory["master", bucket, chunk] = ("w", bucket, chunk)
        self.free = {staging.name: staging.slots for staging in plan.staging}
        self.reads_slot = next(s.freed_by for s in plan.staging if s.name == "d2h") == "adam"
        self.left: dict[tuple, int] = {}  # chunks that still write into an upload slot or read a copy slot
        self.norms: list[object] = []

    # Memory

    def read(self, *place: object) -> object:
        value = self.memory.get(place)
        if value is BUSY:
            raise Race(f"{place} is read while it is written")
        return value

    @contextmanager
    def writing(self, *place: object) -> Iterator[Callable[[object], None]]:
        if self.memory.get(place) is BUSY:
            raise Race(f"{place} is written twice at once")
        self.memory[place] = BUSY
        done: list[object] = []
        yield done.append
        self.memory[place] = done[0]

    def unchanged(self, value: object, *place: object) -> None:
        if self.memory.get(place) is not value:
            raise Race(f"{place} changed while it was read")

    def take(self, name: str) -> None:
        if not self.free[name]:
            raise Race(f"no {name} slot is free")
        self.free[name] -= 1

    # Actions

    async def fwd(self, action: Action, step: LiveStep) -> None:
        weights = self.read("weights", action.bucket)
        await self.sleep(action)
        self.unchanged(weights, "weights", action.bucket)
        self.memory["read", step.index, action.backward, action.bucket] = weights

    async def bwd(self, action: Action, step: LiveStep) -> None:
        weights = self.read("weights", action.bucket)
        assert weights is self.memory["read", step.index, action.backward, action.bucket]
        with self.writing("grad", step.index, action.backward, action.bucket) as write:
            await self.sleep(action)
            self.unchanged(weights, "weights", action.bucket)
            write(gradient(weights, step.index, action.backward))

    async def d2h(self, action: Action, step: LiveStep) -> None:
        place = step.index, action.backward, action.bucket
        grad = self.read("grad", *place)
        assert grad is not None
        self.take("d2h")
        with self.writing("slot", *place) as write:
            await self.sleep(action)
            write(grad)

    async def acc(self, action: Action, step: LiveStep) -> None:
        place = step.index, action.backward, action.bucket
        arrived = self.read("slot", *place)
        assert arrived is not None
        if self.reads_slot:
            await self.sleep(action)
            return
        before = self.read("store", action.bucket)
        with self.writing("store", action.bucket) as write:
            await self.sleep(action)
            write(added(before if action.backward else None, arrived, step.index))
        self.free["d2h"] += 1

    async def norm(self, action: Action, step: LiveStep) -> None:
        if not self.reads_slot:
            stored = [self.read("store", bucket) for bucket in range(self.layout.buckets)]
        await self.sleep(action)
        if not self.reads_slot:
            self.norms.append(tuple(stored))

    async def adam(self, action: Action, step: LiveStep) -> None:
        bucket, chunks = action.bucket, self.layout.chunks[action.bucket]
        place = ("slot", step.index, 0, bucket) if self.reads_slot else ("store", bucket)
        grad = self.read(*place)
        if self.reads_slot:
            grad = added(None, grad, step.index)
        master = self.read("master", bucket, action.chunk)
        if self.left.setdefault((step.index, bucket), chunks) == chunks:
            self.take("h2d")
        self.left[step.index, bucket] -= 0.5  # begun
        with self.writing("master", bucket, action.chunk) as write:
            await self.sleep(action)
            if not self.reads_slot:
                self.unchanged(grad, *place)
            write(updated(master, grad))
        self.left[step.index, bucket] -= 0.5
        if not self.left[step.index, bucket] and self.reads_slot:
            self.free["d2h"] += 1

    async def h2d(self, action: Action, step: LiveStep) -> None:
        bucket = action.bucket
        masters = [self.read("master", bucket, chunk) for chunk in range(self.layout.chunks[bucket])]
        with self.writing("weights", bucket) as write:
            await self.sleep(action)
            for chunk, master in enumerate(masters):
                self.unchanged(master, "master", bucket, chunk)
            write(tuple(masters))
        self.free["h2d"] += 1

    async def sleep(self, action: Action) -> None:
        await asyncio.sleep(self.seconds(action))

    # The loop

    def train(self, steps: int, waves: int) -> tuple[object, ...]:
        """The weights of every bucket after ``steps`` steps of ``waves`` backwards."""
        handlers = {kind: getattr(self, kind) for kind in self.plan.lane_of}
        executor = Executor(handlers)

        async def main() -> None:
            supervisor = asyncio.create_task(executor.run())
            await asyncio.sleep(0)
            for _ in range(steps):
                await executor.wait_room()
                step = executor.open(self.plan)
                for _ in range(waves - 1):
                    step.backward()
                step.close()
            await executor.wait_idle()
            await executor.close()
            await supervisor

        run_virtual(main(), waiting=executor.waiting)
        for staging in self.plan.staging:
            assert self.free[staging.name] == staging.slots
        return tuple(self.memory["weights", bucket] for bucket in range(self.layout.buckets))


def gradient(weights: object, step: int, wave: int) -> object:
    return hash((weights, step, wave))


def added(before: object, arrived: object, step: int) -> object:
    return ("sum", step, hash((before, arrived)))


def updated(master: object, grad: object) -> object:
    """A delayed update has nothing to apply in the first step."""
    return master if grad is None else hash((master, grad))


def by_hand(layout: Layout, steps: int, waves: int, stale: int = 0) -> tuple[object, ...]:
    """The same training as a plain loop; ``stale=1`` applies the gradient of the step before."""
    masters = {b: [("w", b, c) for c in range(n)] for b, n in enumerate(layout.chunks)}
    pending: dict[int, object] = {}
    for step in range(steps):
        weights = {b: tuple(found) for b, found in masters.items()}
        store: dict[int, object] = {}
        for wave in range(waves):
            for b in masters:
                store[b] = added(store.get(b), gradient(weights[b], step, wave), step)
        applied = pending if stale else store
        pending = store
        for b, found in masters.items():
            masters[b] = [updated(master, applied.get(b)) for master in found]
    return tuple(tuple(masters[b]) for b in range(layout.buckets))
