"""Sets of seconds as disjoint intervals in order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

Interval: TypeAlias = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same time as disjoint intervals in order; empty ones are dropped."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        elif end > start:
            merged.append((start, end))
    return merged


def intersection(first: Sequence[Interval], second: Sequence[Interval]) -> list[Interval]:
    """What two sets have in common."""
    common: list[Interval] = []
    i = j = 0
    while i < len(first) and j < len(second):
        start, end = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        if start < end:
            common.append((start, end))
        if first[i][1] <= second[j][1]:
            i += 1
        else:
            j += 1
    return common


def difference(first: Sequence[Interval], second: Sequence[Interval]) -> list[Interval]:
    """What is in the first set and not in the second."""
    left: list[Interval] = []
    j = 0
    for start, end in first:
        while j < len(second) and second[j][1] <= start:
            j += 1
        at, k = start, j
        while k < len(second) and second[k][0] < end:
            if second[k][0] > at:
                left.append((at, second[k][0]))
            at = max(at, second[k][1])
            k += 1
        if at < end:
            left.append((at, end))
    return left


def length_s(intervals: Iterable[Interval]) -> float:
    """Seconds in disjoint intervals."""
    return sum(end - start for start, end in intervals)
