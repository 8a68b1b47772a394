"""Slots in use over time, against the simulation's own peak and against steps by hand."""

from __future__ import annotations

import pytest

from tests.trace.hand import plan, recorded, simulated, span
from zoff_async.scheduler import POLICIES, KindCost, Layout, simulate
from zoff_async.trace import Timeline
from zoff_async.trace.counters import Hold, Sample, holds, peak_slots, samples


def test_a_slot_is_held_from_the_first_byte_in_to_the_last_one_out():
    found = recorded(
        span("d2h:0", "d2h", 1, 2),
        span("acc:0", "cpu", 3, 4),
        span("adam:0.0", "cpu", 5, 6),
        span("adam:0.1", "cpu", 5, 7),
        span("h2d:0", "h2d", 7, 9),
        of=plan(chunks=(2, 1)),
    )

    assert holds(found) == {"d2h": [Hold(0, 0, 1, 4, 200)], "h2d": [Hold(0, 0, 5, 9, 200)]}


def test_a_slot_that_was_not_freed_yet_is_left_out():
    assert holds(recorded(span("d2h:0", "d2h", 1, 2), of=plan())) == {"d2h": [], "h2d": []}


def test_samples_tell_every_change_once():
    found = recorded(
        span("d2h:0", "d2h", 0, 2),
        span("acc:0", "cpu", 2, 3),
        span("d2h:1", "d2h", 2, 3),
        span("acc:1", "cpu", 3, 5),
        of=plan(),
    )

    assert samples(found)["d2h"] == [Sample(0, 1, 200), Sample(2, 2, 800), Sample(3, 1, 600), Sample(5, 0, 0)]
    assert peak_slots(found) == {"d2h": 2, "h2d": 0}


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_peaks_are_those_of_the_simulation(policy):
    layout = Layout(chunks=(2, 1, 3, 1), slots=2, workers=2, backwards=1, bucket_bytes=(1, 2, 3, 4))
    source = simulate(POLICIES[policy](layout), KindCost({"adam": 3.0, "d2h": 2.0}, 1.0), steps=4)
    found = Timeline.of(source)

    assert peak_slots(found) == source.peak_slots
    assert {name: max(s.bytes for s in series) for name, series in samples(found).items()} == source.peak_slot_bytes


def test_bytes_are_unknown_where_the_plan_does_not_say():
    source = Timeline.of(simulate(plan(bucket_bytes=()), KindCost({}, 1.0), steps=2))

    assert {sample.bytes for sample in samples(source)["d2h"]} == {0}
    assert simulated().peak_slots["d2h"] >= 1
