"""Figures from spans, on timelines small enough to check by hand."""

from __future__ import annotations

import pytest

from zoff_async.scheduler import Action, KindCost, Layout, Span, in_backward, overlap
from zoff_async.scheduler.analysis import (
    critical_path,
    exposed_and_hidden_s,
    peak_slots,
    resource_bound_s,
    steady_window,
    utilisation,
)

PLAN = overlap(Layout(chunks=(1, 1), workers=2, bucket_bytes=(100, 30)))


def span(text, lane, start_s, end_s, step=0):
    return Span(Action.parse(text), lane, step, start_s, end_s, 0)


def test_the_resource_bound_is_the_busiest_lane():
    assert resource_bound_s(PLAN, KindCost({"d2h": 1, "adam": 3}), 1) == 3  # two jobs of 3 s on two workers
    assert resource_bound_s(PLAN, KindCost({"d2h": 1, "adam": 3}), 4) == 8  # two copies in each backward
    assert resource_bound_s(PLAN.with_capacity("cpu", 1), KindCost({"d2h": 1, "adam": 3}), 1) == 6


def test_the_steady_window_lies_between_first_forwards():
    spans = [span("fwd:1", "compute", start, start + 1, step) for step, start in enumerate([0, 9, 14, 18, 22])]

    assert steady_window(PLAN, spans, 5) == (14, 22, 4)
    assert steady_window(PLAN, spans[:2], 2) == (0, 9, 9)
    assert steady_window(PLAN, [span("norm", "cpu", 0, 7)], 1) == (0, 7, 7)


def test_utilisation_counts_only_what_lies_in_the_window():
    spans = [span("fwd:1", "compute", 0, 4), span("adam:1.0", "cpu", 1, 3), span("adam:0.0", "cpu", 3, 9)]

    assert utilisation(PLAN, spans, 2, 4) == {"compute": 1.0, "d2h": 0.0, "cpu": 0.5, "h2d": 0.0}
    assert utilisation(PLAN, [], 0, 0) == {"compute": 0.0, "d2h": 0.0, "cpu": 0.0, "h2d": 0.0}


def test_time_beside_compute_is_hidden_and_the_rest_is_exposed():
    spans = [
        span("fwd:1", "compute", 0, 2),
        span("bwd:1", "compute", 3, 5),
        span("d2h:1", "d2h", 1, 4),
        span("adam:1.0", "cpu", 4, 8),
        span("adam:0.0", "cpu", 5, 9),  # beside the other one: the time counts once
    ]
    exposed, hidden = exposed_and_hidden_s(PLAN, spans, 0, 10)

    assert (exposed["d2h"], hidden["d2h"]) == (1, 2)
    assert (exposed["adam"], hidden["adam"]) == (4, 1)
    assert (exposed["h2d"], hidden["h2d"]) == (0, 0)
    assert "fwd" not in exposed


def test_exposed_time_is_that_of_one_step():
    spans = [span(f"fwd:{b}", "compute", 10 * step, 10 * step + 1, step) for step in (0, 1) for b in (1,)]
    spans += [span("h2d:1", "h2d", 10 * step + 2, 10 * step + 5, step) for step in (0, 1)]

    assert exposed_and_hidden_s(PLAN, spans, 0, 20)[0]["h2d"] == 3


def test_a_bucket_holds_a_slot_from_its_copy_to_its_sum():
    spans = [
        span("d2h:0", "d2h", 0, 1),
        span("d2h:1", "d2h", 1, 2),
        span("acc:0", "cpu", 1, 2),
        span("acc:1", "cpu", 2, 3),
        span("d2h:0#1", "d2h", 3, 4),
        span("acc:0#1", "cpu", 4, 5),
        span("adam:1.0", "cpu", 5, 6),
        span("adam:0.0", "cpu", 5, 6),
        span("h2d:1", "h2d", 6, 7),
        span("h2d:0", "h2d", 7, 8),
    ]

    assert peak_slots(PLAN, spans) == ({"d2h": 2, "h2d": 2}, {"d2h": 130, "h2d": 130})


def test_a_slot_is_left_before_it_is_taken_at_the_same_instant():
    spans = [
        span("d2h:0", "d2h", 0, 1),
        span("acc:0", "cpu", 1, 2),
        span("d2h:1", "d2h", 2, 3),
        span("acc:1", "cpu", 3, 4),
    ]

    assert peak_slots(PLAN, spans)[0]["d2h"] == 1


def test_a_slot_that_adam_reads_is_held_until_its_last_chunk():
    plan = in_backward(Layout(chunks=(2, 1), slots=1))
    spans = [
        span("d2h:0", "d2h", 0, 1),
        span("adam:0.0", "cpu", 1, 2),
        span("adam:0.1", "cpu", 2, 5),
        span("d2h:1", "d2h", 4, 6),  # too early on purpose
        span("adam:1.0", "cpu", 6, 7),
    ]

    assert peak_slots(plan, spans)[0]["d2h"] == 2


def test_slots_without_known_sizes_have_no_bytes():
    plan = overlap(Layout(chunks=(1, 1)))
    spans = [span("d2h:0", "d2h", 0, 1), span("acc:0", "cpu", 1, 2)]

    assert peak_slots(plan, spans) == ({"d2h": 1, "h2d": 0}, {"d2h": 0, "h2d": 0})


def test_the_critical_path_prefers_an_edge_to_a_lane():
    spans = [
        span("d2h:1", "d2h", 0, 1),
        span("bwd:0", "compute", 0, 1),
        span("d2h:0", "d2h", 1, 2),  # released by bwd:0, on the lane that d2h:1 has freed
    ]

    assert [str(action) for action in critical_path(PLAN, spans)] == ["bwd:0", "d2h:0"]


def test_the_critical_path_follows_the_lane_where_no_edge_released():
    spans = [
        span("bwd:0", "compute", 0, 1),
        span("d2h:1", "d2h", 0, 3),
        span("d2h:0", "d2h", 3, 4),
    ]

    assert [str(action) for action in critical_path(PLAN, spans)] == ["d2h:1", "d2h:0"]


def test_the_critical_path_is_the_cycle_that_comes_again():
    spans = []
    for step, start in enumerate([0, 5, 10]):
        spans += [
            span("fwd:1", "compute", start, start + 1, step),
            span("bwd:1", "compute", start + 1, start + 2, step),
            span("d2h:1", "d2h", start + 2, start + 4, step),
            span("h2d:1", "h2d", start + 4, start + 5, step),
        ]

    assert [str(action) for action in critical_path(PLAN, spans)] == ["fwd:1", "bwd:1", "d2h:1", "h2d:1"]


@pytest.mark.parametrize("spans", [[], [span("fwd:1", "compute", 0, 1)]])
def test_a_short_timeline_has_a_short_path(spans):
    assert [str(action) for action in critical_path(PLAN, spans)] == [str(s.action) for s in spans]
