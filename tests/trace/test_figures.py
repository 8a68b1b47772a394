"""How figures are written."""

from __future__ import annotations

from zoff_async.trace.figures import amount, percent, seconds


def test_figures_have_three_places_and_a_unit():
    assert [seconds(value) for value in (0, 3e-7, 4.5e-5, 0.01234, 0.9999, 1.0, 75.2, 1234.5)] == [
        "0",
        "0.3 us",
        "45 us",
        "12.3 ms",
        "1 s",
        "1 s",
        "75.2 s",
        "1234 s",
    ]
    assert [amount(value, "B/s") for value in (12, 1234, 5.25e9)] == ["12 B/s", "1.23 kB/s", "5.25 GB/s"]
    assert [percent(share) for share in (0.384, -0.004, 1.0)] == ["38 %", "0 %", "100 %"]
