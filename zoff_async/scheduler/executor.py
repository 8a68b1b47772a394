"""The executor: runs the actions of at most two live steps as their predecessors finish.

Kinds are data: a lane and a handler each. The loop knows none of them by name.

    open() ─> LiveStep ─> ready heap of each lane ─> one named task an action ─> its successors

One supervisor task (``run``) holds a task a live step, which holds the step's ``TaskGroup``; every action's
task is in there. A failure therefore ends a step by structure: nothing new starts, running actions are
cancelled and awaited, the other live step too, and only then is the failure announced.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from heapq import heappop, heappush

from zoff_async.errors import ClosedError, ScheduleError
from zoff_async.scheduler.action import Action, Span
from zoff_async.scheduler.lanes import Lanes, LaneState
from zoff_async.scheduler.live import LiveStep, chain
from zoff_async.scheduler.plan import StepPlan
from zoff_async.scheduler.program import Handler, Program
from zoff_async.scheduler.waiters import Waiters

logger = logging.getLogger("zoff_async.scheduler")

_KEPT_PROGRAMS = 8


class _Abort(Exception):
    """Tells a step's TaskGroup to end; the reason is kept by the executor, in the order of time."""


@dataclass(frozen=True)
class ExecutorStatistics:
    """What an executor has done so far."""

    steps_opened: int
    steps_finished: int
    live_steps: int
    running_actions: int
    ready_actions: int


