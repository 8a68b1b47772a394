"""The step as data: actions, the lanes they run on, and the named reasons for their order.

A plan is a template. Its ``open`` part comes to life when a step opens, its ``backward`` part once for
every backward of the step, its ``close`` part when the step closes. An edge whose ``after`` carries
``#1`` goes into the next backward, ``@+1`` into the next step. An edge from the backward part to the
close part, or into the next step, holds for every backward of the step.

Plans never change: an edit gives a new plan, and refuses one that breaks a rule.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from zoff_async.errors import PlanError
from zoff_async.scheduler.action import Action, Edge, Kind, Lane, Staging

if TYPE_CHECKING:
    from zoff_async.scheduler.live import LiveStep

NodeRun: TypeAlias = "Callable[[Action, LiveStep], Awaitable[Any]]"
Actions: TypeAlias = "Action | str | Iterable[Action | str]"

PARTS = ("open", "backward", "close")


class Link(NamedTuple):
    """An edge by positions in ``plan.actions``, with ``backward`` and ``lag`` of its ``after``."""

    before: int
    after: int
    backward: int
    lag: int


@dataclass(frozen=True, repr=False)
class StepPlan:
    """One step, ready to print, check, simulate or run.

    Args:
        name: The policy it came from.
        actions: In priority order: of two ready actions of one lane the earlier one starts first.
        edges: What waits for what, and by which rule.
        kinds: Lane and part of each kind of action.
        lanes: Lanes and their capacities.
        closes: When a step of this plan may close: ``step`` (the optimizer's ``step()``) or ``last_backward``
            (as soon as the last declared backward begins).
        stale: How many steps old the gradient is that Adam applies.
        clip: Whether Adam needs the global norm first.
        backwards: Declared backwards a step; None for any number.
        staging: Slots of each direction and what fills and frees them.
        bucket_bytes: Bytes of one copy of each bucket; may be empty.
        external: Kinds that somebody outside completes. Only the first of them can be held back.
        node_runs: Coroutine functions of the user's own nodes; not part of the text form.

    A plan built by hand is not checked until ``validate(plan)`` is called or an edit is made.
    """

    name: str
    actions: tuple[Action, ...]
    edges: tuple[Edge, ...]
    kinds: tuple[Kind, ...]
    lanes: tuple[Lane, ...]
    closes: str = "step"
    stale: int = 0
    clip: bool = False
    backwards: int | None = None
    staging: tuple[Staging, ...] = ()
    bucket_bytes: tuple[int, ...] = ()
    external: tuple[str, ...] = ("fwd", "bwd")
    node_runs: tuple[tuple[Action, NodeRun], ...] = ()

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return f"<StepPlan {self.name!r}: {len(self.actions)} actions, {len(self.edges)} edges>"

    def __str__(self) -> str:
        from zoff_async.scheduler.plan_text import write

        return write(self)

    @classmethod
    def parse(cls, text: str) -> StepPlan:
        """Read a plan as ``str(plan)`` writes it (users' coroutines are not written).

        Raises:
            PlanError: naming the line that cannot be read, or what the validator has against the plan.
        """
        from zoff_async.scheduler.plan_text import read
        from zoff_async.scheduler.validate import validate

        plan = read(text)
        validate(plan)
        return plan

    def describe(self) -> str:
        """A printout for people: lanes with their actions in order, then what waits for what, by rule."""
        from zoff_async.scheduler.plan_text import describe

        return describe(self)

    def to_dot(self) -> str:
        """The plan as a Graphviz digraph, one cluster a lane; edges into later backwards and steps dashed."""
        from zoff_async.scheduler.plan_text import to_dot

        return to_dot(self)

    # What is in it

    @property
    def exact(self) -> bool:
        """Whether every update uses the gradient of its own step."""
        return self.stale == 0

    @cached_property
    def lane_of(self) -> Mapping[str, str]:
        """The lane of each kind."""
        return MappingProxyType({kind.name: kind.lane for kind in self.kinds})

    @cached_property
    def parts(self) -> Mapping[str, str]:
        """The part of each kind: ``open``, ``backward`` or ``close``."""
        return MappingProxyType({kind.name: kind.part for kind in self.kinds})

    @cached_property
    def runs(self) -> Mapping[Action, NodeRun]:
        """The coroutine functions of the user's own nodes."""
        return MappingProxyType(dict(self.node_runs))

    @cached_property
    def index(self) -> Mapping[Action, int]:
        """Position of each action; the lower, the earlier it starts among ready ones."""
        return MappingProxyType({action: position for position, action in enumerate(self.actions)})

    @cached_property
    def links(self) -> tuple[Link, ...]:
        """The edges by position, for whoever walks the whole plan.

        Raises:
            PlanError: if an edge names an action that is not in the plan.
        """
        index = dict(self.index)
        links = []
        for before, after, rule in self.edges:
            _, _, _, backward, lag = after
            try:
                target = index[Action(*after[:3]) if backward or lag else after]
                links.append(Link(index[before], target, backward, lag))
            except KeyError:
                missing = before if before not in index else after
                raise PlanError(
                    f"edge {before} -> {after} (rule {rule}) names {missing}, which is not in plan "
                    f"{self.name!r}; add the action, or drop the edge\n{_near(self, missing)}"
                ) from None
        return tuple(links)

    def priority(self, action: Action) -> int:
        """Position in the priority order; 0 starts first."""
        return self.index[action.template()]

    def predecessors(self, action: Action | str) -> tuple[Edge, ...]:
        """The edges that ``action`` waits for, those from an earlier backward or step included."""
        wanted = self._existing(action)
        return tuple(edge for edge in self.edges if edge.after.template() == wanted)

    def successors(self, action: Action | str) -> tuple[Edge, ...]:
        """The edges that wait for ``action``."""
        wanted = self._existing(action)
        return tuple(edge for edge in self.edges if edge.before == wanted)

    def matching(self, actions: Actions) -> tuple[Action, ...]:
        """The plan's actions that ``actions`` names; ``adam:3`` and ``adam`` name all chunks below them.

        ``backward`` and ``lag`` are kept.

        Raises:
            PlanError: naming what is not in the plan.
        """
        if isinstance(actions, str | Action):
            actions = (actions,)
        found: list[Action] = []
        for item in actions:
            action = Action.parse(item) if isinstance(item, str) else item
            found += self._below(action)
        return tuple(found)

    # Edits

    def serialize(self, kind_a: str, kind_b: str) -> StepPlan:
        """Take one overlap away: no action of ``kind_a`` runs beside one of ``kind_b``, of whichever step.

        ``kind_a`` goes first wherever the plan's other edges allow it: with enough staging slots all of
        ``kind_a``, then all of ``kind_b``; with few slots the two alternate. The new edges carry the rule
        ``serialize:KIND_A-KIND_B``. Between two backwards of one step a forward cannot be held, so edges
        into it are left out there.

        Raises:
            PlanError: if a kind is not in the plan, or the result breaks a rule.
        """
        from zoff_async.scheduler.edit import serialize

        return serialize(self, kind_a, kind_b)

    def add(
        self,
        action: Action | str,
        *,
        after: Actions = (),
        before: Actions = (),
        run: NodeRun | None = None,
        lane: str = "cpu",
        part: str | None = None,
    ) -> StepPlan:
        """Put a node of your own into the step.

        Args:
            action: Its name; a kind of its own, for example ``ema`` or ``ema:3``.
            after: What must be done first. ``adam:3`` stands for all chunks of bucket 3, ``adam`` for all.
            before: What waits for it, ``fwd:0@+1`` for the next step's forward.
            run: Coroutine function ``run(action, step)``, with the runtime's object for the step in
                ``step.context``. None leaves it to the handler of that kind.
            lane: Where it runs. A lane must exist.
            part: ``open``, ``backward`` (once a backward) or ``close``; found from its neighbours by default.

        The node follows its neighbours into every step, and waits for itself in the step before.

        Raises:
            PlanError: if it names an action that is not in the plan, or the result breaks a rule.
        """
        from zoff_async.scheduler.edit import add

        return add(self, action, after=after, before=before, run=run, lane=lane, part=part)

    def without(self, rule: str) -> StepPlan:
        """Drop every edge of ``rule``.

        Raises:
            PlanError: if no edge has that rule, or the plan is wrong without it.
        """
        from zoff_async.scheduler.edit import without

        return without(self, rule)

    def with_capacity(self, lane: str, capacity: int) -> StepPlan:
        """Let ``lane`` run ``capacity`` actions at a time.

        Raises:
            PlanError: if the plan has no such lane.
            ValueError: if ``capacity`` is below 1.
        """
        if capacity < 1:
            raise ValueError(f"capacity is {capacity}: a lane needs at least 1")
        names = [known.name for known in self.lanes]
        if lane not in names:
            raise PlanError(f"plan {self.name!r} has no lane {lane!r}; its lanes are {', '.join(names)}")
        lanes = (Lane(lane, capacity) if known.name == lane else known for known in self.lanes)
        return replace(self, lanes=tuple(lanes))

    # Inside

    @cached_property
    def _hash(self) -> int:
        return hash((self.name, self.actions, self.edges, self.kinds, self.lanes, self.closes, self.node_runs))

    def _existing(self, action: Action | str) -> Action:
        wanted = (Action.parse(action) if isinstance(action, str) else action).template()
        if wanted not in self.index:
            raise PlanError(f"{wanted} is not in plan {self.name!r}; {_near(self, wanted)}")
        return wanted

    def _below(self, action: Action) -> list[Action]:
        wanted = action.template()
        if wanted in self.index:
            return [action]
        found = [
            known.later(backward=action.backward, lag=action.lag)
            for known in self.actions
            if known.kind == wanted.kind
            and wanted.chunk is None
            and (wanted.bucket is None or known.bucket == wanted.bucket)
        ]
        if not found:
            raise PlanError(f"{action} is not in plan {self.name!r}; {_near(self, wanted)}")
        return found


def _near(plan: StepPlan, missing: Action) -> str:
    """What the plan has instead of ``missing``, for an error's last line."""
    same = [str(action) for action in plan.actions if action.kind == missing.kind]
    if not same:
        return f"its kinds are {', '.join(kind.name for kind in plan.kinds)}"
    if len(same) > 8:
        same = [*same[:4], "...", *same[-3:]]
    return f"its {missing.kind} actions are {' '.join(same)}"
