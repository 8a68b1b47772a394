"""Staging slots in use and bytes in flight over time, told from the spans and the plans' own account of slots."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from zoff_async.scheduler import Span, Staging
from zoff_async.trace.timeline import Timeline


class Sample(NamedTuple):
    """From ``at_s`` on: this many slots in use, holding this many bytes."""

    at_s: float
    slots: int
    bytes: int


class Hold(NamedTuple):
    """A bucket held a slot from ``start_s`` to ``end_s``."""

    step: int
    bucket: int
    start_s: float
    end_s: float
    bytes: int


def holds(timeline: Timeline) -> Mapping[str, list[Hold]]:
    """By direction, every use of a slot: from the first filling action to the end of the last freeing one.

    A slot that was never freed within the timeline is left out.
    """
    found: dict[str, list[Hold]] = {}
    for step, plan in timeline.plans.items():
        spans = [span for span in timeline.spans if span.step == step]
        for staging in plan.staging:
            waves = plan.parts.get(staging.filled_by) == plan.parts.get(staging.freed_by) == "backward"
            uses = _uses(spans, staging, waves)
            sizes = plan.bucket_bytes
            found.setdefault(staging.name, []).extend(
                Hold(step, bucket, start_s, end_s, sizes[bucket] if bucket < len(sizes) else 0)
                for bucket, start_s, end_s in uses
            )
    return found


def _uses(spans: list[Span], staging: Staging, waves: bool) -> list[tuple[int, float, float]]:
    taken: dict[tuple[int, int], float] = {}
    freed: dict[tuple[int, int], float] = {}
    for span in spans:
        bucket = span.action.bucket
        if bucket is None:
            continue
        key = (span.action.backward if waves else 0, bucket)
        if span.action.kind == staging.filled_by:
            taken[key] = min(span.start_s, taken.get(key, span.start_s))
        if span.action.kind == staging.freed_by:
            freed[key] = max(span.end_s, freed.get(key, span.end_s))
    return [(key[1], start_s, freed[key]) for key, start_s in taken.items() if key in freed]


def samples(timeline: Timeline) -> Mapping[str, list[Sample]]:
    """By direction, how many slots were in use, a sample wherever that changes."""
    found: dict[str, list[Sample]] = {}
    for name, uses in holds(timeline).items():
        changes: dict[float, tuple[int, int]] = {}
        for _, _, start_s, end_s, nbytes in uses:
            for at_s, sign in ((start_s, 1), (end_s, -1)):
                slots, held = changes.get(at_s, (0, 0))
                changes[at_s] = (slots + sign, held + sign * nbytes)
        slots = nbytes = 0
        series = []
        for at_s in sorted(changes):
            slots, nbytes = slots + changes[at_s][0], nbytes + changes[at_s][1]
            series.append(Sample(at_s, slots, nbytes))
        found[name] = series
    return found


def peak_slots(timeline: Timeline) -> Mapping[str, int]:
    """By direction, the most slots in use at once."""
    return {name: max((sample.slots for sample in series), default=0) for name, series in samples(timeline).items()}
