"""Which plan the next step follows: the policy's, for the buckets there are and the order in which they are read."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

from zoff_async.bucket import Bucket
from zoff_async.config import OffloadConfig
from zoff_async.scheduler import Action, Layout, LiveStep, Policy, StepPlan, overlap

#: A user's own node: ``await run(action, step)``.
NodeRun = Callable[[Action, LiveStep], Awaitable[Any]]


class Planner:
    """Builds a policy's plan anew when the buckets or the order of reads change. ``plan`` is the one in force.

    ``node_done(step, action)`` is told when one of the user's own nodes has ended.
    """

    plan: StepPlan

    def __init__(
        self,
        policy: Policy,
        config: OffloadConfig,
        *,
        workers: int,
        clip: bool,
        node_done: Callable[[LiveStep, Action], None],
    ) -> None:
        self._policy = policy
        self._config = config
        self._workers = workers
        self._clip = clip
        self._node_done = node_done
        self._buckets: Sequence[Bucket] = ()
        self._forward_order: tuple[int, ...] = ()

    @property
    def adam_in_backward(self) -> bool:
        """Whether Adam starts inside the last declared backward."""
        return self.plan.closes == "last_backward"

    @property
    def declared_backwards(self) -> int:
        """Backwards of a step, where Adam starts inside the last one."""
        return self.plan.backwards or 1

    @property
    def accumulates(self) -> bool:
        """Whether several backwards a step have been declared."""
        return (self.plan.backwards or self._config.backwards_per_step or 1) > 1

    def slots(self, direction: str) -> int:
        """Staging slots of a direction: the configuration's, or more where the plan counts on more."""
        return max([self._config.slots, *(s.slots for s in self.plan.staging if s.name == direction)])

    def set_buckets(self, buckets: Sequence[Bucket]) -> None:
        """Plan for these buckets from now on."""
        self._buckets = buckets
        self._forward_order = ()
        self.plan = self._build()

    def learn(self, reads: Sequence[int]) -> None:
        """Let uploads follow the order in which a forward has read the buckets, where it differs from the plan's.

        The order of gradients is not learned: copy slots are passed on in it from step to step, so it stays.
        """
        planned = self._forward_order or tuple(reversed(range(len(self._buckets))))
        known = set(reads)
        if len(reads) < 2 or list(reads) == [bucket for bucket in planned if bucket in known]:
            return
        self._forward_order = (*reads, *(bucket for bucket in planned if bucket not in known))
        self.plan = self._build()

    def next_plan(self, steps_done: int) -> StepPlan:
        """The plan of the next step; ``overlap`` for the warm-up steps of a stale policy."""
        if self.plan.stale and steps_done < self._config.delay_warmup_steps:
            return overlap(replace(self._layout(), backwards=None))
        return self.plan

    def _layout(self) -> Layout:
        return Layout(
            chunks=tuple(bucket.chunks for bucket in self._buckets),
            slots=self._config.slots,
            workers=self._workers,
            clip=self._clip,
            backwards=self._config.backwards_per_step,
            forward_order=self._forward_order,
            bucket_bytes=tuple(bucket.nbytes for bucket in self._buckets),
        )

    def _build(self) -> StepPlan:
        plan = self._policy(self._layout())
        if not isinstance(plan, StepPlan):
            raise TypeError(f"policy must return a StepPlan, got {type(plan).__name__}")
        if plan.stale and plan.backwards is not None:
            # A stale step's own norm, lr and factors are known at step(), so it closes there, whatever was declared.
            plan = self._policy(replace(self._layout(), backwards=None))
        if plan.node_runs:
            plan = replace(plan, node_runs=tuple((action, self._noted(run)) for action, run in plan.node_runs))
        return plan

    def _noted(self, run: NodeRun) -> NodeRun:
        async def noted(action: Action, live: LiveStep) -> Any:
            times = await run(action, live)
            self._node_done(live, action)
            return times

        return noted


def nodes_before_forward(plan: StepPlan) -> set[Action]:
    """The user's own actions that the next forward waits for."""
    return {e.before for e in plan.edges if e.after.kind == "fwd" and e.after.lag and e.before in plan.runs}
