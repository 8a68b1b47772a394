"""A plan turned into integers: what the executor touches for every action is a list index, not a name.

Built once a plan and executor, so that opening a step copies two lists.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, TypeAlias

from zoff_async.errors import ScheduleError
from zoff_async.scheduler.action import Action
from zoff_async.scheduler.plan import StepPlan

if TYPE_CHECKING:
    from zoff_async.scheduler.live import LiveStep

#: Runs one action; may return the true (start_s, end_s) of the work for its span.
Handler: TypeAlias = "Callable[[Action, LiveStep], Awaitable[tuple[float, float] | None]]"


class Program:
    """The integer form of ``plan`` for one executor.

    An action is its position in ``plan.actions``. *Instances* of it live in waves: wave r belongs to the
    r-th backward; actions of the open and close parts live once, in wave 0.

    Edges between two external kinds are left out: whoever runs those keeps their order.
    """

    def __init__(self, plan: StepPlan, handlers: Mapping[str, Handler], external: frozenset[str]) -> None:
        parts, lane_of, runs = plan.parts, plan.lane_of, plan.runs
        size = len(plan.actions)
        self.plan = plan
        self.size = size
        self.actions = plan.actions
        self.names = [str(action) for action in plan.actions]
        self.index = plan.index
        self.part = [parts[action.kind] for action in plan.actions]
        self.lanes = [lane_of[action.kind] for action in plan.actions]
        self.external = [action.kind in external for action in plan.actions]
        self.closing = [part == "close" for part in self.part]
        self.waving = [part == "backward" for part in self.part]
        self.members = {
            name: [i for i in range(size) if self.part[i] == name] for name in ("open", "backward", "close")
        }
        self.handlers = [runs.get(action) or handlers.get(action.kind, _missing) for action in plan.actions]
        for i, handler in enumerate(self.handlers):
            if handler is _missing and not self.external[i]:
                raise ScheduleError(
                    f"no handler for {self.names[i]} of plan {plan.name!r}: handlers know "
                    f"{', '.join(sorted(handlers)) or 'nothing'}; give plan.add(..., run=coroutine function)"
                )
        self.implied = self._implied()
        self._link()

    def _implied(self) -> list[tuple[int, ...]]:
        """For each external action the earlier external ones of its bucket: it cannot happen without them."""
        seen: dict[int | None, tuple[int, ...]] = {}
        implied: list[tuple[int, ...]] = []
        for i, action in enumerate(self.actions):
            if not self.external[i]:
                implied.append(())
                continue
            before = seen.get(action.bucket, ())
            implied.append(before)
            seen[action.bucket] = (*before, i)
        return implied

    def _link(self) -> None:
        size = self.size
        last_wave = -1 if self.plan.backwards is None else self.plan.backwards - 1
        #: Unmet predecessors of wave 0 and of the parts that live once, when the step opens.
        self.first_counts = [0] * size
        #: The same of a later wave, before what its neighbours add.
        self.wave_counts = [0] * size
        direct: list[list[int]] = [[] for _ in range(size)]  # same step; all in wave 0
        following: list[list[int]] = [[] for _ in range(size)]  # the next wave
        lagged: list[list[int]] = [[] for _ in range(size)]  # the next step
        last: list[list[int]] = [[] for _ in range(size)]  # close part -> last declared wave, when that is not 0
        waving, external = self.waving, self.external
        for before, after, backward, lag in self.plan.links:
            if external[before] and external[after]:
                continue
            if lag:
                lagged[before].append(after)
            elif backward:
                following[before].append(after)
            elif self.closing[before] and waving[after] and last_wave != 0:
                last[before].append(after)
            else:
                direct[before].append(after)
                self.first_counts[after] += 1
                if waving[before] and waving[after]:
                    self.wave_counts[after] += 1
        self.direct = [tuple(item) for item in direct]
        self.following = [tuple(item) for item in following]
        self.lagged = [tuple(item) for item in lagged]
        self.last = [tuple(item) for item in last]
        self.last_wave = last_wave
        self.last_pairs = [(i, j) for i in range(size) for j in self.last[i]]
        self.following_pairs = [(i, j) for i in range(size) for j in self.following[i]]
        #: What a later wave adds: its edges into the parts that live once, and the open part's edges into it.
        self.gathered = [j for i in range(size) if waving[i] for j in self.direct[i] if not waving[j]]
        self.spread_pairs = [(i, j) for i in range(size) if not waving[i] for j in self.direct[i] if waving[j]]


async def _missing(action: Action, step: LiveStep) -> None:
    """Stands where an external action has no handler: it is never started."""
    raise AssertionError(f"{action} was started, and is external")
