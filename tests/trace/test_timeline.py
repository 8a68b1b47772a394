"""A timeline's own figures, and its parts."""

from __future__ import annotations

import time

import pytest

from tests.trace.hand import PIECES, plan, recorded, simulated, span, timeline
from zoff_async.scheduler import Action
from zoff_async.trace import Clock, Timeline, Wait


def test_busy_seconds_count_actions_that_run_at_once_twice():
    found = recorded(span("adam:0.0", "cpu", 0, 2), span("adam:0.1", "cpu", 1, 3), span("h2d:0", "h2d", 3, 4))

    assert found.busy_s() == {"cpu": 4.0, "h2d": 1.0}


def test_the_hidden_share_is_time_beside_compute_and_counts_once():
    found = recorded(span("bwd:0", "compute", 0, 2), span("d2h:0", "d2h", 1, 3), span("adam:0.0", "cpu", 1, 5))

    assert found.hidden_share() == 0.25  # 1 to 2, of 1 to 5


def test_there_is_no_hidden_share_without_any_host_work():
    assert recorded(span("bwd:0", "compute", 0, 2)).hidden_share() is None


def test_a_step_keeps_its_plan_and_the_waits_beside_it():
    whole = recorded(
        span("d2h:0", "d2h", 0, 1, step=3),
        span("d2h:0", "d2h", 5, 6, step=4),
        of=plan(),
        waits=(Wait("step", None, 0.5, 0.7), Wait("step", None, 5.5, 5.7)),
        device="host",
    )
    part = whole.step(4)

    assert part.steps == (4,)
    assert list(part.plans) == [4]
    assert part.waits == (Wait("step", None, 5.5, 5.7),)
    assert part.facts == {"device": "host"}
    assert whole.last(1) == part
    assert whole.last(9) == whole


def test_last_refuses_no_steps():
    with pytest.raises(ValueError) as caught:
        timeline().last(0)

    assert str(caught.value) == "count is 0: at least one step"


def test_parameters_of_an_action_are_those_of_its_bucket_or_chunk():
    assert PIECES.numel(Action.parse("d2h:1")) == 300
    assert PIECES.numel(Action.parse("norm")) == 0
    assert PIECES._replace(chunk_numel=120).numel(Action.parse("adam:1.2")) == 60
    assert recorded(span("d2h:0", "d2h", 0, 1)).numel(Action.parse("d2h:0")) == 100
    assert Timeline(()).numel(Action.parse("d2h:0")) == 0


def test_a_simulation_reads_like_a_recorded_run():
    source = simulated()
    found = Timeline.of(source)

    assert found.spans == source.spans
    assert set(found.plans.values()) == {source.plan}
    assert found.facts["device_kind"] == "simulated"
    assert found.clock is None


def test_the_clock_tells_unix_time_of_an_instant():
    clock = Clock.now()
    now_s, now_ns = time.perf_counter(), time.time_ns()

    assert Clock(1_000, 2.0).wall_ns_at(2.5) == 500_001_000
    assert abs(clock.wall_ns_at(now_s) - now_ns) < 5e6


def test_repr_is_short_and_a_notebook_shows_the_lanes():
    assert repr(timeline()) == "<Timeline: steps 0 to 3, 52 spans>"
    assert repr(Timeline(())) == "<Timeline: no steps, 0 spans>"
    assert timeline()._repr_html_().startswith("<pre>")
    assert Timeline(())._repr_html_() == "<pre>no spans</pre>"
