"""What the scheduler's tests share: small layouts, and runs in virtual time as lists of (action, start, end)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from zoff_async.scheduler import Action, Executor, KindCost, LiveStep, Span, StepPlan, run_virtual
from zoff_async.scheduler.simulate import run_plan

Log = list[tuple[str, float, float]]


def timed(plan: StepPlan, seconds: Mapping[str, float], *, steps: int = 1, waves: int = 1) -> Log:
    """Every action that takes time, in the order of starting; ``@1`` behind those of the second step."""
    spans = run_plan(plan, KindCost(seconds), steps, plan.backwards or waves)
    return as_log(span for span in spans if span.end_s > span.start_s)


def as_log(spans: Any) -> Log:
    ordered = sorted(spans, key=lambda span: (span.start_s, span.end_s, span.step, span.lane, str(span.action)))
    return [(f"{s.action}@{s.step}" if s.step else str(s.action), s.start_s, s.end_s) for s in ordered]


def edges(plan: StepPlan, rule: str | None = None) -> list[str]:
    return [str(edge) for edge in plan.edges if rule is None or edge.rule == rule]


class Stage:
    """An executor whose handlers sleep in virtual time, and what it did.

    ``faults`` maps the text of an action and a step (``adam:3.0@1``) to the exception it raises half way.
    """

    def __init__(self, plan: StepPlan, seconds: Mapping[str, float] | None = None, **options: Any) -> None:
        self.plan = plan
        self.seconds = dict(seconds or {})
        self.started: list[str] = []
        self.ended: list[str] = []
        self.cancelled: list[str] = []
        self.spans: list[Span] = []
        self.faults: dict[str, BaseException] = {}
        self.told: list[tuple[BaseException, int | None]] = []
        handlers = options.pop("handlers", None) or {kind.name: self.handle for kind in plan.kinds}
        options.setdefault("record", self.spans.append)
        self.executor = Executor(
            handlers,
            clock=lambda: asyncio.get_running_loop().time(),
            on_failure=lambda error, step: self.told.append((error, None if step is None else step.index)),
            **options,
        )

    async def handle(self, action: Action, step: LiveStep) -> None:
        name = f"{action}@{step.index}"
        self.started.append(name)
        try:
            lasts_s = self.seconds.get(action.kind, 1.0)
            await asyncio.sleep(lasts_s / 2)
            if name in self.faults:
                raise self.faults[name]
            await asyncio.sleep(lasts_s / 2)
        except asyncio.CancelledError:
            self.cancelled.append(name)
            raise
        self.ended.append(name)

    def play(self, scene: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        """Run ``scene`` in virtual time with the executor's supervisor beside it, and close both."""

        async def main() -> Any:
            supervisor = asyncio.create_task(self.executor.run(), name="executor")
            await asyncio.sleep(0)
            try:
                return await scene()
            finally:
                await self.executor.close()
                await supervisor

        return run_virtual(main(), waiting=self.executor.waiting)

    async def step(self, backwards: int = 1) -> LiveStep:
        """Open and close a step, as soon as there is room."""
        await self.executor.wait_room()
        step = self.executor.open(self.plan)
        for _ in range(backwards - 1):
            step.backward()
        step.close()
        return step
