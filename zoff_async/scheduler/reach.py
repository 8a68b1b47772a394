"""Which actions are certain to be done before another starts, by any chain of edges.

A set of actions is one integer, bit i for the action at position i, so a plan of ten thousand actions
takes milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property
from heapq import heapify, heappop, heappush

from zoff_async.scheduler.plan import Link, StepPlan


def topological_order(plan: StepPlan, key: Callable[[int], tuple[int, ...]] | None = None) -> list[int]:
    """Positions in an order that keeps every edge within one step; among free ones the lowest ``key`` first.

    Shorter than ``plan.actions`` if the plan has a cycle: what is missing hangs on it.
    """
    rank = key or (lambda i: (i,))
    waits = [0] * len(plan.actions)
    after: list[list[int]] = [[] for _ in plan.actions]
    for link in inside(plan.links):
        waits[link.after] += 1
        after[link.before].append(link.after)
    free = [(rank(i), i) for i, count in enumerate(waits) if not count]
    heapify(free)
    order = []
    while free:
        _, i = heappop(free)
        order.append(i)
        for j in after[i]:
            waits[j] -= 1
            if not waits[j]:
                heappush(free, (rank(j), j))
    return order


def inside(links: Iterable[Link]) -> list[Link]:
    """The links that stay within one backward of one step."""
    return [link for link in links if not link.backward and not link.lag]


class Reach:
    """Sets of certain predecessors of each action of a plan without cycles.

    ``now[j]``: within the step, ``j`` included. ``next_step[j]``: actions of the step before, for ``j`` of
    this one (of its first backward, if it lives in one). ``next_backward[j]``: of the backward before.
    """

    def __init__(self, plan: StepPlan, order: list[int]) -> None:
        self._plan = plan
        self._order = order

    @cached_property
    def now(self) -> list[int]:
        sources = self._grouped(lambda link: not link.backward and not link.lag)
        found = [0] * len(self._order)
        for j in self._order:
            bits = 1 << j
            for i in sources[j]:
                bits |= found[i]
            found[j] = bits
        return found

    @cached_property
    def next_step(self) -> list[int]:
        return self._across(lambda link: bool(link.lag), lambda i, j: True)

    @cached_property
    def next_backward(self) -> list[int]:
        parts = [self._plan.parts[action.kind] == "backward" for action in self._plan.actions]
        return self._across(lambda link: bool(link.backward), lambda i, j: parts[i] and parts[j])

    def _across(self, crosses: Callable[[Link], bool], stays: Callable[[int, int], bool]) -> list[int]:
        """Seed with the crossing links, then pass on inside the later backward or step."""
        seeds, sources = (
            self._grouped(crosses),
            self._grouped(lambda link: not link.backward and not link.lag),
        )
        now = self.now
        found = [0] * len(self._order)
        for j in self._order:
            bits = 0
            for i in seeds[j]:
                bits |= now[i]
            for i in sources[j]:
                if stays(i, j):
                    bits |= found[i]
            found[j] = bits
        return found

    def _grouped(self, wanted: Callable[[Link], bool]) -> list[list[int]]:
        sources: list[list[int]] = [[] for _ in self._order]
        for link in self._plan.links:
            if wanted(link):
                sources[link.after].append(link.before)
        return sources
