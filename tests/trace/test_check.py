"""The check finds what breaks a plan and is silent about what keeps it."""

from __future__ import annotations

import pytest

from tests.trace.hand import plan, recorded, span, timeline


@pytest.mark.parametrize("policy", ["serial", "overlap", "in_backward", "delayed"])
def test_a_simulation_keeps_its_plan(policy):
    assert timeline(policy).check(tolerance_s=0.0) == []


def moved(found, text: str, step: int, start_s: float):
    """One action earlier or later, as long as before."""
    spans = [
        s._replace(start_s=start_s, end_s=start_s + s.end_s - s.start_s)
        if (str(s.action), s.step) == (text, step)
        else s
        for s in found.spans
    ]
    return recorded(*spans, of=found.plans[0])


def test_an_action_that_began_before_its_predecessor_had_ended_is_found():
    assert moved(timeline(), "norm", 1, 21.25).check() == [
        "norm of step 1 began 250,000 us before acc:1 of step 1 had ended (edge acc:1 -> norm, rule norm-barrier)"
    ]


def test_an_edge_into_the_next_step_is_checked_too():
    found = moved(timeline(), "fwd:0", 1, 14.5).check()

    assert (
        "fwd:0 of step 1 began 500,000 us before h2d:0 of step 0 had ended "
        "(edge h2d:0 -> fwd:0, rule weights-before-forward)"
    ) in found


def test_two_actions_at_once_on_a_lane_of_capacity_one_are_found():
    found = recorded(span("d2h:0", "d2h", 0, 2), span("d2h:1", "d2h", 1, 3), of=plan())

    assert found.check() == ["lane d2h of capacity 1 ran d2h:1 of step 0 for 1,000,000 us beside d2h:0 of step 0"]


def test_workers_may_run_at_once_and_what_holds_no_worker_beside_them():
    two = recorded(span("adam:0.0", "cpu", 0, 2), span("adam:0.1", "cpu", 0, 2), of=plan(chunks=(2, 1), workers=2))
    loop = recorded(span("acc:0", "cpu", 0, 2), span("ema", "cpu", 1, 3), of=plan().add("ema", after="adam"))

    assert two.check() == []
    assert loop.check() == []


def test_less_than_the_clocks_are_good_for_is_no_finding():
    found = recorded(span("bwd:0", "compute", 0, 1.0), span("d2h:0", "d2h", 0.99997, 2), of=plan())

    assert found.check() == []
    assert len(found.check(tolerance_s=2.9e-5)) == 1


def test_spans_that_cannot_be_are_found():
    found = recorded(
        span("d2h:0", "d2h", 2, 1),
        span("adam:0.9", "cpu", 0, 1),
        span("norm", "cpu", 3, 4),
        span("norm", "cpu", 5, 6),
        of=plan(),
    )

    assert found.check() == [
        "d2h:0 of step 0 ended before it began",
        "adam:0.9 of step 0 is not in plan 'overlap'",
        "norm of step 0 was recorded twice",
    ]


def test_many_findings_are_counted():
    spans = [span(f"d2h:{bucket}", "d2h", 0, 9) for bucket in range(30)]
    found = recorded(*spans, of=plan(chunks=(1,) * 30, bucket_bytes=())).check()

    assert len(found) == 21
    assert found[-1] == "... and 9 more"
