"""Two reports side by side."""

from __future__ import annotations

from dataclasses import replace

from tests.trace.hand import SECONDS, timeline
from zoff_async.trace.diff import describe, differences


def test_every_figure_of_either_stands_once_with_the_second_over_the_first():
    first = timeline(steps=5).report()
    second = timeline(steps=5, seconds={**SECONDS, "adam": 1.5}).report()
    found = {item.name: item for item in differences(first, second)}

    assert len(found) == len(differences(first, second))
    assert (found["step"].first, found["step"].second, found["step"].ratio) == (14.0, 11.0, 11 / 14)
    assert found["work adam"].ratio == 0.5
    assert found["busy cpu"].unit == "share"


def test_a_figure_that_one_side_has_not_is_a_gap():
    first = timeline(steps=5).report()
    second = replace(first, slot_waits_s={"d2h": 0.5})
    found = {item.name: item for item in differences(first, second)}

    assert (found["slot-wait d2h"].first, found["slot-wait d2h"].second, found["slot-wait d2h"].ratio) == (
        None,
        0.5,
        None,
    )


def test_the_table_has_both_verdicts_below_it():
    first = timeline(steps=5).report()
    second = timeline("serial", steps=5).report()
    lines = describe(first, second, ("a/very/long/path/that/goes/on/overlap.json", "serial.json")).splitlines()

    assert lines[0].split() == ["a", "step", "...that/goes/on/overlap.json", "serial.json", "ratio"]
    assert lines[1].split() == ["step", "14", "s", "17.5", "s", "1.25", "x"]
    assert lines[-2].startswith("...that/goes/on/overlap.json: order-bound")
    assert lines[-1].startswith("serial.json: ")
