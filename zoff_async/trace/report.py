"""How the steady steps went, how far they are from the best possible, and what would help."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from zoff_async.scheduler import Simulation
from zoff_async.trace.causes import Causes
from zoff_async.trace.critical import PathAction, critical_path
from zoff_async.trace.exposure import KindUse, kind_uses
from zoff_async.trace.limits import lived, without_gate_limit
from zoff_async.trace.steps import Window, steady
from zoff_async.trace.timeline import Fact, Timeline
from zoff_async.trace.verdict import verdict
from zoff_async.trace.waiting import LaneUse, lane_uses, slot_waits_s
from zoff_async.trace.whatif import Lever, levers, measured_step


@dataclass(frozen=True)
class Report:
    """What ``timeline.report()`` says. All times are seconds, a step where not said otherwise.

    Args:
        steps: Numbers of the steady steps that it speaks of.
        step_s: Median length, from first forward to first forward.
        ideal_s: The same plan with the same actions, simulated without any overhead: what the policy could reach.
        bound_s: Busy seconds over capacity of the busiest lane: no policy can be faster on this machine.
        bound_lane: That lane.
        lanes: How busy each was, and what it waited for.
        kinds: What each kind of action did.
        slot_waits_s: By staging direction, time in which nothing but a free slot was missing.
        waits_s: By ``what``, time in which the thread that trains stood still.
        critical_path: Of the step of median length, in order.
        levers: What one change would save, the best first.
        verdict: All of it in a sentence.
        facts: What ran where.
    """

    steps: tuple[int, ...]
    step_s: float
    ideal_s: float
    bound_s: float
    bound_lane: str
    lanes: tuple[LaneUse, ...]
    kinds: tuple[KindUse, ...]
    slot_waits_s: Mapping[str, float]
    waits_s: Mapping[str, float]
    critical_path: tuple[PathAction, ...]
    levers: tuple[Lever, ...]
    verdict: str
    facts: Mapping[str, Fact]

    @property
    def over_ideal(self) -> float:
        """Step over ideal time: what scheduling (and the caller's own code) costs; 1 is perfect."""
        return self.step_s / self.ideal_s if self.ideal_s else float("nan")

    @property
    def over_bound(self) -> float:
        """Step over resource bound: what a better policy could gain at most; 1 is perfect."""
        return self.step_s / self.bound_s if self.bound_s else float("nan")

    @property
    def path_s(self) -> Mapping[str, float]:
        """Seconds of the critical path by kind, its gaps as ``hand-over``."""
        found: dict[str, float] = {}
        for item in self.critical_path:
            found[item.action.kind] = found.get(item.action.kind, 0.0) + item.end_s - item.start_s
            found["hand-over"] = found.get("hand-over", 0.0) + item.gap_s
        return {kind: seconds for kind, seconds in found.items() if seconds > 0}

    def asdict(self) -> dict[str, Any]:
        """Plain values for ``json.dumps``; actions as their texts."""
        plain = asdict(self)
        plain["critical_path"] = [item | {"action": str(mine.action)} for item, mine in self._path_pairs(plain)]
        plain["kinds"] = [
            asdict(kind) | {"bytes_per_s": kind.bytes_per_s, "numel_per_s": kind.numel_per_s} for kind in self.kinds
        ]
        return plain | {"over_ideal": self.over_ideal, "over_bound": self.over_bound}

    def _path_pairs(self, plain: dict[str, Any]) -> list[tuple[dict[str, Any], PathAction]]:
        return list(zip(plain["critical_path"], self.critical_path, strict=True))

    def describe(self) -> str:
        """A printout for people, the verdict first."""
        from zoff_async.trace.report_text import describe

        return describe(self)

    def __str__(self) -> str:
        return self.describe()


def report(timeline: Timeline) -> Report:
    """See ``Timeline.report``."""
    windows = steady(timeline)
    steps = tuple(window.step for window in windows)
    step_s = median(window.length_s for window in windows)
    measured = measured_step(timeline, steps, step_s)
    gated = timeline.facts.get("gated") is not False
    base = measured.simulate()
    ideal = base if gated else measured.simulate(facts=without_gate_limit(timeline.facts))
    causes = Causes(lived(timeline))
    lanes, kinds = lane_uses(causes, windows), kind_uses(timeline, windows)
    found = levers(measured, base)
    bound_lane, bound_s = _bound(ideal)
    return Report(
        steps=steps,
        step_s=step_s,
        ideal_s=ideal.period_s,
        bound_s=bound_s,
        bound_lane=bound_lane,
        lanes=lanes,
        kinds=kinds,
        slot_waits_s=slot_waits_s(causes, windows),
        waits_s=_waits_s(timeline, windows),
        critical_path=critical_path(causes, _middle(windows)),
        levers=found,
        verdict=verdict(lanes, kinds, found, step_s=step_s, ideal_s=ideal.period_s, bound_lane=bound_lane),
        facts=dict(timeline.facts),
    )


def _bound(simulation: Simulation) -> tuple[str, float]:
    """The busiest lane, and its seconds a step over its capacity."""
    bound_s = simulation.resource_bound_s
    lane = max(simulation.utilisation, key=lambda name: simulation.utilisation[name], default="compute")
    return lane, bound_s


def _middle(windows: Sequence[Window]) -> Window:
    """The step of median length (of two, the shorter)."""
    ordered = sorted(windows, key=lambda window: window.length_s)
    return ordered[(len(ordered) - 1) // 2]


def _waits_s(timeline: Timeline, windows: Sequence[Window]) -> dict[str, float]:
    found: dict[str, float] = {}
    for wait in timeline.waits:
        if any(window.start_s <= wait.start_s < window.end_s for window in windows):
            found[wait.what] = found.get(wait.what, 0.0) + (wait.end_s - wait.start_s) / len(windows)
    return found
