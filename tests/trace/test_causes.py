"""What released an action: an edge, its lane, or the closing of the step."""

from __future__ import annotations

from tests.trace.hand import plan, recorded, span, texts, timeline
from zoff_async.trace.causes import CLOSE, LANE, Causes


def release_of(causes: Causes, text: str, step: int) -> tuple[str, str]:
    (target,) = [s for s in causes.timeline.spans if str(s.action) == text and s.step == step]
    found = causes.release(target)
    assert found is not None
    return str(found.span.action), found.rule


def test_the_predecessor_that_ended_last_is_what_released():
    causes = Causes(timeline())

    assert release_of(causes, "fwd:1", 1) == ("h2d:1", "weights-before-forward")
    assert release_of(causes, "norm", 1) == ("acc:1", "norm-barrier")
    assert release_of(causes, "d2h:0", 1) == ("bwd:0", "gradient")


def test_a_busy_lane_is_what_released_where_it_was_free_later_than_the_predecessors():
    assert release_of(Causes(timeline()), "d2h:1", 1) == ("d2h:0", LANE)
    assert release_of(Causes(timeline()), "adam:0.0", 1) == ("adam:1.0", LANE)


def test_a_lane_with_a_free_worker_releases_nobody():
    found = recorded(
        span("norm", "cpu", 0, 1),
        span("acc:0", "cpu", 0.5, 1.5),
        span("adam:0.0", "cpu", 1.6, 2),  # the other of two workers had been free since 1
        of=plan(workers=2),
    )

    assert release_of(Causes(found), "adam:0.0", 0) == ("norm", "norm-barrier")


def test_what_the_closing_part_has_waited_for_is_the_step():
    causes = Causes(timeline("delayed"))

    assert release_of(causes, "h2d:0", 2) == ("bwd:1", CLOSE)


def test_the_first_action_of_all_was_released_by_nobody():
    causes = Causes(timeline())

    assert causes.release(causes.timeline.spans[0]) is None


def test_a_walk_goes_back_to_the_time_that_was_asked_for():
    causes = Causes(timeline())
    (start,) = [s for s in causes.timeline.spans if str(s.action) == "norm" and s.step == 1]

    walked = [item for item, _ in causes.walk(start, 15.5)]

    assert texts(walked) == ["norm", "acc:1", "d2h:1", "d2h:0", "bwd:0", "fwd:0"]


def test_actions_of_no_length_at_one_instant_do_not_make_a_circle():
    free = dict.fromkeys(("fwd", "bwd", "d2h", "acc", "norm", "adam", "h2d"), 0.0)
    causes = Causes(timeline(seconds=free))

    lengths = [len(list(causes.walk(s, -1.0))) for s in causes.timeline.spans]

    assert max(lengths) <= len(causes.timeline.spans)
