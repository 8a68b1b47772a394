"""What happened in the last steps: spans, the plans they belong to, and the questions one can ask of them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from zoff_async.scheduler import Action, Simulation, Span, StepPlan
from zoff_async.trace.intervals import intersection, length_s, union

if TYPE_CHECKING:
    from zoff_async.trace.report import Report

Fact: TypeAlias = "str | int | float | bool"


class Pieces(NamedTuple):
    """How many parameters an action works on: those of each bucket, and of a chunk (the last one is the rest)."""

    bucket_numel: tuple[int, ...]
    chunk_numel: int

    def numel(self, action: Action) -> int:
        """Parameters that ``action`` reads or writes; 0 for one without a bucket."""
        if action.bucket is None or action.bucket >= len(self.bucket_numel):
            return 0
        numel = self.bucket_numel[action.bucket]
        if action.chunk is None:
            return numel
        return max(0, min(self.chunk_numel, numel - action.chunk * self.chunk_numel))


class Wait(NamedTuple):
    """The thread that trains stood still, or was inside ``step()``.

    ``what`` is ``weights`` (a read of a weight waited for its upload), ``room`` (backward waited because too many
    gradients were still on the device) or ``step`` (the whole of ``step()``).
    """

    what: str
    bucket: int | None
    start_s: float
    end_s: float


class Clock(NamedTuple):
    """One instant on both clocks: Unix time in nanoseconds, and the spans' own seconds."""

    wall_ns: int
    at_s: float

    @classmethod
    def now(cls) -> Clock:
        """Read both clocks, the tightest of a few tries."""
        tries = []
        for _ in range(5):
            before_s = time.perf_counter()
            wall_ns = time.time_ns()
            after_s = time.perf_counter()
            tries.append((after_s - before_s, cls(wall_ns, (before_s + after_s) / 2)))
        return min(tries)[1]

    def wall_ns_at(self, at_s: float) -> int:
        """Unix time, in nanoseconds, of an instant of the spans' clock."""
        return self.wall_ns + round((at_s - self.at_s) * 1e9)


