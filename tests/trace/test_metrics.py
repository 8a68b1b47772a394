"""Metrics are flat, one dictionary a whole step, and agree with the hand-computed step."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.trace.hand import PERIOD_S, recorded, span, timeline
from zoff_async.trace import Wait


def test_a_dictionary_a_whole_step():
    found = timeline(steps=4).metrics()

    assert [figures["step"] for figures in found] == [0, 1, 2]
    assert all(isinstance(value, int | float) for figures in found for value in figures.values())


def test_the_figures_of_the_step_worked_out_by_hand():
    waits = (Wait("weights", 0, 13.0, 15.0), Wait("weights", 1, 25.5, 27.0))
    figures = replace(timeline(), waits=waits).metrics()[1]

    assert figures == pytest.approx(
        {
            "step": 1,
            "step_s": PERIOD_S,
            "busy/compute": 4 / 14,
            "busy/d2h": 4 / 14,
            "busy/cpu": 7.5 / 14,
            "busy/h2d": 2 / 14,
            "work_s/fwd": 2,
            "work_s/bwd": 2,
            "work_s/d2h": 4,
            "work_s/acc": 1,
            "work_s/norm": 0.5,
            "work_s/adam": 6,
            "work_s/h2d": 2,
            "exposed_s/d2h": 3,
            "hidden_s/d2h": 1,
            "exposed_s/acc": 1,
            "hidden_s/acc": 0,
            "exposed_s/norm": 0.5,
            "hidden_s/norm": 0,
            "exposed_s/adam": 5,
            "hidden_s/adam": 1,
            "exposed_s/h2d": 2,
            "hidden_s/h2d": 0,
            "bytes_per_s/d2h": 200,
            "bytes_per_s/h2d": 400,
            "parameters_per_s/adam": 400 / 6,
            "wait_s/weights": 2.5,
        }
    )


def test_there_are_none_without_a_whole_step():
    assert recorded(span("fwd:0", "compute", 0, 1)).metrics() == []


def test_utilisation_is_that_of_the_last_whole_step():
    assert timeline().utilisation() == pytest.approx({"compute": 4 / 14, "d2h": 4 / 14, "cpu": 7.5 / 14, "h2d": 2 / 14})
    assert recorded(span("fwd:0", "compute", 0, 1)).utilisation() == {}
