"""Steps as text, whole."""

from __future__ import annotations

import pytest

from tests.trace.hand import plan, recorded, span, timeline
from zoff_async.trace import Timeline

# 14 s a step in 56 columns of a quarter of a second.
WHOLE = """\
     |step 2, 14 s
fwd  1111········0000········································
bwd  ················00001111································
d2h  ····················0000000011111111····················
cpu  00000000····················00······11##1111111111110000
h2d  ········0000········································1111
     250 ms a column; 0-9a-z: bucket, #: norm and others, ·: idle
"""


def test_the_step_worked_out_by_hand_in_columns_of_a_quarter_second():
    assert timeline().gantt(steps=1, width=61) == WHOLE


def test_a_column_shows_the_bucket_that_took_most_of_it():
    found = recorded(
        span("d2h:0", "d2h", 0, 2.5), span("d2h:1", "d2h", 2.5, 10), span("d2h:2", "d2h", 10, 70), of=plan()
    )
    row = found.gantt(width=40).splitlines()[1]

    assert row == "d2h  0" + 4 * "1" + 30 * "2"  # 2 s a column, the second one 0.5 s of bucket 0


def test_several_workers_are_several_rows_and_an_idle_one_is_left_out():
    found = recorded(
        span("adam:0.0", "cpu", 0, 2),
        span("adam:0.1", "cpu", 1, 2),
        span("d2h:37", "d2h", 0, 2),
        of=plan(chunks=(2, 1), workers=3),
    )
    names = [line[:5].strip() for line in found.gantt(width=45).splitlines()[1:-1]]

    assert names == ["d2h", "cpu 0", "cpu 1"]
    assert "111" in found.gantt(width=45).splitlines()[1]  # bucket 37 begins the signs again


def test_a_window_of_text_is_refused_when_it_is_too_narrow_to_read():
    with pytest.raises(ValueError) as caught:
        timeline().gantt(width=39)

    assert str(caught.value) == "width is 39: at least 40 columns are needed"


def test_without_spans_there_is_nothing_to_draw():
    with pytest.raises(ValueError) as caught:
        Timeline(()).gantt()

    assert str(caught.value) == ("the timeline has no spans: record a step first (OffloadConfig(trace_steps=...))")