class Executor:
    """Runs step plans on one event loop. All methods belong to that loop's thread.

    Args:
        handlers: A coroutine function a kind: ``handler(action, step)``. It may return the true
            ``(start_s, end_s)`` of the work; otherwise the span is what ``clock`` said around it.
        external: Kinds completed from outside with ``step.complete``. Whoever does keeps their order: an edge
            between two of them is not waited for.
        clock: Seconds for spans; ``time.perf_counter`` by default.
        record: Takes each span as its action ends, before anything that waits for it starts.
        bytes_of: Bytes that an action moves, for its span.
        on_ready: An external action waits for nothing any more. Called from ``open`` too, before it returns.
        on_failure: An action of the step raised; everything has been cancelled and awaited by then.
        ahead: Actions that a lane may start beyond its capacity, by lane: a thread pool with a short queue
            never idles.
    """

    def __init__(
        self,
        handlers: Mapping[str, Handler],
        *,
        external: frozenset[str] = frozenset(),
        clock: Callable[[], float] | None = None,
        record: Callable[[Span], None] | None = None,
        bytes_of: Callable[[Action], int] | None = None,
        on_ready: Callable[[LiveStep, Action], None] | None = None,
        on_failure: Callable[[BaseException, LiveStep | None], None] | None = None,
        ahead: Mapping[str, int] | None = None,
    ) -> None:
        self._handlers = dict(handlers)
        self._external = external
        self._clock = clock or time.perf_counter
        self._record = record
        self._bytes_of = bytes_of
        self._on_ready = on_ready
        self._on_failure = on_failure
        self._live: list[LiveStep] = []
        self._lanes = Lanes(ahead or {})
        self._programs: dict[int, Program] = {}
        self._opened = 0
        self._finished = 0
        self._first_error: tuple[BaseException, LiveStep] | None = None
        self._waiters = Waiters()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._scopes: asyncio.TaskGroup | None = None
        self._pump_due = False
        self._closing: asyncio.Future[None] | None = None
        self._gone: asyncio.Event | None = None
        self._closed = False

    # The supervisor

    async def run(self) -> None:
        """Hold the steps' tasks until ``close()``. Run it as a task before the first step is to move.

        A step's failure does not end it: it is kept in ``failure``, told to ``on_failure``, and refused by
        ``open`` until ``reset()``.

        Raises:
            ScheduleError: if it runs already.
        """
        if self._loop is not None:
            raise ScheduleError("the executor runs already: one supervisor is enough")
        self._loop = asyncio.get_running_loop()
        self._closing = self._loop.create_future()
        self._gone = asyncio.Event()
        try:
            async with asyncio.TaskGroup() as scopes:
                self._scopes = scopes
                for step in self._live:
                    self._hold(step)
                if not self._closed:
                    await self._closing
        finally:
            self._closed = True
            self._scopes = None
            self._drop(self._live[:], ScheduleError("the executor was stopped with the step in flight"))
            self._loop = None
            self._gone.set()
            self._waiters.wake()

    def _hold(self, step: LiveStep) -> None:
        if self._scopes is not None and self._loop is not None:
            step.ended = self._loop.create_future()
            step.task = self._scopes.create_task(self._scope(step), name=f"step{step.index}")

    async def _scope(self, step: LiveStep) -> None:
        """The life of one step: its group of tasks, and the announcement if one of them fails."""
        assert step.ended is not None
        try:
            async with asyncio.TaskGroup() as group:
                step.group = group
                self._pump()
                await step.ended
        except* _Abort:
            pass
        if self._first_error is not None and self._first_error[1] is step:
            await self._announce(*self._first_error)

    async def _announce(self, error: BaseException, failed: LiveStep) -> None:
        """Everything of the failed step has been awaited; end the other one, then tell."""
        others = [step for step in self._live if step is not failed]
        tasks = [step.task for step in others if step.task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        self._drop(self._live[:], error)
        self._waiters.failure = error
        if self._on_failure is not None:
            try:
                self._on_failure(error, failed)
            except Exception:
                logger.exception("on_failure raised while it was told of a failure in step %d", failed.index)
        self._waiters.wake()

    # Steps

    @property
    def failure(self) -> BaseException | None:
        """What an action raised, once everything has ended because of it; until ``reset()``."""
        return self._waiters.failure

    @property
    def live(self) -> tuple[LiveStep, ...]:
        """The live steps, the older first."""
        return tuple(self._live)

    def open(self, plan: StepPlan, context: object = None) -> LiveStep:
        """Begin a step: its open part and its first backward come to life.

        Raises:
            ScheduleError: if two steps are live, the last one is not closed yet, an action has failed, or a
                kind of the plan has no handler.
            ClosedError: after ``close()``.
        """
        if self._closed:
            raise ClosedError("the executor is closed: it opens no more steps")
        if self.failure is not None or self._first_error is not None:
            raise ScheduleError("an action has failed: call reset() before the next step") from self.failure
        if len(self._live) >= 2:
            raise ScheduleError(f"steps {self._live[0].index} and {self._live[1].index} are live: await wait_room()")
        if self._live and not self._live[-1].closed:
            raise ScheduleError(f"step {self._live[-1].index} is still open: close it, or discard it")
        program = self._program(plan)
        self._lanes.fit(plan)
        step = LiveStep(self, program, self._opened, context)
        self._opened += 1
        if self._live:
            chain(self._live[-1], step)
        self._live.append(step)
        self._hold(step)
        self.enliven(step, "open", 0)
        self.enliven(step, "backward", 0)
        return step

    async def discard(self, step: LiveStep) -> None:
        """Drop the youngest live step: cancel what runs of it, await that, forget the rest.

        Raises:
            ScheduleError: if a younger step is live, for it may wait for this one.
        """
        if step not in self._live:
            return
        if step is not self._live[-1]:
            raise ScheduleError(f"step {step.index} has a younger step behind it: discard that first")
        step.error = ScheduleError(f"step {step.index} was discarded")
        self._lanes.drop(step)
        if step.task is not None:
            step.task.cancel()
            await asyncio.wait([step.task])
        if step in self._live:
            self._drop([step], step.error)
            self._waiters.wake()

    def reset(self) -> None:
        """Forget a failure, and drop what is left of the steps; the next ``open`` is welcome again."""
        if self._first_error is not None and self.failure is None:
            raise ScheduleError("the failure is still being cleaned up: await wait_idle() first")
        self._waiters.failure = None
        self._first_error = None

    async def wait_room(self) -> None:
        """Until fewer than two steps are live. Raises the failure if there is one."""
        await self.wait_until(lambda: len(self._live) < 2)

    async def wait_idle(self) -> None:
        """Until no closed step is live and no action runs. Raises the failure if there is one.

        An open step that waits for its backward does not count.
        """
        await self.wait_until(self._is_idle)

    async def close(self) -> None:
        """Let what can still run finish, drop the rest, and end ``run``. Safe to call twice."""
        self._closed = True
        if self._loop is None or self._closing is None or self._gone is None:
            return
        try:
            await self.wait_until(self._is_still)
        except BaseException as error:
            if error is not self.failure:
                raise
        for step in self._live[::-1]:
            await self.discard(step)
        if not self._closing.done():
            self._closing.set_result(None)
        await self._gone.wait()

    def lane_busy(self, lane: str) -> bool:
        """Whether anything runs on ``lane`` or is ready to."""
        return self._lanes.is_busy(lane)

    def statistics(self) -> ExecutorStatistics:
        """Counts of steps and actions, now."""
        return ExecutorStatistics(
            steps_opened=self._opened,
            steps_finished=self._finished,
            live_steps=len(self._live),
            running_actions=sum(lane.running for lane in self._lanes.states.values()),
            ready_actions=sum(len(lane.ready) for lane in self._lanes.states.values()),
        )

    def waiting(self) -> list[str]:
        """A line for each live action that is not done: what it waits for, or that it runs."""
        from zoff_async.scheduler.story import waiting

        return waiting(self._live)

    # For LiveStep

    def enliven(self, step: LiveStep, part: str, wave: int) -> None:
        """A part has come to life: what waits for nothing is ready."""
        counts, done = step.counts[wave], step.done[wave]
        for i in step.program.members[part]:
            if not counts[i] and not done[i]:
                self._ready(step, i, wave)
        self._end_if_done(step)

    def finish(self, step: LiveStep, i: int, wave: int) -> None:
        """An action is done: count down what waits for it, in this step and the next."""
        step.done[wave][i] = 1
        if step.waves == 1:
            counts = step.counts[0]
            for j in step.program.direct[i]:
                counts[j] -= 1
                if not counts[j]:
                    self._ready(step, j, 0)
        else:
            for j, r in step.release(i, wave):
                self._ready(step, j, r)
        following = step.following
        if following is not None:
            counts = following.counts[0]
            for j in step.lagged[i]:
                counts[j] -= 1
                if not counts[j]:
                    self._ready(following, j, 0)
        step.remaining -= 1
        if not step.remaining:
            self._end_if_done(step)

    def note(self, span: Span) -> None:
        """Record a span that was measured outside."""
        if self._record is not None:
            self._record(span)

    async def wait_until(self, predicate: Callable[[], bool]) -> None:
        """Until ``predicate()`` holds, asked after every action and step. Raises the failure if there is one."""
        # While a failure is being cleaned up nothing has come true: its waiters are to hear of it.
        await self._waiters.wait_until(lambda: self._first_error is None and predicate())

    # Actions

    def _ready(self, step: LiveStep, i: int, wave: int) -> None:
        program = step.program
        if (program.closing[i] and not step.closed) or step.error is not None:
            return
        if program.external[i]:
            if self._on_ready is not None and not step.done[wave][i]:
                self._on_ready(step, step.instance(i, wave))
            return
        heappush(self._lanes.states[program.lanes[i]].ready, (step.index, i, wave, step))
        self._pump_soon()

    def _pump_soon(self) -> None:
        """Not at once: what else ends in this turn of the loop comes first, so that need decides, not arrival."""
        if not self._pump_due and self._loop is not None:
            self._pump_due = True
            self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        """Start what is ready, as far as the lanes have room."""
        self._pump_due = False
        if self._first_error is not None:
            return
        for lane in self._lanes.states.values():
            ready = lane.ready
            while ready and lane.running < lane.limit:
                step = ready[0][3]
                if step.group is None:
                    break  # its task enters the group in this turn of the loop, and pumps
                _, i, wave, _ = heappop(ready)
                lane.running += 1
                name = f"{step.instance(i, wave) if wave else step.program.names[i]}{step.suffix}"
                step.group.create_task(self._act(step, i, wave, lane), name=name)

    async def _act(self, step: LiveStep, i: int, wave: int, lane: LaneState) -> None:
        program = step.program
        action = step.instance(i, wave) if wave else program.actions[i]
        handler = program.handlers[i]
        if self._first_error is not None:
            lane.running -= 1
            return  # its task was made before the failure, but nothing new starts
        try:
            if self._record is None:
                await handler(action, step)
            else:
                start_s = self._clock()
                times = await handler(action, step)
                start_s, end_s = times or (start_s, self._clock())
                size = self._bytes_of(action) if self._bytes_of is not None else 0
                self._record(Span(action, program.lanes[i], step.index, start_s, end_s, size))
            self.finish(step, i, wave)
        except BaseException as error:
            raise self._failed(error, action, step) from None
        finally:
            lane.running -= 1
        if lane.ready:
            self._pump_soon()
        if self._waiters:
            self._waiters.wake()

    def _failed(self, error: BaseException, action: Action, step: LiveStep) -> BaseException:
        """What the action's task is to raise: the first error is kept, and ends the step."""
        if isinstance(error, asyncio.CancelledError):
            if self._first_error is not None or (step.task is not None and step.task.cancelling()):
                return error  # asked for: a failure, a discard, or the end of run()
            # A TaskGroup takes a cancelled task for a finished one; the step would wait for it for ever.
            cancelled = ScheduleError(f"{action} of step {step.index} was cancelled, and nobody had asked for it")
            cancelled.__cause__ = error
            error = cancelled
        if self._first_error is None:
            self._first_error = (error, step)
        else:
            logger.warning("%s of step %d failed after a first failure", action, step.index, exc_info=error)
        return _Abort()

    # Ends

    def _end_if_done(self, step: LiveStep) -> None:
        if step.remaining or not step.closed or step.finished:
            return
        step.finished = True
        self._finished += 1
        self._live.remove(step)
        step.following = None
        if step.ended is not None and not step.ended.done():
            step.ended.set_result(None)
        self._waiters.wake()

    def _drop(self, steps: list[LiveStep], error: BaseException) -> None:
        for step in steps:
            step.error = step.error or error
            step.following = None
            self._live.remove(step)
            self._lanes.drop(step)
        if self._live:
            self._live[-1].following = None

    def _is_still(self) -> bool:
        return self._first_error is None and self._lanes.is_still()

    def _is_idle(self) -> bool:
        return self._is_still() and not any(step.closed for step in self._live)

    def _program(self, plan: StepPlan) -> Program:
        program = self._programs.get(id(plan))
        if program is None:
            program = Program(plan, self._handlers, self._external)
            while len(self._programs) >= _KEPT_PROGRAMS:
                del self._programs[next(iter(self._programs))]
            self._programs[id(plan)] = program  # holds the plan, so the id stays its own
        return program
