"""What the loop writes down while it runs: losses, and how long each step took."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterable

from torch import Tensor


class Losses:
    """The loss of every step, read one step late.

    Reading a loss waits for the device, so a step's loss is read when the next one has been
    enqueued: by then it is there.
    """

    def __init__(self, so_far: Iterable[float] = ()) -> None:
        self._values = list(so_far)
        self._unread: Tensor | None = None

    def add(self, loss: Tensor) -> None:
        self.read()
        self._unread = loss

    def read(self) -> list[float]:
        """Every loss added so far.

        Raises:
            FloatingPointError: if the newest one is not finite.
        """
        if self._unread is not None:
            value = self._unread.item()
            self._unread = None
            self._values.append(value)
            if not math.isfinite(value):
                raise FloatingPointError(
                    f"the loss is {value} at step {len(self._values)}: "
                    "use a smaller --lr, more --warmup or --max-norm 1"
                )
        return list(self._values)

    @property
    def known(self) -> tuple[int, float | None]:
        """How many losses have been read, and the newest."""
        return len(self._values), self._values[-1] if self._values else None


class Pace:
    """Seconds of each step; what happens between two steps can be left out."""

    def __init__(self, tokens_per_step: int) -> None:
        self._tokens_per_step = tokens_per_step
        self._step_s: list[float] = []
        self._since_s = time.perf_counter()

    def tick(self) -> None:
        """A step has ended now."""
        now_s = time.perf_counter()
        self._step_s.append(now_s - self._since_s)
        self._since_s = now_s

    def restart(self) -> None:
        """What has happened since the last step is part of none."""
        self._since_s = time.perf_counter()

    @property
    def tokens_per_s(self) -> float:
        steady_s = self._steady_s()
        return self._tokens_per_step * len(steady_s) / sum(steady_s)

    @property
    def step_ms(self) -> float:
        """The median step."""
        return statistics.median(self._steady_s()) * 1e3

    def _steady_s(self) -> list[float]:
        """Without the first step, which compiles, allocates and warms up."""
        return self._step_s[1:] or self._step_s
