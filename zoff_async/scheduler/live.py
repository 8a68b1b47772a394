"""A step that is running: which actions are done, and what each of the others still waits for."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from zoff_async.errors import ScheduleError
from zoff_async.scheduler.action import Action, Span
from zoff_async.scheduler.plan import StepPlan
from zoff_async.scheduler.program import Program

if TYPE_CHECKING:
    from zoff_async.scheduler.executor import Executor


class LiveStep:
    """One step of the executor that opened it. Only the loop's thread may touch it.

    ``waves`` backwards have been begun (0, 1, ... ``waves - 1``; the first one exists from the opening).
    """

    def __init__(self, executor: Executor, program: Program, index: int, context: object) -> None:
        self.index = index
        self.plan: StepPlan = program.plan
        self.context = context
        self.waves = 1
        self.closed = False
        self.finished = False
        self.error: BaseException | None = None
        self.program = program
        self.counts = [program.first_counts.copy()]  # unmet predecessors, a list a wave
        self.done = [bytearray(program.size)]  # 1 where done, an array a wave
        self.remaining = len(program.members["open"]) + len(program.members["backward"])
        self.following: LiveStep | None = None  # the next step, while both are live
        self.lagged = program.lagged  # what each action releases there, in that step's positions
        self.group: asyncio.TaskGroup | None = None
        self.task: asyncio.Task[None] | None = None
        self.ended: asyncio.Future[None] | None = None
        self.suffix = f"@step{index}"
        self._executor = executor

    def __repr__(self) -> str:
        state = "finished" if self.finished else "closed" if self.closed else "open"
        return f"<LiveStep {self.index} of plan {self.plan.name!r}: {state}, {self.remaining} actions to go>"

    def backward(self) -> int:
        """Begin the next backward: its actions come to life.

        Returns:
            Its number, which its actions carry as ``Action.backward``.

        Raises:
            ScheduleError: if the step is closed, or its plan declares fewer backwards.
        """
        if self.closed:
            raise ScheduleError(f"step {self.index} is closed: a backward after it belongs to the next step")
        declared = self.plan.backwards
        if declared is not None and self.waves >= declared:
            raise ScheduleError(
                f"backward {self.waves + 1} began in step {self.index}, but plan {self.plan.name!r} declares "
                f"{declared} a step; declare as many as there are, or use a policy that needs no count"
            )
        wave = self.waves
        program, counts, done = self.program, self.program.wave_counts.copy(), self.done[wave - 1]
        for i, j in program.following_pairs:
            counts[j] += not done[i]
        first = self.done[0]
        for i, j in program.spread_pairs:
            counts[j] += not first[i]
        if wave == program.last_wave:
            for _, j in program.last_pairs:
                counts[j] += 1
        for j in program.gathered:
            self.counts[0][j] += 1
        self.counts.append(counts)
        self.done.append(bytearray(program.size))
        self.waves += 1
        self.remaining += len(program.members["backward"])
        self._executor.enliven(self, "backward", wave)
        return wave

    def close(self) -> None:
        """No more backwards: the closing part comes to life. The step ends when all of it is done.

        Raises:
            ScheduleError: if it is closed already.
        """
        if self.closed:
            raise ScheduleError(f"step {self.index} is closed already")
        self.closed = True
        self.remaining += len(self.program.members["close"])
        self._executor.enliven(self, "close", 0)

    def complete(self, action: Action, start_s: float | None = None, end_s: float | None = None) -> None:
        """Somebody outside has done ``action``, and with it the bucket's earlier external ones of the backward.

        A second completion, and one that comes after the step has failed or was discarded, does nothing.

        Args:
            action: With ``backward`` the number of the backward.
            start_s: When it began; with ``end_s``, its span is recorded.
            end_s: When it ended.

        Raises:
            ScheduleError: if the action is not in the plan, not external, or its backward has not begun.
        """
        i, wave = self._find(action)
        program = self.program
        if not program.external[i]:
            raise ScheduleError(f"{action} is run by the executor: only external actions are completed from outside")
        if self.error is not None or self.done[wave][i]:
            return
        for j in program.implied[i]:
            if not self.done[wave][j]:
                self._executor.finish(self, j, wave)
        if start_s is not None and end_s is not None:
            self._executor.note(Span(action, program.lanes[i], self.index, start_s, end_s, 0))
        self._executor.finish(self, i, wave)

    def is_ready(self, action: Action) -> bool:
        """Whether everything that ``action`` waits for is done (or it is done itself)."""
        i, wave = self._find(action)
        return bool(self.done[wave][i]) or not self.counts[wave][i]

    def is_done(self, action: Action) -> bool:
        """Whether ``action`` is done."""
        i, wave = self._find(action)
        return bool(self.done[wave][i])

    async def wait_done(self) -> None:
        """Until the step has closed and all of it is done.

        Raises:
            ScheduleError: if the step was discarded.
            BaseException: what an action of it raised.
        """
        if not self.finished and self.error is None:
            await self._executor.wait_until(lambda: self.finished or self.error is not None)
        if self.error is not None:
            raise self.error

    def release(self, i: int, wave: int) -> list[tuple[int, int]]:
        """Count down what waits for an action within this step, and tell what waits for nothing more.

        For a step of several backwards; with one, the executor does it itself.
        """
        program = self.program
        waving = program.waving
        if waving[i]:
            pairs = [(j, wave if waving[j] else 0) for j in program.direct[i]]
            if wave + 1 < self.waves:
                pairs += [(j, wave + 1) for j in program.following[i]]
        else:
            pairs = []
            for j in program.direct[i]:
                pairs += [(j, r) for r in range(self.waves)] if waving[j] else [(j, 0)]
            if self.waves - 1 == program.last_wave:
                pairs += [(j, program.last_wave) for j in program.last[i]]
        ready = []
        for j, r in pairs:
            counts = self.counts[r]
            counts[j] -= 1
            if not counts[j]:
                ready.append((j, r))
        return ready

    def instance(self, i: int, wave: int) -> Action:
        """The action at position ``i``, of that wave."""
        action = self.program.actions[i]
        return Action(action.kind, action.bucket, action.chunk, wave) if wave else action

    def _find(self, action: Action) -> tuple[int, int]:
        i = self.program.index.get(action.template())
        if i is None:
            raise ScheduleError(f"{action} is not in plan {self.plan.name!r} of step {self.index}")
        wave = action.backward
        if wave >= (self.waves if self.program.waving[i] else 1):
            raise ScheduleError(f"{action}: step {self.index} has begun {self.waves} backward(s), counted from 0")
        return i, wave


def chain(older: LiveStep, younger: LiveStep) -> None:
    """Make ``younger`` wait for what ``older`` has still to do, by the edges that leave ``older``'s plan.

    Plans may differ: actions are found by name, and edges into what ``younger`` does not have are void.
    """
    program = older.program
    lagged = program.lagged
    if younger.program is not program:
        place = [younger.program.index.get(action, -1) for action in program.actions]
        lagged = [tuple(place[j] for j in targets if place[j] >= 0) for targets in program.lagged]
    counts = younger.counts[0]
    for wave, done in enumerate(older.done):
        for i, targets in enumerate(lagged):
            if targets and not done[i] and (not wave or program.waving[i]):
                for j in targets:
                    counts[j] += 1
    older.following, older.lagged = younger, lagged
