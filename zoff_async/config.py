"""What a user may choose about an optimizer, checked when it is chosen."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

KERNEL_NAMES = ("auto", "numexpr", "numba", "torch")
EVENT_LOOPS = ("auto", "uvloop", "asyncio")
NONFINITE_ANSWERS = ("skip", "raise")

#: Without ``bucket_bytes`` a model is cut into about this many buckets ...
AUTO_BUCKETS = 40
#: ... of at least and at most these sizes: smaller ones cost more to hand over than to copy, larger ones only hold
#: memory.
AUTO_BUCKET_BYTES = (1 << 20, 64 << 20)


@dataclass(frozen=True)
class OffloadConfig:
    """Sizes, threads and answers of one optimizer. Nothing here changes a bit of the result, ``delay_warmup_steps``
    apart.

    Args:
        bucket_bytes: Bytes (in the parameters' dtype) copied together; None cuts the model into about 40 buckets of
            1 to 64 MiB. A parameter larger than this has a bucket of its own; 1 gives every parameter its own.
        chunk_numel: Elements of one job of the Adam pool.
        workers: Threads of the Adam pool; None takes what affinity and the cgroup's quota allow.
        cpu_affinity: Cores the pool is pinned to, one a worker; None takes the process's own cores; () does not pin.
        kernel: ``auto`` takes numba where it is installed, else numexpr: the same bits. ``torch`` has its own order.
        slots: Staging slots in each direction; each is as large as the largest bucket.
        backwards_per_step: Declares how many backwards a step has; needed only where Adam starts inside backward
            (``in_backward``, where None means 1) or uploads may (``delayed``).
        event_loop: Loop of the thread that runs the schedule; ``auto`` takes uvloop where it is installed.
        trace_steps: Steps whose spans are kept; 0 records none.
        on_nonfinite: ``skip`` leaves everything as it was before the step, ``raise`` raises as well.
        device: ``auto`` (where the parameters are), ``host``, ``cuda``, ``emulated:PRESET``, or a Device.
        delay_warmup_steps: First steps of ``delayed`` that run undelayed.
        data_parallel: False says that the ranks of a process group train apart on purpose.
        notice_edits: Notice weights that were edited through ``.data``, by a fingerprint before and after each update:
            two passes over the weights, which are taken where the weights are on the CPU only. Other edits are noticed
            anyway.
        switch_interval_s: ``sys.setswitchinterval`` while an optimizer is open; None leaves the interpreter's own.

    Raises:
        TypeError, ValueError: naming the argument, the value and what is allowed.
    """

    bucket_bytes: int | None = None
    chunk_numel: int = 1 << 18
    workers: int | None = None
    cpu_affinity: tuple[int, ...] | None = None
    kernel: str = "auto"
    slots: int = 4
    backwards_per_step: int | None = None
    event_loop: str = "auto"
    trace_steps: int = 8
    on_nonfinite: str = "skip"
    device: Any = "auto"
    delay_warmup_steps: int = 0
    data_parallel: bool = True
    notice_edits: bool = True
    switch_interval_s: float | None = 5e-4

    def __post_init__(self) -> None:
        for name in ("bucket_bytes", "workers", "backwards_per_step"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name), least=1)
        for name, least in (("chunk_numel", 1), ("slots", 1), ("trace_steps", 0), ("delay_warmup_steps", 0)):
            check_count(name, getattr(self, name), least=least)
        for name, allowed in (
            ("kernel", KERNEL_NAMES),
            ("event_loop", EVENT_LOOPS),
            ("on_nonfinite", NONFINITE_ANSWERS),
        ):
            check_choice(name, getattr(self, name), allowed)
        for name in ("data_parallel", "notice_edits"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False, got {getattr(self, name)!r}")
        self._check_affinity()
        interval_s = self.switch_interval_s
        number = isinstance(interval_s, int | float) and not isinstance(interval_s, bool)
        if interval_s is not None and not (number and 0 < interval_s < math.inf):
            raise ValueError(f"switch_interval_s must be a positive number of seconds or None, got {interval_s!r}")

    def _check_affinity(self) -> None:
        cpus: Any = self.cpu_affinity  # checked here
        if cpus is None:
            return
        if not isinstance(cpus, Iterable) or isinstance(cpus, str | bytes):
            raise TypeError(f"cpu_affinity must be a sequence of core numbers or None, got {cpus!r}")
        cpus = tuple(cpus)
        for cpu in cpus:
            check_count("cpu_affinity", cpu, least=0)
        object.__setattr__(self, "cpu_affinity", cpus)

    def bucket_bytes_for(self, total_bytes: int) -> int:
        """The bucket size for a model of ``total_bytes`` (in its own dtypes)."""
        if self.bucket_bytes is not None:
            return self.bucket_bytes
        least, most = AUTO_BUCKET_BYTES
        return min(max(total_bytes // AUTO_BUCKETS, least), most)

    def asdict(self) -> dict[str, Any]:
        """The fields as a plain dict (a Device stays an object)."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


def check_count(name: str, value: object, *, least: int) -> None:
    """Raise unless ``value`` is an int of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int of at least {least}, got {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")


def check_choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    """Raise unless ``value`` is one of the allowed words."""
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")
