"""The part of a trace file that viewers skip: plans, sizes, facts, and how to tell versions apart."""

from __future__ import annotations

from typing import Any

from zoff_async.scheduler import StepPlan
from zoff_async.trace.timeline import Timeline

#: Of this part. A reader refuses a higher number.
FORMAT = 1


def own_part(timeline: Timeline, base_s: float) -> dict[str, Any]:
    """What of a timeline is not in its slices. Times are nanoseconds from ``base_s``."""
    plans: list[StepPlan] = []
    steps: dict[str, int] = {}
    for step, plan in timeline.plans.items():
        if plan not in plans:
            plans.append(plan)
        steps[str(step)] = plans.index(plan)
    pieces = timeline.pieces
    return {
        "format": FORMAT,
        "base_s": base_s,
        "wall": timeline.clock is not None,
        "plans": [str(plan) for plan in plans],
        "steps": steps,
        "pieces": None if pieces is None else [list(pieces.bucket_numel), pieces.chunk_numel],
        "waits": [[w.what, w.bucket, _ns(w.start_s - base_s), _ns(w.end_s - base_s)] for w in timeline.waits],
        "facts": dict(timeline.facts),
    }


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
