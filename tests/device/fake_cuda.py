"""A stand-in for an accelerator's library that runs its streams by hand, on the CPU, and writes everything
down.

Streams are queues of small steps. A lazy stream runs a step only when somebody waits for an event behind
it; an eager one as soon as nothing holds it. Compute is lazy, so a copy that does not wait for its marker
reads what compute has not written yet. Lanes are lazy or eager by choice: a lazy lane shows who reads a
copy's result too early, an eager one who lets a copy write too early. Device memory starts as NaN.

The steps hold aliases of the tensors they touch, never the tensors themselves: so a weak reference to a
tensor shows whether the device under test still holds it.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from zoff_async.errors import DeviceError


class FakeStream:
    def __init__(self, fake: FakeCuda, name: str, *, eager: bool) -> None:
        self.fake, self.name, self.eager = fake, name, eager
        self.steps: deque[tuple[str, object]] = deque()

    def wait_event(self, event: FakeEvent) -> None:
        self.fake.note(self.name, f"wait {event.name}")
        assert event.recorded, "waiting for an event that was never recorded waits for nothing"
        self.fake.push(self, ("wait", event))

    def __repr__(self) -> str:
        return self.name


class FakeEvent:
    def __init__(self, fake: FakeCuda, name: str, *, sleeping: bool) -> None:
        self.fake, self.name, self.sleeping = fake, name, sleeping
        self.stream: FakeStream | None = None
        self.recorded = False
        self.reached_s: float | None = None

    def record(self, stream: FakeStream) -> None:
        self.fake.note(stream.name, f"record {self.name}")
        self.stream, self.recorded = stream, True
        self.fake.push(stream, ("record", self))

    def synchronize(self) -> None:
        assert self.recorded
        self.fake.waited_by.append((threading.current_thread().name, self.name))
        if self.sleeping:
            self.fake.gate.wait()
        with self.fake.lock:
            self.fake.run_until(self)
        if self.fake.fail_synchronize is not None:
            raise self.fake.fail_synchronize

    def query(self) -> bool:
        return self.reached_s is not None

    def elapsed_time(self, end_event: FakeEvent) -> float:
        assert self.reached_s is not None, f"{self.name} is not reached"
        assert end_event.reached_s is not None, f"{end_event.name} is not reached"
        return (end_event.reached_s - self.reached_s) * 1e3 * self.fake.clock_rate


class FakeCuda:
    """A Surface. ``log`` has one line a call: ``"STREAM: WHAT"``."""

    def __init__(self, *, eager_lanes: bool = False, pinned_limit_bytes: int | None = None) -> None:
        self.torch_device = torch.device("cpu")
        self.eager_lanes = eager_lanes
        self.pinned_limit_bytes = pinned_limit_bytes
        self.pinned: dict[int, int] = {}
        self.log: list[str] = []
        self.waited_by: list[tuple[str, str]] = []  # (thread, event)
        self.entered: list[str] = []  # threads bound to the accelerator
        self.fail_synchronize: Exception | None = None
        self.clock_rate = 1.0
        self.lock = threading.RLock()
        self.gate = threading.Event()  # sleeping waits pass while it is set
        self.gate.set()
        self.streams: list[FakeStream] = []
        self.events = 0
        self.compute = FakeStream(self, "compute", eager=False)
        self._current = threading.local()
        self._names = iter(("clock", "d2h", "h2d"))

    def note(self, stream: str, what: str) -> None:
        self.log.append(f"{stream}: {what}")

    # What a Surface has.

    def enter_thread(self) -> None:
        self.entered.append(threading.current_thread().name)

    def make_stream(self) -> FakeStream:
        name = next(self._names)  # a fourth stream is an error
        self.streams.append(FakeStream(self, name, eager=name == "clock" or self.eager_lanes))
        return self.streams[-1]

    def current_stream(self) -> FakeStream:
        stream: FakeStream = getattr(self._current, "stream", self.compute)
        return stream

    def make_event(self, *, sleeping: bool = True) -> FakeEvent:
        self.events += 1
        return FakeEvent(self, f"e{self.events}", sleeping=sleeping)

    @contextlib.contextmanager
    def on(self, stream: FakeStream) -> Iterator[None]:
        before, self._current.stream = self.current_stream(), stream
        try:
            yield
        finally:
            self._current.stream = before

    def empty(self, nbytes: int) -> Tensor:
        self.note(self.current_stream().name, f"empty {nbytes}")
        return torch.full((nbytes,), 255, dtype=torch.uint8)  # NaN in every floating-point type

    def copy_(self, target: Tensor, source: Tensor) -> None:
        self.note(self.current_stream().name, f"copy {target.nbytes}")
        self.launch(_copier([target], [source]))

    def copy_many_(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        self.note(self.current_stream().name, f"copy_many {len(targets)}")
        self.launch(_copier(targets, sources))

    def pin(self, staging: Tensor) -> None:
        limit = self.pinned_limit_bytes
        if limit is not None and sum(self.pinned.values()) + staging.nbytes > limit:
            raise DeviceError("injected: too many pinned bytes")
        self.pinned[staging.data_ptr()] = staging.nbytes

    def unpin(self, staging: Tensor) -> None:
        del self.pinned[staging.data_ptr()]

    # What a test does.

    def launch(self, kernel: Callable[[], object]) -> None:
        """Give the calling thread's current stream a kernel."""
        self.push(self.current_stream(), ("run", kernel))

    def read(self, tensor: Tensor) -> Tensor:
        """What a kernel of the calling thread's current stream would see, once it runs."""
        seen: list[Tensor] = []
        self.launch(lambda: seen.append(tensor.detach().clone()))
        event = self.make_event()
        event.record(self.current_stream())
        event.synchronize()
        return seen[0]

    def lines(self, *streams: str) -> list[str]:
        """The log of these streams, with events renamed in order of appearance."""
        names: dict[str, str] = {}
        kept = [line for line in self.log if line.split(":")[0] in streams]
        return [
            " ".join(
                names.setdefault(w, f"E{len(names)}") if w[0] == "e" and w[1:].isdigit() else w for w in line.split()
            )
            for line in kept
        ]

    # How streams run.

    def push(self, stream: FakeStream, step: tuple[str, object]) -> None:
        with self.lock:
            stream.steps.append(step)
            self.run_eager()

    def run_eager(self) -> None:
        for stream in (*self.streams, self.compute):
            while stream.eager and stream.steps and not self._blocked(stream):
                self._run_step(stream)

    def run_until(self, event: FakeEvent) -> None:
        while event.reached_s is None:
            assert event.stream is not None
            self._advance(event.stream)

    def run_all(self) -> None:
        """Let every stream run dry."""
        with self.lock:
            for stream in (*self.streams, self.compute):
                while stream.steps:
                    self._advance(stream)

    def _advance(self, stream: FakeStream) -> None:
        if self._blocked(stream):
            self.run_until(stream.steps[0][1])  # type: ignore[arg-type]
        else:
            self._run_step(stream)

    def _blocked(self, stream: FakeStream) -> bool:
        what, event = stream.steps[0]
        return what == "wait" and event.reached_s is None  # type: ignore[attr-defined]

    def _run_step(self, stream: FakeStream) -> None:
        what, subject = stream.steps.popleft()
        if what == "run":
            subject()  # type: ignore[operator]
        elif what == "record":
            subject.reached_s = time.perf_counter()  # type: ignore[attr-defined]
            self.run_eager()


def _copier(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> Callable[[], None]:
    # What torch would do at the call, it does here: a wrong shape raises and a version is counted now.
    for target, source in zip(targets, sources, strict=True):
        if target.shape != source.shape:
            raise RuntimeError(f"shapes differ: {tuple(target.shape)} and {tuple(source.shape)}")
        if target.is_leaf and target.requires_grad:
            torch._C._autograd._unsafe_set_version_counter((target,), (target._version + 1,))
    aliases = [(target.data, source.data) for target, source in zip(targets, sources, strict=True)]

    def run() -> None:
        with torch.no_grad():
            for target, source in aliases:
                target.copy_(source)

    return run
