"""The figures of known machines."""

from __future__ import annotations

import dataclasses
import math

import pytest

from zoff_async.device import hardware, hardware_names


def test_presets_are_read_in_plain_units() -> None:
    """GB/s become bytes/s, GB bytes, TFLOP/s FLOP/s; a sustained figure goes before a peak."""
    v100 = hardware("v100-32g-dgx2")
    assert (v100.d2h_bytes_per_s, v100.h2d_bytes_per_s) == (12e9, 12e9)
    assert v100.compute_flop_per_s == 125e12
    assert v100.device_memory_bytes == 32_000_000_000
    assert (v100.host_cores, v100.devices_per_host) == (48, 16)
    assert hardware("h200-141g").compute_flop_per_s == 788e12


def test_every_preset_is_whole() -> None:
    assert len(hardware_names()) == 7
    for name in hardware_names():
        figures = dataclasses.asdict(hardware(name))
        assert figures.pop("name") == name
        assert figures.pop("link")
        assert all(value > 0 for value in figures.values())


def test_scaling_changes_rates_and_nothing_else() -> None:
    small = hardware("a100-40g").scaled(0.01)
    assert small.d2h_bytes_per_s == pytest.approx(0.24e9)
    assert small.compute_flop_per_s == pytest.approx(3.12e12)
    assert small.host_memory_bytes_per_s == pytest.approx(4e9)
    assert small.device_memory_bytes == 40_000_000_000
    assert small.host_cores == 64


@pytest.mark.parametrize("scale", [0, -1.0, math.inf, math.nan])
def test_a_scale_that_is_no_positive_number_is_refused(scale: float) -> None:
    with pytest.raises(ValueError) as caught:
        hardware("gh200").scaled(scale)
    assert str(caught.value) == f"scale must be a positive finite number, got {scale!r}"


def test_an_unknown_preset_is_refused_with_the_list() -> None:
    with pytest.raises(ValueError) as caught:
        hardware("k80")
    assert str(caught.value) == (
        "unknown hardware preset 'k80': choose one of v100-32g-dgx2, a100-40g, h100-80g, h200-141g, gh200, "
        "rtx4090-desktop, rtx4070ti-super-desktop"
    )


def test_a_machine_of_ones_own_is_checked() -> None:
    with pytest.raises(ValueError) as caught:
        dataclasses.replace(hardware("gh200"), d2h_bytes_per_s=0.0)
    assert str(caught.value) == "d2h_bytes_per_s must be a positive finite number, got 0.0"
