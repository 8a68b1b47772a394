"""Loss curves as text, for a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def draw_curves(curves: Mapping[str, Sequence[float]], *, width: int = 64, height: int = 12) -> str:
    """Curves of one length in one frame, each with a mark of its own.

    Args:
        curves: Name -> values. The first letter of a name is its mark; where curves meet stands ``=``.
        width, height: Of the drawing area in characters, height at least 2; each column shows the
            mean of its steps.
    """
    columns = {name: _columns(values, width) for name, values in curves.items()}
    shown = [value for values in columns.values() for value in values]
    low, high = min(shown), max(shown)
    grid = [[" "] * width for _ in range(height)]
    for name, values in columns.items():
        for x, value in enumerate(values):
            share = (value - low) / (high - low) if high > low else 0.0
            row = grid[height - 1 - round(share * (height - 1))]
            row[x] = name[0] if row[x] == " " else "="
    labels = [f"{high:6.3f}", *[" " * 6] * (height - 2), f"{low:6.3f}"]
    lines = [f"{label} |{''.join(row).rstrip()}" for label, row in zip(labels, grid, strict=True)]
    lines.append(" " * 7 + "+" + "-" * width)
    marks = [f"{name[0]} = {name}" for name in curves] + ["= is both"] * (len(curves) > 1)
    lines.append(" " * 8 + ", ".join(marks))
    return "\n".join(lines)


def _columns(values: Sequence[float], width: int) -> list[float]:
    """``width`` means of neighbours, or the values themselves drawn wide."""
    n = len(values)
    spans = [(x * n // width, max(x * n // width + 1, (x + 1) * n // width)) for x in range(width)]
    return [sum(values[a:b]) / (b - a) for a, b in spans]
