"""Takes spans while steps run, and keeps those of the last ones."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from zoff_async.scheduler import Span, StepPlan
from zoff_async.trace.compute import ComputeSpans, Instant, Read
from zoff_async.trace.timeline import Clock, Fact, Pieces, Timeline, Wait

T = TypeVar("T")


@dataclass(frozen=True)
class RecorderStatistics:
    """What a recorder holds now. ``spans`` are those told as spans; compute's are made from instants."""

    newest_step: int
    spans: int
    compute_spans: int
    waits: int
    plans: int


class Recorder:
    """A bounded ring of spans: those of the last ``steps`` steps.

    ``recorder(span)`` or ``recorder.note(span)``, ``opened``, ``backward_began`` and ``arrived`` are called by the
    loop's thread, ``forward_may_begin`` by the one that trains; ``waited`` and ``timeline`` by any.

    Args:
        steps: Steps that are kept, at least 1.
        facts: What runs where; goes into trace files. May be added to later.
    """

    def __init__(self, steps: int, facts: Mapping[str, Fact] | None = None) -> None:
        if steps < 1:
            raise ValueError(f"steps is {steps}: a recorder keeps at least one step")
        self.facts: dict[str, Fact] = dict(facts or {})
        self._steps = steps
        self._spans: deque[Span] = deque()
        #: Takes a span as the recorder itself does, at the cost of an append: for one who tells of every step
        #: with ``opened``, which lets go of the oldest.
        self.note: Callable[[Span], None] = self._spans.append
        self._newest = -1
        self._plans: dict[int, StepPlan] = {}
        self._pieces: Pieces | None = None
        self._waits: deque[tuple[int, Wait]] = deque()
        self._clock = Clock.now()
        self._compute = ComputeSpans()

    def __call__(self, span: Span) -> None:
        self._spans.append(span)
        if span.step > self._newest:
            self._advance(span.step)

    def opened(self, step: int, plan: StepPlan, pieces: Pieces | None = None) -> None:
        """A step has been opened, with this plan."""
        self._plans[step] = plan
        self._pieces = pieces or self._pieces
        self._compute.opened(plan, self._pieces)
        if step - 1 > self._newest:  # the open step is none of the last ones until something has happened in it
            self._advance(step - 1)

    def forward_may_begin(self, at: Instant) -> None:
        """``step()`` returns: where no reads tell, the next forward begins here."""
        self._compute.forward = at

    def backward_began(self, step: int, backward: int, at: Instant, reads: Iterable[Read] = ()) -> None:
        """The first gradient of a backward has appeared.

        Args:
            step: The open step.
            backward: Number of the backward in it.
            at: When.
            reads: First reads of the forward before it, in their order: (bucket, asked for, there).
        """
        self._compute.backward_began(step, backward, at, reads)

    def arrived(self, step: int, backward: int, bucket: int, at: Instant) -> None:
        """A bucket has all its gradients of a backward. Told in the order in which that happens."""
        self._compute.arrived(step, backward, bucket, at)

    def waited(self, what: str, start_s: float, end_s: float, bucket: int | None = None) -> None:
        """The thread that trains stood still, or was inside ``step()``: see ``Wait``."""
        self._waits.append((self._newest, Wait(what, bucket, start_s, end_s)))
        if what == "room":
            self._compute.stood_still(start_s, end_s)

    def timeline(self) -> Timeline:
        """A snapshot, the spans in the order in which they ended."""
        oldest = self._newest - self._steps
        compute, weight_waits = self._compute.known()
        spans = [span for span in (*_snapshot(self._spans), *compute) if span.step > oldest]
        waits = [*(wait for _, wait in _snapshot(self._waits)), *weight_waits]
        return Timeline(
            spans=tuple(sorted(spans, key=lambda span: span.end_s)),
            plans={step: plan for step, plan in sorted(self._plans.copy().items()) if step > oldest},
            pieces=self._pieces,
            waits=tuple(sorted(waits, key=lambda wait: wait.start_s)),
            facts=self.facts.copy(),
            clock=self._clock,
        )

    def statistics(self) -> RecorderStatistics:
        """How much is held, now."""
        return RecorderStatistics(
            newest_step=self._newest,
            spans=len(self._spans),
            compute_spans=self._compute.held,
            waits=len(self._waits),
            plans=len(self._plans),
        )

    def _advance(self, step: int) -> None:
        """A newer step: let go of the oldest."""
        self._newest = step
        oldest, spans, waits = step - self._steps, self._spans, self._waits
        while spans and spans[0].step <= oldest:
            spans.popleft()
        while waits and waits[0][0] <= oldest:
            waits.popleft()
        for known in [known for known in self._plans if known <= oldest]:
            del self._plans[known]
        self._compute.forget(oldest)


def _snapshot(ring: deque[T]) -> list[T]:
    """A copy of a deque that another thread may append to meanwhile."""
    while True:
        try:
            return list(ring)
        except RuntimeError:  # it has changed under the iteration, which a second try seldom meets
            continue
