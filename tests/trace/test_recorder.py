"""The ring: what is kept, what is let go, and that a snapshot can be taken at any time."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.trace.hand import PIECES, plan, span
from zoff_async.trace import Recorder, Wait


def fill(recorder: Recorder, step: int) -> None:
    recorder.opened(step, plan(), PIECES)
    recorder(span("d2h:0", "d2h", step, step + 0.5, step=step))
    recorder.waited("step", step + 0.5, step + 0.6)


def test_only_the_last_steps_are_kept_with_their_plans_and_waits():
    recorder = Recorder(3)
    for step in range(1000):
        fill(recorder, step)
    found = recorder.timeline()

    assert found.steps == (997, 998, 999)
    assert list(found.plans) == [997, 998, 999]
    assert found.waits == tuple(Wait("step", None, step + 0.5, step + 0.6) for step in (997, 998, 999))
    assert found.pieces == PIECES


def test_what_is_let_go_is_not_held_any_more():
    recorder = Recorder(3)
    for step in range(1000):
        fill(recorder, step)
        recorder.backward_began(step, 0, float(step), [(1, step - 0.5, step - 0.2)])
        recorder.waited("room", step, step + 0.01)
        for bucket in range(2):
            recorder.arrived(step, 0, bucket, step + 0.1)
    held = recorder.statistics()

    assert (held.newest_step, held.spans, held.plans) == (999, 3, 3)
    assert held.waits <= 8
    assert held.compute_spans <= 4 * 4 + 4 + 8  # spans, waits for weights, waits for room


def test_spans_may_be_noted_by_one_who_tells_of_every_step():
    recorder = Recorder(2)
    for step in range(10):
        recorder.opened(step, plan(), PIECES)
        recorder.note(span("d2h:0", "d2h", step, step + 1, step=step))

    assert recorder.timeline().steps == (7, 8, 9)  # the open one, and the last two
    assert recorder.statistics().spans == 3


def test_a_step_that_is_only_open_pushes_none_out():
    recorder = Recorder(2)
    for step in range(3):
        fill(recorder, step)
    recorder.opened(3, plan())

    assert recorder.timeline().steps == (1, 2)


def test_spans_come_in_the_order_in_which_they_ended():
    recorder = Recorder(1)
    recorder(span("adam:0.0", "cpu", 0, 3))
    recorder(span("d2h:0", "d2h", 0, 1))

    assert [s.end_s for s in recorder.timeline().spans] == [1, 3]


def test_facts_may_be_added_later_and_a_snapshot_keeps_its_own():
    recorder = Recorder(1, {"policy": "overlap"})
    before = recorder.timeline()
    recorder.facts["device"] = "host"

    assert before.facts == {"policy": "overlap"}
    assert recorder.timeline().facts == {"policy": "overlap", "device": "host"}


def test_a_recorder_of_no_steps_is_refused():
    with pytest.raises(ValueError) as caught:
        Recorder(0)

    assert str(caught.value) == "steps is 0: a recorder keeps at least one step"


def test_a_snapshot_may_be_taken_while_steps_are_recorded():
    recorder = Recorder(4)
    stop = threading.Event()

    def record() -> None:
        step = 0
        while not stop.is_set():
            recorder.opened(step, plan(), PIECES)
            recorder.backward_began(step, 0, float(step), [(1, step - 0.5, step - 0.2)])
            for bucket in range(2):
                recorder.arrived(step, 0, bucket, step + 0.1)
            for chunk in range(50):
                recorder(span(f"adam:0.{chunk}", "cpu", step, step + 1, step=step))
            recorder.waited("step", step, step + 0.5)
            step += 1

    with ThreadPoolExecutor(1) as pool:
        recording = pool.submit(record)
        try:
            sizes = [len(recorder.timeline().spans) for _ in range(200)]
        finally:
            stop.set()
        recording.result()  # raises what went wrong there

    assert max(sizes) <= 5 * 53
