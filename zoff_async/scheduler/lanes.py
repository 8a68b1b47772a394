"""The lanes of an executor: what runs on each, and what is ready to, in order of need."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from heapq import heapify
from typing import TYPE_CHECKING

from zoff_async.scheduler.plan import StepPlan

if TYPE_CHECKING:
    from zoff_async.scheduler.live import LiveStep


@dataclass(slots=True)
class LaneState:
    """One lane. ``ready`` is a heap: the older step first, then the plan's priority, never order of arrival."""

    limit: int = 1
    running: int = 0
    ready: list[tuple[int, int, int, LiveStep]] = field(default_factory=list)  # step, position, wave, its step


class Lanes:
    """All lanes by name. Two live steps share them; capacities are those of the younger step's plan.

    Args:
        ahead: Actions that a lane may start beyond its capacity, by lane.
    """

    def __init__(self, ahead: Mapping[str, int]) -> None:
        self.states: dict[str, LaneState] = {}
        self._ahead = dict(ahead)

    def fit(self, plan: StepPlan) -> None:
        """Take on the lanes and capacities of ``plan``."""
        for lane in plan.lanes:
            state = self.states.setdefault(lane.name, LaneState())
            state.limit = lane.capacity + self._ahead.get(lane.name, 0)

    def drop(self, step: LiveStep) -> None:
        """Forget what is ready of ``step``."""
        for lane in self.states.values():
            lane.ready = [item for item in lane.ready if item[3] is not step]
            heapify(lane.ready)

    def is_busy(self, name: str) -> bool:
        """Whether anything runs on that lane, or is ready to."""
        state = self.states.get(name)
        return state is not None and bool(state.running or state.ready)

    def is_still(self) -> bool:
        """Whether nothing runs and nothing is ready to: only somebody outside could move a step on."""
        return not any(lane.running or lane.ready for lane in self.states.values())
