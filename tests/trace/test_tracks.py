"""Rows of a lane: nothing overlaps in one, and workers get no more rows than there are."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from tests.trace.hand import plan, recorded, span, timeline
from zoff_async.trace.tracks import rows, tracks


def test_a_lane_of_capacity_one_is_one_row_named_like_it():
    found = tracks(timeline())

    assert [track.name for track in found] == ["compute", "d2h", "cpu", "h2d"]


def test_a_lane_with_workers_has_a_row_each_in_the_order_of_the_plan():
    found = tracks(recorded(*timeline().spans, of=plan(workers=2)))

    assert [track.name for track in found] == ["compute", "d2h", "cpu 0", "cpu 1", "h2d"]


def test_a_span_goes_to_the_row_that_has_been_free_longest():
    first, second = span("adam:0.0", "cpu", 0, 2), span("adam:0.1", "cpu", 0, 5)
    third, fourth = span("adam:0.2", "cpu", 5, 6), span("adam:0.3", "cpu", 5, 7)

    assert rows([first, second, third, fourth], 2) == [[first, third], [second, fourth]]


def test_an_action_that_holds_no_worker_gets_a_gap_or_a_row_of_its_own():
    busy = [span("adam:0.0", "cpu", 0, 4), span("adam:0.1", "cpu", 6, 9)]
    fits, clashes = span("norm", "cpu", 4, 6), span("ema", "cpu", 5, 7)

    assert rows([*busy, fits], 1) == [[busy[0], fits, busy[1]]]
    assert rows([*busy, clashes], 1) == [busy, [clashes]]


@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 5), st.booleans()), max_size=25),
    st.integers(1, 4),
)
def test_rows_hold_every_span_once_and_none_overlaps(times, capacity):
    spans = [
        span(f"adam:0.{place}" if bucket else f"norm_{place}", "cpu", start, start + length)
        for place, (start, length, bucket) in enumerate(times)
    ]
    found = rows(spans, capacity)

    assert sorted(s for row in found for s in row) == sorted(spans)
    assert all(a.end_s <= b.start_s for row in found for a, b in itertools.pairwise(row))
    assert len(found) >= capacity
