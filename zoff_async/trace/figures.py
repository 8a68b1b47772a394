"""Figures as people read them: three places, a unit, a blank between."""

from __future__ import annotations


def percent(share: float) -> str:
    """``38 %``."""
    return f"{round(100 * share)} %"


def seconds(value: float) -> str:
    """Three figures and a unit: ``12.3 ms``."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if abs(value) >= 0.9995 * size:
            return f"{value / size:.3g} {unit}" if value / size < 999.5 else f"{value / size:.0f} {unit}"
    return f"{value / 1e-6:.2g} us" if value else "0"


def amount(value: float, unit: str) -> str:
    """Three figures, a decimal prefix and a unit: ``1.25 GB``."""
    for prefix, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"
