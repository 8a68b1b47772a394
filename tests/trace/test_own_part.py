"""The part of a trace file that is ours."""

from __future__ import annotations

from dataclasses import replace

from tests.trace.hand import plan, timeline
from zoff_async.trace import Timeline, Wait
from zoff_async.trace.own_part import FORMAT, own_part


def test_it_holds_what_slices_do_not():
    source = replace(timeline(steps=2), waits=(Wait("room", None, 3.0, 4.0),))
    found = own_part(source, 1.0)

    assert found == {
        "format": FORMAT,
        "base_s": 1.0,
        "wall": False,
        "plans": [str(plan())],
        "steps": {"0": 0, "1": 0},
        "pieces": [[100, 300], 300],
        "waits": [["room", None, 2_000_000_000, 3_000_000_000]],
        "facts": source.facts,
    }


def test_of_an_empty_timeline_it_holds_nothing():
    found = own_part(Timeline(()), 0.0)

    assert (found["plans"], found["steps"], found["pieces"], found["waits"]) == ([], {}, None, [])
