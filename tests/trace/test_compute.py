"""Spans of forward and backward from the instants that hooks and gates see."""

from __future__ import annotations

from tests.trace.hand import PIECES, plan
from zoff_async.trace import Recorder, Wait


class Point:
    """A point of a stream, reached when it is told to be."""

    def __init__(self) -> None:
        self.at_s: float | None = None

    def reached_s(self) -> float | None:
        return self.at_s


def open_recorder(steps: int = 4) -> Recorder:
    recorder = Recorder(steps)
    recorder.opened(0, plan(), PIECES)
    return recorder


def spans(recorder: Recorder) -> list[tuple[str, int, float, float]]:
    return [(str(s.action), s.step, s.start_s, s.end_s) for s in recorder.timeline().spans]


def test_backward_of_a_bucket_lasts_from_the_bucket_before_it():
    recorder = open_recorder()
    recorder.backward_began(0, 0, 10.0)
    recorder.arrived(0, 0, 0, 11.0)
    recorder.arrived(0, 0, 1, 14.0)

    assert spans(recorder) == [("bwd:0", 0, 10.0, 11.0), ("bwd:1", 0, 11.0, 14.0)]


def test_forward_lasts_from_a_buckets_first_read_to_the_next_ones():
    recorder = open_recorder()
    recorder.backward_began(0, 0, 10.0, [(1, 1.0, 2.0), (0, 5.0, 5.0)])

    assert spans(recorder) == [("fwd:1", 0, 2.0, 5.0), ("fwd:0", 0, 5.0, 10.0)]


def test_a_read_that_waited_is_told_as_a_wait_and_a_quick_one_is_not():
    recorder = open_recorder()
    recorder.backward_began(0, 0, 10.0, [(1, 1.0, 2.0), (0, 5.0, 5.00001)])
    recorder.arrived(0, 0, 0, 11.0)
    recorder.arrived(0, 0, 1, 12.0)

    assert recorder.timeline().waits == (Wait("weights", 1, 1.0, 2.0),)


def test_without_reads_forward_is_shared_out_by_parameters_from_the_end_of_step():
    recorder = open_recorder()
    recorder.forward_may_begin(2.0)
    recorder.backward_began(0, 0, 10.0)

    assert spans(recorder) == [("fwd:1", 0, 2.0, 8.0), ("fwd:0", 0, 8.0, 10.0)]  # 300 and 100 parameters


def test_a_further_forward_begins_where_the_backward_before_it_ended():
    recorder = open_recorder()
    recorder.backward_began(0, 0, 4.0)
    recorder.arrived(0, 0, 0, 5.0)
    recorder.arrived(0, 0, 1, 6.0)
    recorder.backward_began(0, 1, 10.0)

    assert spans(recorder)[2:] == [("fwd:1#1", 0, 6.0, 9.0), ("fwd:0#1", 0, 9.0, 10.0)]


def test_the_first_forward_of_all_is_not_made_up():
    recorder = open_recorder()
    recorder.backward_began(0, 0, 4.0)
    recorder.arrived(0, 0, 0, 5.0)

    assert spans(recorder) == [("bwd:0", 0, 4.0, 5.0)]


def test_a_wait_in_a_hook_is_no_backward():
    recorder = open_recorder()
    recorder.backward_began(0, 0, 4.0)
    recorder.arrived(0, 0, 0, 5.0)
    recorder.waited("room", 5.0, 7.0)
    recorder.arrived(0, 0, 1, 8.0)

    assert spans(recorder) == [("bwd:0", 0, 4.0, 5.0), ("bwd:1", 0, 7.0, 8.0)]
    assert recorder.timeline().waits == (Wait("room", None, 5.0, 7.0),)


def test_points_of_a_stream_become_spans_when_they_have_been_reached():
    recorder = open_recorder()
    began, first, second = Point(), Point(), Point()
    recorder.backward_began(0, 0, began)
    recorder.arrived(0, 0, 0, first)
    recorder.arrived(0, 0, 1, second)
    nothing = spans(recorder)
    began.at_s, first.at_s = 1.0, 2.0
    one = spans(recorder)
    second.at_s = 4.0

    assert nothing == []
    assert one == [("bwd:0", 0, 1.0, 2.0)]
    assert spans(recorder) == [("bwd:0", 0, 1.0, 2.0), ("bwd:1", 0, 2.0, 4.0)]


def reached(at_s: float) -> Point:
    point = Point()
    point.at_s = at_s
    return point


def test_on_an_accelerator_forward_begins_when_the_backward_before_it_has_ended():
    """The host gave the work away at 3 s, when the device was still in the last backward."""
    recorder = open_recorder()
    recorder.backward_began(0, 0, reached(1.0))
    recorder.arrived(0, 0, 0, reached(2.0))
    recorder.arrived(0, 0, 1, reached(4.0))
    recorder.opened(1, plan(), PIECES)
    recorder.forward_may_begin(2.5)
    recorder.backward_began(1, 0, reached(8.0), [(1, 3.0, 3.0), (0, 3.1, 3.1)])

    assert spans(recorder)[2:] == [("fwd:1", 1, 4.0, 7.0), ("fwd:0", 1, 7.0, 8.0)]


def test_reads_that_are_points_of_the_stream_tell_what_the_device_waited_for():
    recorder = open_recorder()
    recorder.backward_began(0, 0, reached(9.0), [(1, reached(1.0), reached(3.0)), (0, reached(5.0), reached(6.0))])
    recorder.arrived(0, 0, 0, reached(10.0))
    recorder.arrived(0, 0, 1, reached(11.0))

    assert spans(recorder)[:2] == [("fwd:1", 0, 3.0, 5.0), ("fwd:0", 0, 6.0, 9.0)]
    assert recorder.timeline().waits == (Wait("weights", 1, 1.0, 3.0), Wait("weights", 0, 5.0, 6.0))


def test_a_clock_that_runs_backwards_makes_no_negative_span():
    recorder = open_recorder()
    recorder.backward_began(0, 0, 4.0)
    recorder.arrived(0, 0, 0, 3.0)
    recorder.arrived(0, 0, 1, 5.0)

    assert spans(recorder) == [("bwd:0", 0, 4.0, 4.0), ("bwd:1", 0, 4.0, 5.0)]


def test_compute_spans_leave_the_ring_with_their_step():
    recorder = Recorder(2)
    for step in range(10):
        recorder.opened(step, plan(), PIECES)
        recorder.backward_began(step, 0, 10.0 * step, [(1, 10.0 * step - 3, 10.0 * step - 2)])
        recorder.arrived(step, 0, 0, 10.0 * step + 1)
        recorder.waited("room", 10.0 * step + 1, 10.0 * step + 1.5)
        recorder.arrived(step, 0, 1, 10.0 * step + 2)
    found = recorder.timeline()

    assert found.steps == (7, 8, 9)  # the open one and the two before it
    assert recorder.statistics().compute_spans <= 3 * 3 + 3 + 4  # spans, waits for weights, waits for room
