"""How long an action takes: what a simulation asks for every action.

Three sources: a number a kind, what a run measured, or the plain figures of a machine.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Protocol

from zoff_async.scheduler.action import Action, Span


class CostModel(Protocol):
    """Anything that knows the seconds of an action."""

    def seconds(self, action: Action) -> float:
        """Seconds that ``action`` holds its lane; ``action.backward`` is the number of its backward."""
        ...


class KindCost:
    """The same seconds for every action of a kind.

    Args:
        seconds: By kind. ``adam`` is a chunk's, the other kinds' a bucket's.
        other_s: For a kind that is not listed.

    Raises:
        ValueError: if a number is negative.
    """

    def __init__(self, seconds: Mapping[str, float], other_s: float = 0.0) -> None:
        for kind, value in (*seconds.items(), ("other_s", other_s)):
            if not value >= 0:
                raise ValueError(f"cost of {kind} is {value}: seconds cannot be negative")
        self._seconds = dict(seconds)
        self._other_s = other_s

    def seconds(self, action: Action) -> float:
        return self._seconds.get(action.kind, self._other_s)


class MeasuredCost:
    """Medians of what a run measured, action by action.

    An action that was not seen costs the median of its kind.

    Args:
        spans: Of one or more steps of a run.

    Raises:
        ValueError: if there are no spans.
    """

    def __init__(self, spans: Iterable[Span]) -> None:
        by_action: dict[Action, list[float]] = {}
        by_kind: dict[str, list[float]] = {}
        for span in spans:
            lasted_s = max(0.0, span.end_s - span.start_s)
            by_action.setdefault(span.action.template(), []).append(lasted_s)
            by_kind.setdefault(span.action.kind, []).append(lasted_s)
        if not by_kind:
            raise ValueError("spans is empty: run a step with tracing on first")
        self._by_action = {action: median(found) for action, found in by_action.items()}
        self._by_kind = {kind: median(found) for kind, found in by_kind.items()}

    def seconds(self, action: Action) -> float:
        """See ``CostModel``.

        Raises:
            ValueError: if no action of that kind was measured.
        """
        found = self._by_action.get(action.template(), self._by_kind.get(action.kind))
        if found is None:
            raise ValueError(f"no span of kind {action.kind!r} was measured; kinds are {', '.join(self._by_kind)}")
        return found


@dataclass(frozen=True)
class HardwareCost:
    """Seconds from the figures of a machine and a model.

    Forward is 2, backward 4 floating-point operations a parameter and token (6 with ``recompute``, which runs
    the forward again); the update reads and writes the host's memory, an element at a time.

    Args:
        bucket_numel: Parameters of each bucket.
        chunk_numel: Parameters of an Adam chunk; the last one of a bucket is what remains.
        tokens: Tokens of one backward.
        flops_per_s: What the accelerator reaches in this model, not its data sheet.
        d2h_bytes_per_s: Bandwidth of gradient copies.
        h2d_bytes_per_s: Bandwidth of uploads.
        adam_s_per_element: One worker's update of one parameter.
        acc_s_per_element: Squares, finite check and sum of one gradient element.
        grad_bytes: Bytes of a gradient element as it is copied.
        weight_bytes: Bytes of a parameter as it is uploaded.
        start_s: What every action takes besides (launch, queueing).
        recompute: Whether backward recomputes the forward.

    Raises:
        ValueError: if a rate is not positive, or a size is below 1.
    """

    bucket_numel: tuple[int, ...]
    chunk_numel: int
    tokens: float
    flops_per_s: float
    d2h_bytes_per_s: float
    h2d_bytes_per_s: float
    adam_s_per_element: float
    acc_s_per_element: float = 0.0
    grad_bytes: int = 2
    weight_bytes: int = 2
    start_s: float = 0.0
    recompute: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "bucket_numel", tuple(self.bucket_numel))
        for name in ("flops_per_s", "d2h_bytes_per_s", "h2d_bytes_per_s", "tokens"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}: it must be above 0")
        if not self.bucket_numel or min(self.bucket_numel) < 1 or self.chunk_numel < 1:
            raise ValueError(
                f"bucket_numel is {self.bucket_numel}, chunk_numel {self.chunk_numel}: sizes are at least 1"
            )

    @property
    def chunks(self) -> tuple[int, ...]:
        """Chunks of each bucket, as a layout wants them."""
        return tuple(-(-numel // self.chunk_numel) for numel in self.bucket_numel)

    def seconds(self, action: Action) -> float:
        """See ``CostModel``; kinds of the user's own take ``start_s``."""
        if action.bucket is None or action.bucket >= len(self.bucket_numel):
            return self.start_s
        numel = self.bucket_numel[action.bucket]
        if action.chunk is not None:
            numel = max(0, min(self.chunk_numel, numel - action.chunk * self.chunk_numel))
        return self.start_s + numel * self._s_per_element(action.kind)

    def _s_per_element(self, kind: str) -> float:
        flop_s = self.tokens / self.flops_per_s
        rates = {
            "fwd": 2 * flop_s,
            "bwd": (6 if self.recompute else 4) * flop_s,
            "d2h": self.grad_bytes / self.d2h_bytes_per_s,
            "acc": self.acc_s_per_element,
            "adam": self.adam_s_per_element,
            "h2d": self.weight_bytes / self.h2d_bytes_per_s,
        }
        return rates.get(kind, 0.0)
