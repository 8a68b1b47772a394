"""Interval sets agree with sets of points."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from zoff_async.trace.intervals import difference, intersection, length_s, union

_ENDS = st.integers(0, 12)
_INTERVALS = st.lists(st.tuples(_ENDS, _ENDS).map(lambda pair: (min(pair), max(pair))), max_size=6)


def points(intervals):
    """Half-open unit pieces."""
    return {at for start, end in intervals for at in range(int(start), int(end))}


@given(_INTERVALS)
def test_a_union_is_disjoint_in_order_and_holds_the_same_time(intervals):
    merged = union(intervals)

    assert points(merged) == points(intervals)
    assert all(start < end for start, end in merged)
    assert all(left[1] < right[0] for left, right in itertools.pairwise(merged))


@given(_INTERVALS, _INTERVALS)
def test_intersection_and_difference_split_a_set_in_two(first, second):
    first, second = union(first), union(second)
    both, only = intersection(first, second), difference(first, second)

    assert points(both) == points(first) & points(second)
    assert points(only) == points(first) - points(second)
    assert length_s(both) + length_s(only) == length_s(first)
