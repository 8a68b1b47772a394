"""Run a plan in virtual time: the real executor, with sleeps for work.

What comes out is a statement about the real scheduler: same priorities, same slots, same two live steps.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, replace

from zoff_async.scheduler.action import Action, Span
from zoff_async.scheduler.analysis import (
    critical_path,
    exposed_and_hidden_s,
    peak_slots,
    resource_bound_s,
    steady_window,
    utilisation,
)
from zoff_async.scheduler.cost import CostModel
from zoff_async.scheduler.executor import Executor
from zoff_async.scheduler.live import LiveStep
from zoff_async.scheduler.plan import StepPlan
from zoff_async.scheduler.virtual import run_virtual


@dataclass(frozen=True)
class Simulation:
    """What a plan does with given action times. Times are virtual seconds from the first step's start.

    Args:
        spans: Every action of every step, in the order in which they ended.
        period_s: From one step to the next in the last half of the steps: the ideal time of this plan.
        resource_bound_s: The busiest lane's seconds a step over its capacity: no policy can beat it.
        utilisation: Busy share of each lane in the last period.
        exposed_s: Of each kind but the compute lane's, seconds of the last period in which it ran and
            nothing on the compute lane did.
        hidden_s: The same beside something on the compute lane.
        peak_slots: Most slots held at once, by staging direction.
        peak_slot_bytes: Most bytes held in slots at once; 0 where the plan knows no ``bucket_bytes``.
        critical_path: The cycle that sets the period: each action begins when the one before it has ended.
    """

    plan: StepPlan
    spans: tuple[Span, ...]
    period_s: float
    resource_bound_s: float
    utilisation: Mapping[str, float]
    exposed_s: Mapping[str, float]
    hidden_s: Mapping[str, float]
    peak_slots: Mapping[str, int]
    peak_slot_bytes: Mapping[str, int]
    critical_path: tuple[Action, ...]

    @property
    def total_s(self) -> float:
        """When the last action of the last step ended."""
        return max((span.end_s for span in self.spans), default=0.0)

    def describe(self) -> str:
        """A printout for people."""
        ratio = self.period_s / self.resource_bound_s if self.resource_bound_s else float("inf")
        lines = [
            f"{self.plan.name}: a step every {self.period_s:.4g} s, "
            f"{ratio:.2f} x the resource bound of {self.resource_bound_s:.4g} s",
            "busy     " + "  ".join(f"{lane} {share:.0%}" for lane, share in self.utilisation.items()),
            "exposed  " + "  ".join(f"{kind} {value:.4g} s" for kind, value in self.exposed_s.items()),
            "hidden   " + "  ".join(f"{kind} {value:.4g} s" for kind, value in self.hidden_s.items()),
            "slots    "
            + "  ".join(
                f"{name} {count}" + (f" ({self.peak_slot_bytes[name]:,} bytes)" if self.peak_slot_bytes[name] else "")
                for name, count in self.peak_slots.items()
            ),
            "critical " + _folded_path(self.critical_path),
        ]
        return "\n".join(lines) + "\n"


def _folded_path(path: tuple[Action, ...]) -> str:
    words = [str(action) for action in path]
    if len(words) > 16:
        words = [*words[:8], f"({len(words) - 16} more)", *words[-8:]]
    return " ".join(words)


def simulate(plan: StepPlan, cost: CostModel, *, steps: int = 6, backwards: int = 1) -> Simulation:
    """Run ``steps`` steps of ``plan`` in virtual time.

    A step closes when its plan may close, and the next one opens at once; forward and backward run as
    ordinary actions of the compute lane. Two runs give the same result. May be called beside a running event loop.

    Args:
        plan: What to run. Nodes of the user's own cost time like any action; their coroutines are not called.
        cost: Seconds of each action.
        steps: How many; the steady figures come from the last ones.
        backwards: Backwards of each step; a declared count of the plan is used instead.

    Raises:
        ValueError: if ``steps`` or ``backwards`` is below 1.
        DeadlockError: if the plan stands still, naming who waits for what.
    """
    if steps < 1 or backwards < 1:
        raise ValueError(f"steps is {steps}, backwards {backwards}: both are at least 1")
    waves = plan.backwards or backwards
    spans = run_plan(plan, cost, steps, waves)
    start_s, end_s, period_s = steady_window(plan, spans, steps)
    exposed, hidden = exposed_and_hidden_s(plan, spans, start_s, end_s)
    slots, slot_bytes = peak_slots(plan, spans)
    return Simulation(
        plan=plan,
        spans=tuple(spans),
        period_s=period_s,
        resource_bound_s=resource_bound_s(plan, cost, waves),
        utilisation=utilisation(plan, spans, start_s, end_s),
        exposed_s=exposed,
        hidden_s=hidden,
        peak_slots=slots,
        peak_slot_bytes=slot_bytes,
        critical_path=critical_path(plan, spans),
    )


def run_plan(plan: StepPlan, cost: CostModel, steps: int, waves: int) -> list[Span]:
    """The spans of ``steps`` steps of ``waves`` backwards in virtual time, in the order in which they ended."""
    return _Drive(plan, cost, waves).run(steps)


class _Drive:
    """Plays the training loop: opens steps, begins backwards and closes, when a real loop would."""

    def __init__(self, plan: StepPlan, cost: CostModel, waves: int) -> None:
        self._plan = plan
        self._cost = cost
        self._waves = waves
        self._spans: list[Span] = []
        self._outside = {action.kind for action in plan.actions if action.kind in plan.external}
        self._per_wave = sum(action.kind in self._outside for action in plan.actions)
        self._copies = {staging.name for staging in plan.staging}
        self._missing = 0  # external actions of the present backward that are not done
        self._step: LiveStep | None = None
        self._loop: asyncio.AbstractEventLoop
        self._closed: asyncio.Future[None]
        self._executor = Executor(
            {kind.name: self._sleep for kind in plan.kinds},
            clock=self._time,
            record=self._note,
            bytes_of=self._bytes_of,
        )

    def run(self, steps: int) -> list[Span]:
        run_virtual(self._main(steps), waiting=self._executor.waiting)
        return self._spans

    async def _main(self, steps: int) -> None:
        self._loop = asyncio.get_running_loop()
        plan = replace(self._plan, node_runs=()) if self._plan.node_runs else self._plan
        supervisor = asyncio.create_task(self._executor.run(), name="executor")
        for _ in range(steps):
            await self._executor.wait_room()
            self._missing = self._per_wave
            self._step = self._executor.open(plan)
            self._closed = self._loop.create_future()
            self._advance(self._step)
            await self._closed
        await self._executor.wait_idle()
        await self._executor.close()
        await supervisor

    def _time(self) -> float:
        return self._loop.time()

    def _sleep(self, action: Action, step: LiveStep) -> Awaitable[None]:
        return asyncio.sleep(self._cost.seconds(action))

    def _bytes_of(self, action: Action) -> int:
        sizes = self._plan.bucket_bytes
        if not sizes or action.bucket is None or action.kind not in self._copies:
            return 0
        return sizes[action.bucket]

    def _note(self, span: Span) -> None:
        self._spans.append(span)
        step = self._step
        if span.action.kind in self._outside and step is not None and span.step == step.index:
            self._missing -= 1
            self._advance(step)

    def _advance(self, step: LiveStep) -> None:
        """What the loop does next: another backward, or ``step()``."""
        if step.closed:
            return
        last = step.waves == self._waves
        if last and (self._plan.closes == "last_backward" or self._missing == 0):
            step.close()
            self._closed.set_result(None)
        elif not last and self._missing == 0:
            step.backward()
            self._missing = self._per_wave
            self._advance(step)
