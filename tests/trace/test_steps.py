"""Where steps begin and end, and which of them are alike."""

from __future__ import annotations

import pytest

from tests.trace.hand import PERIOD_S, STEP_1, plan, recorded, span, timeline
from zoff_async.trace.steps import Window, first_spans, steady, windows


def steps_of(*lengths_s: float, policy: str = "overlap"):
    """Steps of one forward each; the last one is open."""
    at_s, spans = 0.0, []
    for step, length_s in enumerate((*lengths_s, 1.0)):
        spans.append(span("fwd:0", "compute", at_s, at_s + 0.5, step=step))
        at_s += length_s
    return recorded(*spans, of=plan(policy))


def test_a_step_lasts_from_its_first_forward_to_the_next_ones():
    found = windows(timeline())

    assert found[1] == Window(1, *STEP_1)
    assert [window.step for window in found] == [0, 1, 2]  # the last one has no successor
    assert found[1].length_s == PERIOD_S


def test_a_step_begins_with_its_first_forward():
    assert str(first_spans(timeline())[1].action) == "fwd:1"


def test_without_compute_spans_a_step_begins_with_the_first_copy():
    kept = [s for s in timeline().spans if s.lane != "compute"]
    found = windows(recorded(*kept, of=plan()))

    assert found[1] == Window(1, 17.0, 31.0)  # delayed Adam of the step before is not this step's beginning


def test_a_step_number_that_is_missing_is_no_neighbour():
    found = recorded(
        span("fwd:0", "compute", 0, 1, step=1),
        span("fwd:0", "compute", 2, 3, step=2),
        span("fwd:0", "compute", 9, 10, step=4),
    )

    assert windows(found) == (Window(1, 0, 2),)


def test_the_first_step_of_a_run_is_not_steady():
    assert [window.step for window in steady(steps_of(3, 1, 1, 1))] == [1, 2, 3]


def test_a_step_whose_predecessor_was_let_go_is_not_steady():
    found = steps_of(1, 1, 1, 1, 1).only([2, 3, 4, 5])

    assert [window.step for window in steady(found)] == [3, 4]


def test_a_single_whole_step_has_to_do():
    assert [window.step for window in steady(steps_of(3))] == [0]


def test_a_step_with_an_evaluation_in_it_is_left_out():
    assert [window.step for window in steady(steps_of(1, 1, 1, 9, 1))] == [1, 2, 4]


def test_steps_of_another_plan_are_left_out():
    found = steps_of(1, 1, 1, 1, 1)
    found.plans[1] = plan("serial")  # type: ignore[index]

    assert [window.step for window in steady(found)] == [2, 3, 4]


def test_without_a_whole_step_there_is_nothing_to_say():
    with pytest.raises(ValueError) as caught:
        steady(recorded(span("fwd:0", "compute", 0, 1)))

    assert str(caught.value) == (
        "the timeline holds 1 step(s) and none of them whole: a step ends where the next one begins, so record at "
        "least two in a row (OffloadConfig(trace_steps=...))"
    )
