"""The critical path of steps worked out by hand, and of every simulation."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.trace.hand import STEP_1, plan, recorded, simulated, span, texts, timeline
from zoff_async.scheduler import POLICIES, KindCost, Layout, simulate
from zoff_async.trace import Timeline
from zoff_async.trace.causes import Causes
from zoff_async.trace.critical import critical_path
from zoff_async.trace.steps import Window, windows

BY_HAND = ["adam:0.0", "h2d:0", "fwd:0", "bwd:0", "d2h:0", "d2h:1", "acc:1", "norm", "adam:1.0", "h2d:1"]


def test_the_critical_path_of_a_step_worked_out_by_hand():
    path = critical_path(Causes(timeline()), Window(1, *STEP_1))

    assert texts(path) == BY_HAND
    assert [item.end_s - item.start_s for item in path] == [2, 1, 1, 1, 2, 2, 0.5, 0.5, 3, 1]
    assert [item.gap_s for item in path] == [0] * 10
    assert [item.rule for item in path] == [
        "lane",
        "update",
        "weights-before-forward",
        "program-order",
        "gradient",
        "lane",
        "gradient",
        "norm-barrier",
        "norm-barrier",
        "update",
    ]


def test_gaps_between_actions_stand_before_the_later_one():
    found = recorded(
        span("fwd:0", "compute", 0, 1),
        span("bwd:0", "compute", 1, 2),
        span("d2h:0", "d2h", 2.5, 4),
        span("acc:0", "cpu", 4.25, 5),
        span("norm", "cpu", 5, 6),
        span("adam:0.0", "cpu", 6, 7),
        span("h2d:0", "h2d", 7.5, 8),
        span("fwd:0", "compute", 9, 10, step=1),
        of=plan(chunks=(1,), bucket_bytes=(200,)),
    )
    path = critical_path(Causes(found), Window(0, 0, 9))

    assert texts(path) == ["fwd:0", "bwd:0", "d2h:0", "acc:0", "norm", "adam:0.0", "h2d:0", "fwd:0"]
    assert [item.gap_s for item in path] == [0, 0, 0.5, 0.25, 0, 0, 0.5, 1.0]
    assert path[-1].step == 1  # the wait before the next step's beginning, and nothing of it
    assert path[-1].start_s == path[-1].end_s == 9


def test_clocks_that_disagree_a_little_do_not_make_the_path_longer_than_the_step():
    found = recorded(
        span("fwd:0", "compute", 0, 1),
        span("bwd:0", "compute", 1, 2.5),
        span("d2h:0", "d2h", 2, 4),  # began before its gradient was there, says the device's clock
        of=plan(chunks=(1,), bucket_bytes=(200,)),
    )
    more = recorded(*found.spans, span("fwd:0", "compute", 5, 6, step=1), of=found.plans[0])
    path = critical_path(Causes(more), Window(0, 0, 5))

    assert sum(item.end_s - item.start_s + item.gap_s for item in path) == pytest.approx(5)


def test_a_step_without_a_successor_has_no_path():
    assert critical_path(Causes(timeline(steps=2)), Window(1, *STEP_1)) == ()


def test_it_is_the_simulations_own_cycle_where_a_step_is_one_chain():
    source = simulated("serial", steps=6)
    found = Timeline.of(source)

    assert texts(critical_path(Causes(found), windows(found)[-1])) == [str(action) for action in source.critical_path]


@st.composite
def steps(draw):
    buckets = draw(st.integers(1, 4))
    layout = Layout(
        chunks=tuple(draw(st.integers(1, 3)) for _ in range(buckets)),
        slots=draw(st.integers(1, 3)),
        workers=draw(st.integers(1, 3)),
        backwards=1,
    )
    policy = draw(st.sampled_from(sorted(POLICIES)))
    cost = {kind: draw(st.integers(1, 9)) * 0.5 for kind in ("fwd", "bwd", "d2h", "acc", "norm", "adam", "h2d")}
    return Timeline.of(simulate(POLICIES[policy](layout), KindCost(cost), steps=4))


@given(steps())
def test_the_path_of_a_simulation_is_as_long_as_the_step_and_without_gaps(found):
    for window in windows(found)[1:]:
        path = critical_path(Causes(found), window)

        assert sum(item.end_s - item.start_s for item in path) == pytest.approx(window.length_s)
        assert sum(item.gap_s for item in path) == pytest.approx(0.0, abs=1e-9)
        assert all(a.end_s == pytest.approx(b.start_s) for a, b in itertools.pairwise(path))
