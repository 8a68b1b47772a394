"""Spans of forward and backward, from the few instants that a runtime can see.

Note [What is known of compute]
    Nobody times forward and backward: autograd runs them. The runtime sees instants: a bucket's first weight
    read in a forward (through a model's gates), the first gradient of a backward, and a bucket's last one.
    Forward of a bucket lasts from its read to the next bucket's; backward from the bucket before it to its own
    instant. Without gates forward is what lies between ``step()`` and the first gradient, shared out among the
    buckets by their parameters: then its sum is known, data loading included, and the borders are not.
    What backward does before the first gradient appears counts as forward.

    An accelerator runs behind the thread that trains it. There an instant is a point in its stream, and its
    time is known once it has been reached. Reads that are told as times of the host say when the work was given to
    it; forward is then shared out as without gates.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple, Protocol, TypeAlias

from zoff_async.scheduler import Action, Span, StepPlan
from zoff_async.trace.intervals import intersection, length_s
from zoff_async.trace.timeline import Pieces, Wait

#: A read that took longer than this has waited for its weight.
_WAITED_S = 20e-6


class Reached(Protocol):
    """A point in the work of an accelerator."""

    def reached_s(self) -> float | None:
        """When compute reached the point, as ``time.perf_counter`` time; None while it has not."""


Instant: TypeAlias = "float | Reached"
#: A bucket's first read in a forward: the bucket, when it was asked for, when its weights were there.
Read: TypeAlias = "tuple[int, Instant, Instant]"


class _Backward(NamedTuple):
    """What was seen of one forward and backward; ``forward`` is None where nobody saw it begin."""

    step: int
    number: int
    plan: StepPlan | None
    pieces: Pieces | None
    buckets: int  # each of them arrives once
    forward: Instant | None
    reads: tuple[Read, ...]
    began: Instant
    arrivals: list[tuple[int, Instant]]


class ComputeSpans:
    """Turns the instants of forward and backward into spans, as far as they have been reached."""

    def __init__(self) -> None:
        self.forward: Instant | None = None
        self._plan: StepPlan | None = None
        self._pieces: Pieces | None = None
        self._buckets = 1
        self._open: deque[_Backward] = deque()
        self._spans: deque[Span] = deque()
        self._waits: deque[tuple[int, Wait]] = deque()
        self._room: deque[tuple[float, float]] = deque()  # when backward stood still in a hook
        self._ended: dict[int, float] = {}  # step -> end of its last backward that is settled
        self._lock = threading.Lock()

    def opened(self, plan: StepPlan, pieces: Pieces | None) -> None:
        """The step that is opened now has this plan."""
        if plan is not self._plan:
            self._buckets = 1 + max((action.bucket or 0 for action in plan.actions), default=0)
        self._plan, self._pieces = plan, pieces

    def backward_began(self, step: int, number: int, at: Instant, reads: Iterable[Read]) -> None:
        """See ``Recorder``."""
        forward, self.forward = self.forward, None
        self._settle()
        with self._lock:
            seen = _Backward(
                step, number, self._plan, self._pieces, self._buckets, forward, tuple(reads), at, arrivals=[]
            )
            self._open.append(seen)

    def arrived(self, step: int, number: int, bucket: int, at: Instant) -> None:
        """See ``Recorder``."""
        with self._lock:
            for backward in reversed(self._open):
                if (backward.step, backward.number) == (step, number):
                    backward.arrivals.append((bucket, at))
                    return

    def stood_still(self, start_s: float, end_s: float) -> None:
        """Backward waited in a hook."""
        with self._lock:
            self._room.append((start_s, end_s))

    def forget(self, oldest: int) -> None:
        """Let go of all steps up to ``oldest``."""
        self._settle()
        with self._lock:
            while self._spans and self._spans[0].step <= oldest:
                self._spans.popleft()
            while self._open and self._open[0].step <= oldest:
                self._open.popleft()
            while self._waits and self._waits[0][0] <= oldest:
                self._waits.popleft()
            while self._room and self._spans and self._room[0][1] < self._spans[0].start_s:
                self._room.popleft()
            self._ended = {step: end_s for step, end_s in self._ended.items() if step >= oldest}

    @property
    def held(self) -> int:
        """Spans, unfinished backwards and waits that are kept."""
        return len(self._spans) + len(self._open) + len(self._waits) + len(self._room)

    def known(self) -> tuple[list[Span], list[Wait]]:
        """All spans, those of an unfinished backward as far as it has come, and the waits for weights."""
        self._settle()
        with self._lock:
            pending = [span for backward in self._open for span in self._made(backward)]
            return [*self._spans, *pending], [wait for _, wait in self._waits]

    def _settle(self) -> None:
        """Make the spans of every backward that has all its instants.

        Soon, because an accelerator tells its times from an anchor that is renewed now and then.
        """
        with self._lock:
            while self._open and _is_whole(self._open[0]):
                backward = self._open.popleft()
                made = self._made(backward)
                self._spans.extend(made)
                if made:
                    self._ended[backward.step] = made[-1].end_s
                self._waits.extend((backward.step, wait) for wait in _waits(backward))

    def _made(self, backward: _Backward) -> list[Span]:
        began_s = _seconds(backward.began)
        if began_s is None:
            return []
        spans = self._forward(backward, began_s)
        at_s = began_s
        for bucket, instant in list(backward.arrivals):
            end_s = _seconds(instant)
            if end_s is None:
                break
            end_s = max(end_s, at_s)
            # A wait in a hook is inside: the span is shortened at its beginning, where hooks of the bucket before wait.
            still_s = length_s(intersection([(at_s, end_s)], list(self._room))) if isinstance(instant, float) else 0.0
            action = Action("bwd", bucket, None, backward.number)
            spans.append(Span(action, "compute", backward.step, at_s + still_s, end_s, 0))
            at_s = end_s
        return spans

    def _forward(self, backward: _Backward, began_s: float) -> list[Span]:
        if backward.reads and all(_same_clock(backward.began, got) for _, _, got in backward.reads):
            return _read_forward(backward, began_s)
        forward_s = self._forward_began(backward)
        return [] if forward_s is None else _shared_forward(backward, min(forward_s, began_s), began_s)

    def _forward_began(self, backward: _Backward) -> float | None:
        """Where a forward began of which nobody saw more than that."""
        if backward.number:
            return self._ended.get(backward.step)
        first = backward.reads[0][2] if backward.reads else backward.forward
        at_s = None if first is None else _seconds(first)
        # The thread that trains is ahead of an accelerator, which has its last backward to finish first.
        return None if at_s is None else max(at_s, self._ended.get(backward.step - 1, at_s))


def _is_whole(backward: _Backward) -> bool:
    """Whether nothing more can become known of it: the last of its arrivals is the last point to be reached."""
    arrivals = backward.arrivals
    return bool(arrivals) and len(arrivals) >= backward.buckets and _seconds(arrivals[-1][1]) is not None


def _waits(backward: _Backward) -> Iterable[Wait]:
    for bucket, asked, got in backward.reads:
        asked_s, got_s = _seconds(asked), _seconds(got)
        if asked_s is not None and got_s is not None and got_s - asked_s > _WAITED_S:
            yield Wait("weights", bucket, asked_s, got_s)


def _read_forward(backward: _Backward, end_s: float) -> list[Span]:
    """Each bucket's forward lasts until the next bucket is asked for."""
    known = [(bucket, _seconds(asked), _seconds(got)) for bucket, asked, got in backward.reads]
    asked_s = [asked for _, asked, _ in known if asked is not None]
    spans = []
    for (bucket, _, got), next_s in zip(known, [*asked_s[1:], end_s], strict=False):
        if got is not None:
            last_s = max(got, min(next_s, end_s))
            spans.append(Span(Action("fwd", bucket, None, backward.number), "compute", backward.step, got, last_s, 0))
    return spans


def _shared_forward(backward: _Backward, start_s: float, end_s: float) -> list[Span]:
    """A forward's time, shared out among the buckets by their parameters."""
    plan, pieces = backward.plan, backward.pieces
    actions = [action for action in plan.actions if action.kind == "fwd"] if plan is not None else []
    sizes = [pieces.numel(action) if pieces is not None else 1 for action in actions]
    total, done, spans = sum(sizes) or 1, 0, []
    for action, size in zip(actions, sizes, strict=True):
        first_s = start_s + (end_s - start_s) * done / total
        done += size
        last_s = start_s + (end_s - start_s) * done / total
        later = action.later(backward=backward.number)
        spans.append(Span(later, "compute", backward.step, first_s, last_s, 0))
    return spans


def _same_clock(first: Instant, second: Instant) -> bool:
    """Whether both are points of a stream, or both times of the host."""
    return isinstance(first, int | float) == isinstance(second, int | float)


def _seconds(instant: Instant) -> float | None:
    return instant if isinstance(instant, int | float) else instant.reached_s()
