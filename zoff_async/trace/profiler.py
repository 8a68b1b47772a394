"""Names for torch's own profiler, so that its trace says which action a range of operators belongs to.

Ranges of other threads than the one that opened the profiler show only if it was opened with
``profile_all_threads`` (in ``torch.profiler``'s experimental configuration).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from torch.autograd import profiler
from torch.profiler import record_function

_NO_RANGE: AbstractContextManager[None] = nullcontext()


def is_profiling() -> bool:
    """Whether a torch profiler runs in this process, in whatever thread it was opened."""
    return profiler._is_profiler_enabled


def named(name: str, job: Callable[[], None]) -> Callable[[], None]:
    """``job``, inside a range of that name if a profiler runs; else ``job`` itself."""
    if not profiler._is_profiler_enabled:
        return job

    def ranged() -> None:
        with record_function(name):
            job()

    return ranged


def named_range(name: str) -> AbstractContextManager[object]:
    """A range of that name for a ``with`` block, or nothing if no profiler runs."""
    return record_function(name) if profiler._is_profiler_enabled else _NO_RANGE
