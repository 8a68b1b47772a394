"""Loss curves as text."""

from __future__ import annotations

from zoff_async.train.curves import draw_curves


def test_two_curves_share_a_frame():
    drawn = draw_curves({"offloaded": [4, 3, 1, 1], "reference": [4, 2, 1, 2]}, width=4, height=4)

    assert drawn.splitlines() == [
        " 4.000 |=",
        "       | o",
        "       | r r",
        " 1.000 |  =o",
        "       +----",
        "        o = offloaded, r = reference, = is both",
    ]


def test_a_long_curve_is_averaged_into_its_columns():
    drawn = draw_curves({"loss": [4, 2, 1, 1]}, width=2, height=3)

    assert drawn.splitlines() == [" 3.000 |l", "       |", " 1.000 | l", "       +--", "        l = loss"]


def test_a_short_curve_is_drawn_wide():
    assert draw_curves({"loss": [2, 1]}, width=4, height=2).splitlines()[:2] == [" 2.000 |ll", " 1.000 |  ll"]


def test_a_flat_curve_has_no_height():
    assert draw_curves({"loss": [2.0]}, width=3, height=2).splitlines()[:2] == [" 2.000 |", " 2.000 |lll"]
