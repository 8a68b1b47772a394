"""Gradients on their way from autograd to the host, as the callers' threads see them.

A hook a parameter takes each gradient as it is accumulated and leaves a stand-in as ``p.grad``. When a bucket has all
of its gradients (or its backward ends) they are delivered together as an `Arrival`. One wave is one backward: every
bucket arrives once in it, perhaps with nothing. A parameter that fires again before the wave has ended (a module
checkpointed reentrantly and used twice) opens the next one, so a wave never holds two gradients of one parameter.

Everything here happens in the order of the callers' calls: whether a gradient is added or replaces, what is present,
which factor applies. The copies and sums follow later, in the same order.
"""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from zoff_async.bucket import Bucket, Entry
from zoff_async.device import Device, Marker
from zoff_async.errors import GradientError
from zoff_async.gradient import GradientStandIn, next_stand_in
from zoff_async.staging import Lease
from zoff_async.state import BucketState


@dataclass(eq=False)
class Arrival:
    """One bucket's gradients of one wave, and what is to be done with each."""

    bucket: Bucket
    wave: int
    positions: list[int] = field(default_factory=list)  # entries that have a gradient in this wave
    gradients: list[Tensor] = field(default_factory=list)  # on the device, in the order of the positions
    adds: list[bool] = field(default_factory=list)  # add to what is stored (else replace it)
    factors: list[float] = field(default_factory=list)  # what is stored is first multiplied by this
    nbytes: int = 0
    marker: Marker | None = None
    present: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.bool_))  # after this arrival
    factor: np.ndarray = field(default_factory=lambda: np.ones(0))
    lease: Lease | None = None  # the staging slot, from the copy until it has been read
    _taken: set[int] = field(default_factory=set)

    def holds(self, position: int) -> bool:
        """Whether an entry has a gradient in this arrival."""
        return position in self._taken

    def put(self, position: int, gradient: Tensor, *, add: bool, factor: float) -> None:
        """Take in one entry's gradient."""
        self._taken.add(position)
        self.positions.append(position)
        self.gradients.append(gradient)
        self.adds.append(add)
        self.factors.append(factor)
        self.nbytes += gradient.nbytes

    def remove(self, position: int) -> None:
        """Drop one entry's gradient again."""
        self._taken.discard(position)
        at = self.positions.index(position)
        self.nbytes -= self.gradients[at].nbytes
        for name in _MEMBERS:
            del getattr(self, name)[at]

    def sort(self) -> None:
        """Put the members into the order of their positions."""
        order = sorted(range(len(self.positions)), key=self.positions.__getitem__)
        for name in _MEMBERS:
            values = getattr(self, name)
            setattr(self, name, [values[i] for i in order])

    def runs(self) -> list[tuple[int, int, bool, float]]:
        """Consecutive entries that are treated alike: (first, last + 1, add, factor)."""
        runs: list[tuple[int, int, bool, float]] = []
        for position, add, factor in zip(self.positions, self.adds, self.factors, strict=True):
            if runs and runs[-1][1:] == (position, add, factor):
                runs[-1] = (runs[-1][0], position + 1, add, factor)
            else:
                runs.append((position, position + 1, add, factor))
        return runs


_MEMBERS = ("positions", "gradients", "adds", "factors")


class Receiver(Protocol):
    """Where arrivals go. Called in the callers' threads, in order; must not block."""

    def wave_opened(self, wave: int) -> None:
        """A wave begins; the first one too."""

    def waited_for_room(self, start_s: float, end_s: float) -> None:
        """A hook waited so long for gradients to leave the device."""

    def arrived(self, arrival: Arrival) -> None:
        """A bucket has all it gets in its wave."""

    def check(self) -> None:
        """Raise what has failed."""

    def wait_gradients_unread(self) -> None:
        """Wait until no update reads the gradients any more."""

    def squares(self, piece: Tensor, out: np.ndarray) -> None:
        """The sum of squares of a flat piece, into a (1,) fp64 array."""


