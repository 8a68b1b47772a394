"""One step's data, as its actions hand it on: gradients that arrived, the norm, what Adam is to do."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from zoff_async.cpu_ops import Scalars, UpdateRule
from zoff_async.device import Marker, Transfer
from zoff_async.intake import Arrival
from zoff_async.scheduler import Action
from zoff_async.staging import Lease
from zoff_async.state import BucketState


class Hyper(NamedTuple):
    """A group's hyperparameters as they were when their step began its update."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float

    @classmethod
    def of(cls, group: Mapping[str, Any]) -> Hyper:
        beta1, beta2 = group["betas"]
        return cls(float(group["lr"]), (float(beta1), float(beta2)), float(group["eps"]), float(group["weight_decay"]))


class Piece(NamedTuple):
    """Consecutive elements of one chunk that one set of scalars updates."""

    start: int
    stop: int
    scalars: Scalars


@dataclass(eq=False)
class Step:
    """What belongs to one step of the plan. Made when the step opens, filled in when it closes.

    The loop's thread writes it; ``norm_known`` lets other threads wait for ``norm``, ``clip`` and ``skip``.

    It is the ``step.context`` that a user's own node finds: ``masters(bucket)`` are the fp32 masters by name, and
    ``await in_pool(job)`` runs arithmetic in the Adam pool, because a node's coroutine may not block the loop.
    """

    states: Sequence[BucketState] = ()
    run_in_pool: Callable[[Callable[[], None]], Awaitable[tuple[float, float]]] | None = None
    stale: bool = False  # Adam of this step applies the gradient of the step before
    update: Step | None = None  # whose gradient Adam applies in this step
    arrivals: dict[tuple[int, int], Arrival] = field(default_factory=dict)  # (bucket, wave)
    markers: dict[int, Marker] = field(default_factory=dict)  # bucket -> compute has finished with its weights
    present: list[np.ndarray] = field(default_factory=list)  # a bucket: which entries have a gradient
    factor: list[np.ndarray] = field(default_factory=list)  # a bucket: what the user multiplied them by
    hyper: tuple[Hyper, ...] = ()
    inverse_scale: float = 1.0  # of an attached GradScaler
    overflowed: bool = False  # ... which has found inf
    norm: float = 0.0  # of all gradients, unscaled, before clipping
    clip: float = 1.0
    skip: bool = False
    nonfinite: str | None = None  # the first parameter with inf or NaN
    norm_known: threading.Event = field(default_factory=threading.Event)
    begun: dict[int, list[list[Piece]]] = field(default_factory=dict)  # bucket -> pieces of each chunk
    moved: set[int] = field(default_factory=set)  # buckets whose Adam has begun
    direct: dict[int, Lease] = field(default_factory=dict)  # slots that Adam reads itself
    chunks_left: dict[int, int] = field(default_factory=dict)
    uploads: dict[int, Lease] = field(default_factory=dict)  # slots that hold new weights
    transfers: dict[int, Transfer] = field(default_factory=dict)  # uploads under way
    uploaded: set[int] = field(default_factory=set)  # buckets whose weights are current again
    done_nodes: set[Action] = field(default_factory=set)  # the user's own actions that have ended

    def updated(self, buckets: int) -> bool:
        """Whether every chunk of every bucket has been through Adam, or was skipped."""
        return len(self.chunks_left) == buckets and not any(self.chunks_left.values())

    def masters(self, bucket: int) -> dict[str, Tensor]:
        """The masters of a bucket's parameters, by name: fp32 views, in the parameters' shapes."""
        state = self.states[bucket]
        return {entry.name: entry.view(state.master) for entry in state.bucket.entries}

    async def in_pool(self, job: Callable[[], None]) -> tuple[float, float]:
        """Run ``job()`` in a thread of the Adam pool; returns its start and end, for the node to return."""
        assert self.run_in_pool is not None
        return await self.run_in_pool(job)

    def wait_factor(self) -> float:
        """The clip factor, once the norm is known; 1 for a skipped step."""
        self.norm_known.wait()
        return 1.0 if self.skip else self.clip

    def begin_bucket(self, state: BucketState, rule: UpdateRule) -> list[list[Piece]]:
        """Settle what Adam does with a bucket: pieces of each chunk; the step counts move on."""
        bucket = state.bucket
        present = self.present[bucket.index]
        factor = self.factor[bucket.index] * (self.inverse_scale * self.clip)
        chunks: list[list[Piece]] = [[] for _ in range(bucket.chunks)]
        scalars: dict[tuple[int, int, float], Scalars] = {}
        for segment in state.segments(present, factor):
            key = (segment.group, segment.step, segment.factor)
            if key not in scalars:
                hyper = self.hyper[segment.group]._asdict()
                scalars[key] = rule.scalars(step=segment.step, factor=segment.factor, **hyper)
            for chunk in range(segment.start // bucket.chunk_numel, -(-segment.stop // bucket.chunk_numel)):
                start, stop = bucket.chunk(chunk)
                piece = Piece(max(start, segment.start), min(stop, segment.stop), scalars[key])
                chunks[chunk].append(piece)
        state.counts[present] += 1
        self.begun[bucket.index] = chunks
        return chunks


def total_norm(
    states: Sequence[BucketState], step: Step, order: np.ndarray, names: Sequence[str]
) -> tuple[float, str | None]:
    """The 2-norm over all gradients of a step, and the first parameter, in parameter order, that is not finite.

    ``order`` lists the entries of all buckets in parameter order: the sum has one order, whatever the buckets are. In
    fp64.
    """
    squares = np.concatenate([state.squares for state in states])
    present = np.concatenate(step.present)
    factor = np.concatenate(step.factor) * step.inverse_scale
    with np.errstate(all="ignore"):  # inf and NaN are what is looked for
        terms = np.where(present, squares * (factor * factor), 0.0)[order]
        bad = np.flatnonzero(~np.isfinite(np.where(present, squares * np.abs(factor), 0.0)[order]))
        norm = float(np.sqrt(terms.sum()))
    return norm, names[int(bad[0])] if len(bad) else None