@dataclass(frozen=True)
class Timeline:
    """What happened in the recorded steps.

    Args:
        spans: In the order in which they ended. Times are ``time.perf_counter`` seconds (virtual seconds where a
            simulation made them).
        plans: The plan of each step.
        pieces: Parameters a bucket and a chunk; None where nobody said.
        waits: Where the thread that trains stood still.
        facts: What ran where: policy, device, kernel and the like.
        clock: How span times relate to Unix time; None for virtual seconds.
    """

    spans: tuple[Span, ...]
    plans: Mapping[int, StepPlan] = field(default_factory=dict)
    pieces: Pieces | None = None
    waits: tuple[Wait, ...] = ()
    facts: Mapping[str, Fact] = field(default_factory=dict)
    clock: Clock | None = None

    @classmethod
    def of(cls, simulation: Simulation, pieces: Pieces | None = None) -> Timeline:
        """What a simulation says would happen, as if it had been recorded."""
        plan = simulation.plan
        steps = {span.step for span in simulation.spans}
        facts: dict[str, Fact] = {"policy": plan.name, "device": "simulated", "device_kind": "simulated"}
        return cls(simulation.spans, dict.fromkeys(sorted(steps), plan), pieces, facts=facts)

    # First figures

    def busy_s(self) -> Mapping[str, float]:
        """Seconds of work a lane; two actions at once count twice."""
        busy: dict[str, float] = {}
        for span in self.spans:
            busy[span.lane] = busy.get(span.lane, 0.0) + span.end_s - span.start_s
        return busy

    def hidden_share(self) -> float | None:
        """The part of host and copy time that ran while the compute lane was busy; None without any.

        Time counts once, however many lanes were busy.
        """
        compute = union((s.start_s, s.end_s) for s in self.spans if s.lane == "compute")
        other = union((s.start_s, s.end_s) for s in self.spans if s.lane != "compute")
        total_s = length_s(other)
        return length_s(intersection(compute, other)) / total_s if total_s else None

    def utilisation(self) -> Mapping[str, float]:
        """Busy share of each lane (capacity counted) in the last whole step; empty before there is one."""
        from zoff_async.trace.metrics import last_metrics

        return {name[5:]: share for name, share in last_metrics(self).items() if name.startswith("busy/")}

    def numel(self, action: Action) -> int:
        """Parameters that ``action`` works on; 0 where that is not known."""
        return self.pieces.numel(action) if self.pieces is not None else 0

    # Parts

    @property
    def steps(self) -> tuple[int, ...]:
        """Numbers of the recorded steps, in order."""
        return tuple(sorted({span.step for span in self.spans}))

    def step(self, index: int) -> Timeline:
        """The spans of one step."""
        return self.only((index,))

    def last(self, count: int) -> Timeline:
        """The spans of the last ``count`` steps.

        Raises:
            ValueError: if ``count`` is below 1.
        """
        if count < 1:
            raise ValueError(f"count is {count}: at least one step")
        return self.only(self.steps[-count:])

    def only(self, steps: Sequence[int]) -> Timeline:
        """The spans of ``steps``, and the waits beside them."""
        wanted = set(steps)
        spans = tuple(span for span in self.spans if span.step in wanted)
        plans = {step: plan for step, plan in self.plans.items() if step in wanted}
        start_s = min((span.start_s for span in spans), default=0.0)
        end_s = max((span.end_s for span in spans), default=0.0)
        waits = tuple(wait for wait in self.waits if wait.end_s > start_s and wait.start_s < end_s)
        return replace(self, spans=spans, plans=plans, waits=waits)

    # Answers, each from its own module

    def report(self) -> Report:
        """How the steady steps went: lanes, exposed time, critical path, bounds and what would help.

        Simulates the step some ten times, so it takes from tenths of a second up to some seconds.

        Raises:
            ValueError: if fewer than two steps in a row were recorded.
        """
        from zoff_async.trace.report import report

        return report(self)

    def metrics(self) -> list[dict[str, float]]:
        """Flat figures of each whole step, for a logger; see ``zoff_async.trace.metrics``."""
        from zoff_async.trace.metrics import metrics

        return metrics(self)

    def check(self, *, tolerance_s: float = 50e-6) -> list[str]:
        """What breaks the plans' edges or their lanes, a sentence each; empty if all is well."""
        from zoff_async.trace.check import check

        return check(self, tolerance_s=tolerance_s)

    def gantt(self, *, steps: int = 2, width: int = 100) -> str:
        """The last whole steps as text, a row a lane."""
        from zoff_async.trace.gantt import gantt

        return gantt(self, steps=steps, width=width)

    def plot(self, path: str | Path, *, steps: int = 2, verdict: bool = True) -> None:
        """Draw the last whole steps into a .png, .pdf or .svg file (needs matplotlib)."""
        from zoff_async.trace.plot import plot

        plot(self, path, steps=steps, verdict=verdict)

    def save(self, path: str | Path) -> None:
        """Write a Chrome trace that Perfetto opens: JSON, compressed if the name ends in ``.gz``."""
        from zoff_async.trace.chrome import save

        save(self, path)

    @classmethod
    def load(cls, path: str | Path) -> Timeline:
        """Read what ``save`` wrote.

        Raises:
            TraceError: if the file is empty, cut off, of another program, or newer than this version.
            OSError: if it cannot be read.
        """
        from zoff_async.trace.load import load

        return load(path)

    def _repr_html_(self) -> str:
        import html

        return f"<pre>{html.escape(self.gantt() if self.spans else 'no spans')}</pre>"

    def __repr__(self) -> str:
        steps: Any = self.steps
        shown = f"steps {steps[0]} to {steps[-1]}" if steps else "no steps"
        return f"<Timeline: {shown}, {len(self.spans)} spans>"