class Source:
    """One parameter's gradient on the host: what its stand-in asks (see `GradientSource`)."""

    def __init__(self, intake: Intake, entry: Entry) -> None:
        self._intake = weakref.ref(intake)
        self.entry = entry
        self.name = entry.name
        self.received: list[Tensor] = []
        self.generation = 0
        self.stand_in = GradientStandIn(self, entry.parameter, entry.parameter.device)

    @property
    def intake(self) -> Intake:
        intake = self._intake()
        if intake is None:
            raise GradientError(f"the gradient of {self.name!r} is gone: its optimizer has been closed")
        return intake

    def read(self) -> Tensor:
        self.take_in()
        values = self.intake.gradient(self.entry)
        return values.to(dtype=self.entry.parameter.dtype, device=self.entry.parameter.device)

    def write(self, values: Tensor) -> None:
        self.take_in()
        self.intake.replace(self.entry, values)

    def zero(self) -> None:
        self.intake.set_zero(self.entry)

    def norm(self) -> float:
        self.take_in()
        return self.intake.norm(self.entry)

    def scale(self, factor: float) -> None:
        self.take_in()
        self.intake.scale(self.entry, factor)

    def receive(self, gradient: Tensor) -> None:
        self.received.append(gradient)

    def renew(self) -> None:
        """Another gradient begins: who has kept the old stand-in is refused instead of being shown the new one."""
        self.generation += 1
        self.stand_in = next_stand_in(self.stand_in)

    def take_in(self) -> None:
        """Add what autograd has handed to the stand-in: our hook does, or whoever looks at the gradient before it."""
        received, self.received = self.received, []
        for further in received:
            self.intake.arrive(self.entry, further, add=True)


class _Filling:
    """A bucket's next arrival while its gradients come in."""

    __slots__ = ("arrival", "delivered", "landed", "next_wave", "streams")

    def __init__(self) -> None:
        self.arrival: Arrival | None = None
        self.next_wave = 0
        self.streams: set[object] = set()
        self.delivered = 0  # arrivals with gradients handed over ...
        self.landed = 0  # ... and of those, on the host


