"""The printout of a report, whole, and how figures are written."""

from __future__ import annotations

from dataclasses import replace

from tests.trace.hand import timeline
from zoff_async.trace import Wait
from zoff_async.trace.report_text import folded

WHOLE = """\
order-bound: the busiest lane (cpu) works 54 % of the step, the lanes wait for each other; `delayed`
(stale by one step) would save 46 %, Adam twice as fast 21 %

step             14 s        median of 3, steps 1 to 3
ideal            14 s        overlap without overhead: the step takes 1.00 x as long
bound            7.5 s       cpu alone, no policy is faster: the step takes 1.87 x as long

lanes            busy   waits for
compute           29 %  adam 29 %, d2h 21 %, h2d 14 %
d2h               29 %  adam 43 %, bwd 7 %, fwd 7 %
cpu               54 %  d2h 25 %, bwd 7 %, fwd 7 %
h2d               14 %  adam 36 %, d2h 29 %, bwd 7 %

a step           hidden      exposed     moved and rate
fwd                                      2 s on the compute lane
bwd                                      2 s on the compute lane
d2h              1 s         3 s         800 B at 200 B/s
acc              0           1 s
norm             0           500 ms
adam             1 s         5 s         400 parameters at 66.7 /s a worker
h2d              0           2 s         800 B at 400 B/s

critical path    adam 36 %, d2h 29 %, h2d 14 %, fwd 7 %, bwd 7 %, acc 4 %, norm 4 %
                 adam:0.0 > h2d:0 > fwd:0 > bwd:0 > d2h:0..d2h:1 (2) > acc:1 > norm > adam:1.0 > h2d:1
"""


def test_the_printout_of_the_step_worked_out_by_hand():
    text = timeline(steps=5).report().describe()

    assert text.split("\n\nwhat if")[0] + "\n" == WHOLE
    assert "\n\nwhat if                           step        saves\n`delayed` (stale by one step)" in text


def test_waits_are_printed_in_words():
    waits = (Wait("weights", 0, 13.0, 13.3), Wait("room", None, 16.0, 16.3), Wait("step", None, 18.0, 18.3))
    text = replace(timeline(steps=5), waits=waits).report().describe()

    assert "caller           100 ms a step in forward, for a weight's upload" in text
    assert "caller           100 ms a step in backward, for gradients to leave the device" in text
    assert "caller           100 ms a step inside step()" in text


def test_str_is_the_printout():
    report = timeline(steps=5).report()

    assert str(report) == report.describe()


def test_a_long_path_is_folded_in_the_middle():
    path = timeline(steps=5).report().critical_path
    text = folded(path * 4)

    assert "more runs)" in text
    assert text.startswith("adam:0.0 > h2d:0 > fwd:0")
    assert text.endswith("> adam:1.0 > h2d:1")