class Intake:
    """Hooks, waves and stand-ins of one optimizer.

    ``bound_bytes`` limits the gradients that have been delivered and still occupy the device: a hook that finds more
    waits until a copy is done (GIL released), as long as one is under way. ``slot_waits`` counts those waits.
    """

    def __init__(self, states: Sequence[BucketState], device: Device, receiver: Receiver, bound_bytes: int) -> None:
        self.states = list(states)
        self.waves = 0
        self.slot_waits = 0
        self.max_waves: int | None = None  # declared, where a further backward must be refused
        self._device = device
        self._receiver = receiver
        self._bound_bytes = bound_bytes
        self._fillings = [_Filling() for _ in states]
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._held_bytes = 0
        self._stalled = True  # no copy is under way, so waiting would not help
        self._task = -1  # the graph task whose end is watched
        self._ordinary_depth = 1 if device.torch_device.type == "cpu" else 0
        self._failed: BaseException | None = None
        self.clip_of: ClipFactor | None = None
        self.sources = {entry.parameter: Source(self, entry) for state in states for entry in state.bucket.entries}

    # --- from autograd's threads ---

    def accumulated(self, parameter: Tensor) -> None:
        """Autograd has put a gradient into ``p.grad``, or handed one to the stand-in there."""
        source = self.sources[parameter]
        gradient = parameter.grad
        if gradient is source.stand_in:
            self.fold_clip()
            source.take_in()
        elif gradient is not None and gradient.requires_grad:
            # backward(create_graph=True): the gradient is part of a graph that the caller goes on with. ``adopt`` takes
            # it.
            self.refuse_changes(source.entry, "kept with its graph (create_graph=True)")
        elif gradient is not None:
            self.arrive(source.entry, gradient, add=False)
            source.renew()
            parameter.grad = source.stand_in
        self._wait_for_room()

    def opens_wave(self, entry: Entry) -> int | None:
        """The wave that the entry's next gradient would open; None if it belongs to one that is open."""
        with self._lock:
            filling = self._fillings[entry.bucket.index]
            wave = filling.next_wave
            if filling.arrival is not None and filling.arrival.holds(entry.position):
                wave += 1
            return wave if wave >= self.waves else None

    def arrive(self, entry: Entry, gradient: Tensor, *, add: bool) -> None:
        """Take a gradient into its bucket's arrival; a bucket that has all of its gradients is delivered."""
        check_gradient(entry, gradient)
        index = entry.bucket.index
        with self._lock:
            filling, state = self._fillings[index], self.states[index]
            if filling.arrival is not None and filling.arrival.holds(entry.position):
                self._deliver(index)
            if filling.next_wave == self.waves:
                self._open_wave(entry)
            arrival = filling.arrival
            if arrival is None:
                arrival = filling.arrival = Arrival(entry.bucket, filling.next_wave)
            add = add and bool(state.present[entry.position]) and not state.zeroed[entry.position]
            factor = float(state.factor[entry.position]) if add else 1.0
            arrival.put(entry.position, gradient.detach(), add=add, factor=factor)
            filling.streams.add(self._device.current_stream())
            state.present[entry.position] = True
            state.zeroed[entry.position] = False
            state.factor[entry.position] = 1.0
            if len(arrival.positions) == len(entry.bucket.entries):
                self._deliver(index)
            self._watch_end_of_backward()

    def _open_wave(self, entry: Entry) -> None:
        if self.max_waves is not None and self.waves >= self.max_waves:
            raise GradientError(
                f"{entry.name!r} got a gradient in backward number {self.waves + 1} of the step, and Adam runs inside "
                f"number {self.max_waves}: declare OffloadConfig(backwards_per_step=...), or use policy='overlap'"
            )
        self.waves += 1
        self._receiver.wave_opened(self.waves - 1)

    def _deliver(self, index: int) -> None:
        """Hand over what a bucket has in its wave, perhaps nothing."""
        filling, state = self._fillings[index], self.states[index]
        arrival = filling.arrival or Arrival(state.bucket, filling.next_wave)
        arrival.sort()
        arrival.marker = self._device.mark(tuple(filling.streams))
        arrival.present, arrival.factor = state.present.copy(), state.factor.copy()
        filling.arrival = None
        filling.streams.clear()
        filling.next_wave += 1
        if arrival.gradients:
            filling.delivered += 1
            self._held_bytes += arrival.nbytes
            self._stalled = False
        self._receiver.arrived(arrival)

    def _watch_end_of_backward(self) -> None:
        task = torch._C._current_graph_task_id()
        if task in (-1, self._task):
            return
        self._task = task
        nested = _backward_depth() > self._ordinary_depth
        intake = weakref.ref(self)

        def ended() -> None:
            alive = intake()
            if alive is not None:
                alive._backward_ended(nested)

        torch.autograd.Variable._execution_engine.queue_callback(ended)

    def _backward_ended(self, nested: bool) -> None:
        """Deliver what is left; after the outermost graph task also the buckets that got nothing."""
        with self._lock:
            self._task = -1
            self._collect_received()
            for index, filling in enumerate(self._fillings):
                if filling.arrival is not None:
                    self._deliver(index)
            if not nested:
                self.finish_waves()
        self._wait_for_room()

    def _collect_received(self) -> None:
        """Gradients that were added to a stand-in where no hook of ours followed (a user's own hook did it)."""
        for source in self.sources.values():
            source.take_in()

    def _wait_for_room(self) -> None:
        with self._changed:
            if self._held_bytes <= self._bound_bytes or self._stalled:
                return
            self.slot_waits += 1
            from_s = time.perf_counter()
            while self._held_bytes > self._bound_bytes and not self._stalled and self._failed is None:
                self._changed.wait()
        self._receiver.waited_for_room(from_s, time.perf_counter())

    # --- from the thread that calls step ---

    def finish_waves(self) -> None:
        """Let every bucket arrive in every wave that has been opened."""
        with self._lock:
            for index, filling in enumerate(self._fillings):
                while filling.next_wave < self.waves or filling.arrival is not None:
                    self._deliver(index)

    def complete_step(self) -> None:
        """Let every bucket arrive in at least one wave: no gradient of this step can come any more."""
        with self._lock:
            self._collect_received()
            self.waves = max(self.waves, 1)
            self.finish_waves()

    def new_step(self) -> None:
        """The next gradient opens the next step's first wave. What is present stays present."""
        with self._lock:
            self.waves = 0
            for filling in self._fillings:
                filling.next_wave = 0

    def adopt(self) -> bool:
        """Take ``p.grad`` as the truth: a tensor that was put there is the gradient, None means that there is none.

        Returns whether tensors of the caller's were taken: they are the caller's again once they have been copied.
        """
        given: list[tuple[Source, Tensor]] = []
        for parameter, source in self.sources.items():
            gradient = parameter.grad
            if gradient is None:
                self.drop(source.entry)
            elif isinstance(gradient, GradientStandIn) and gradient is not source.stand_in:
                given.append((source, gradient.read()))  # another parameter's: read before anything of it changes
            elif gradient is not source.stand_in:
                given.append((source, gradient))
        for source, gradient in given:
            self.arrive(source.entry, gradient, add=False)
            source.renew()
            source.entry.parameter.grad = source.stand_in
        return bool(given)

    def drop_all(self) -> None:
        """There is no gradient any more."""
        for parameter, source in self.sources.items():
            self.drop(source.entry)
            parameter.grad = None
        self.clip_of = None

    def refuse_replaced(self) -> None:
        """Raise if a ``p.grad`` was set by hand after a backward with Adam in it."""
        for parameter, source in self.sources.items():
            present = self.states[source.entry.bucket.index].present[source.entry.position]
            if parameter.grad is not source.stand_in and (parameter.grad is not None or present):
                raise GradientError(
                    f"p.grad of {source.name!r} was replaced after backward, and Adam has run inside backward: use "
                    "policy='overlap' to set gradients by hand"
                )

    def refuse_changes(self, entry: Entry, change: str) -> None:
        """Raise if Adam inside backward may have used the gradient already."""
        if self.max_waves is not None and (self.waves or torch._C._current_graph_task_id() != -1):
            raise GradientError(
                f"the gradient of {entry.name!r} cannot be {change}: Adam runs inside backward; "
                "use policy='overlap' for clipping, loss scaling and edits of gradients"
            )

    def drop(self, entry: Entry) -> None:
        """The parameter has no gradient any more."""
        state = self.states[entry.bucket.index]
        with self._lock:
            source = self.sources[entry.parameter]
            source.received.clear()
            arrival = self._fillings[entry.bucket.index].arrival
            if arrival is not None and arrival.holds(entry.position):
                arrival.remove(entry.position)
            state.present[entry.position] = False
            state.zeroed[entry.position] = False
            state.factor[entry.position] = 1.0

    def set_zero(self, entry: Entry) -> None:
        """The parameter's gradient is zero: noted, and filled in when it is needed."""
        self.refuse_changes(entry, "zeroed")
        with self._lock:
            self.drop(entry)
            state = self.states[entry.bucket.index]
            state.present[entry.position] = state.zeroed[entry.position] = True

    def scale(self, entry: Entry, factor: float) -> None:
        if factor == 1.0:
            return
        self.refuse_changes(entry, "scaled")
        self.fold_clip()
        with self._lock:
            self._flush(entry)
            self.states[entry.bucket.index].factor[entry.position] *= factor

    def gradient(self, entry: Entry) -> Tensor:
        """The gradient as it stands, fp32 (or the parameter's dtype where that is exact), shaped like the parameter.

        A copy on the host. Waits for copies under way. Raises GradientError if there is none.
        """
        state = self.wait_landed(entry)
        if state.zeroed[entry.position]:
            return torch.zeros(entry.shape)
        if state.gradients is None:
            raise GradientError(
                f"the gradient of {entry.name!r} has been consumed by Adam inside backward and is not kept; "
                "policy='overlap' keeps gradients"
            )
        values = entry.view(state.gradients).to(torch.float32, copy=True)
        factor = float(state.factor[entry.position])
        return values if factor == 1.0 else values.mul_(np.float32(factor).item())

    def norm(self, entry: Entry) -> float:
        """The 2-norm of one parameter's gradient, in fp64."""
        state = self.wait_landed(entry)
        if state.zeroed[entry.position]:
            return 0.0
        return float(np.sqrt(state.squares[entry.position]) * abs(state.factor[entry.position]))

    def replace(self, entry: Entry, values: Tensor) -> None:
        """Write a gradient by hand; reaches the host at once (the caller sees to it that no update reads the store)."""
        self.refuse_changes(entry, "written")
        state = self.wait_landed(entry)
        check_gradient(entry, values)
        self._receiver.wait_gradients_unread()
        dtype = (
            torch.float32 if state.gradients is not None and state.gradients.dtype == torch.float32 else values.dtype
        )
        store = state.ready_store(dtype)
        piece = store[entry.start : entry.start + entry.numel]
        piece.copy_(values.detach().reshape(-1))
        self._receiver.squares(piece, state.squares[entry.position : entry.position + 1])
        state.factor[entry.position] = 1.0
        state.zeroed[entry.position] = False

    def wait_landed(self, entry: Entry) -> BucketState:
        """Return the bucket's state once everything that was delivered of it is on the host."""
        index = entry.bucket.index
        self.fold_clip()
        with self._changed:
            self._end_waves_to_read(entry.name)
            filling, state = self._fillings[index], self.states[index]
            if not state.present[entry.position]:
                raise GradientError(f"{entry.name!r} has no gradient now: call backward first")
            self._wait(lambda: filling.landed == filling.delivered)
        self._receiver.check()
        return state

    def wait_all_landed(self) -> None:
        with self._changed:
            self._end_waves_to_read("every parameter")
            self._wait(lambda: all(filling.landed == filling.delivered for filling in self._fillings))
        self._receiver.check()

    def _flush(self, entry: Entry) -> None:
        arrival = self._fillings[entry.bucket.index].arrival
        if arrival is not None and arrival.holds(entry.position):
            self._deliver(entry.bucket.index)

    def _end_waves_to_read(self, name: str) -> None:
        """A copy may wait, by the plan, for the rest of its wave: so a reader ends the wave. What comes later opens
        another."""
        if self.max_waves is None:
            self.finish_waves()
        elif self.waves and torch._C._current_graph_task_id() != -1:
            raise GradientError(
                f"the gradient of {name!r} cannot be read inside backward while Adam runs there: use policy='overlap'"
            )

    def _wait(self, condition: Callable[[], bool]) -> None:
        while not condition() and self._failed is None:
            self._changed.wait()

    def fold_clip(self) -> None:
        """After a step that clipped, the gradients that are still there are the clipped ones, as torch leaves them.

        Waits for that step's norm, so it is never called with the lock held.
        """
        clip = self.clip_of
        if clip is None:
            return
        factor = clip.wait_factor()
        with self._lock:
            if self.clip_of is clip:
                self.clip_of = None
                if factor != 1.0:
                    for state, present in zip(self.states, clip.present, strict=False):
                        state.factor[present & state.present] *= factor

    # --- from the loop's thread ---

    def copied(self, nbytes: int) -> None:
        """A copy has left the device."""
        with self._changed:
            self._held_bytes -= nbytes
            self._changed.notify_all()

    def landed(self, index: int) -> None:
        """An arrival with gradients is on the host."""
        with self._changed:
            self._fillings[index].landed += 1
            self._changed.notify_all()

    def set_stalled(self, stalled: bool) -> None:
        """Whether no copy is under way."""
        with self._changed:
            if stalled != self._stalled:
                self._stalled = stalled
                self._changed.notify_all()

    def fail(self, error: BaseException | None) -> None:
        """Wake everybody who waits; None: usable again, with no gradient under way."""
        with self._changed:
            self._failed = error
            if error is None:
                self._held_bytes = 0
                self.waves = 0
                for filling in self._fillings:
                    filling.arrival = None
                    filling.next_wave = 0
                    filling.landed = filling.delivered
                self.clip_of = None
            self._changed.notify_all()


class ClipFactor(Protocol):
    """The clip factor of a step, once its norm is known."""

    @property
    def present(self) -> Sequence[np.ndarray]: ...

    def wait_factor(self) -> float: ...


def check_gradient(entry: Entry, gradient: Tensor) -> None:
    """Raise GradientError, naming the parameter, for a gradient that Adam on the host cannot use."""
    if gradient.layout != torch.strided:
        raise GradientError(
            f"{entry.name!r} has a sparse gradient ({gradient.layout}): this optimizer updates dense parameters only; "
            "use sparse=False in the embedding, or leave the parameter to torch.optim.SparseAdam"
        )


def _backward_depth() -> int:
    """How many backward calls the calling thread is inside of, as far as Python sees them."""
    depth = 0
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        depth += frame.f_code is _RUN_BACKWARD
        frame = frame.f_back
    return depth


_RUN_BACKWARD = torch.autograd.graph._engine_run_backward.__code__
