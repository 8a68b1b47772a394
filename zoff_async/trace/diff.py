"""Two timelines side by side: two policies, two machines, before and after."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from zoff_async.trace.figures import amount, percent, seconds
from zoff_async.trace.report import Report


@dataclass(frozen=True)
class Difference:
    """One figure of both. ``unit`` is ``s``, ``share`` or ``B/s`` or ``/s``; None where one side has no such figure."""

    name: str
    unit: str
    first: float | None
    second: float | None

    @property
    def ratio(self) -> float | None:
        """Second over first."""
        return self.second / self.first if self.first and self.second is not None else None


def differences(first: Report, second: Report) -> tuple[Difference, ...]:
    """Every figure that at least one of the two has."""
    ours, theirs = dict(_figures(first)), dict(_figures(second))
    names = [*ours, *(name for name in theirs if name not in ours)]
    return tuple(Difference(*name, ours.get(name), theirs.get(name)) for name in sorted(names, key=_place))


def _place(name: tuple[str, str]) -> int:
    """Groups of figures stay together, in the order in which they are made."""
    return _GROUPS.index(name[0].split(" ")[0])


_GROUPS = ["step", "ideal", "bound", "busy", "exposed", "hidden", "work", "rate", "slot-wait", "waited"]


def _figures(report: Report) -> Iterator[tuple[tuple[str, str], float]]:
    yield ("step", "s"), report.step_s
    yield ("ideal", "s"), report.ideal_s
    yield ("bound", "s"), report.bound_s
    for lane in report.lanes:
        yield (f"busy {lane.lane}", "share"), lane.busy
    for kind in report.kinds:
        yield (f"work {kind.kind}", "s"), kind.work_s
        if kind.lane != "compute":
            yield (f"exposed {kind.kind}", "s"), kind.exposed_s
            yield (f"hidden {kind.kind}", "s"), kind.hidden_s
        if kind.bytes_per_s is not None:
            yield (f"rate {kind.kind}", "B/s"), kind.bytes_per_s
        if kind.kind == "adam" and kind.numel_per_s is not None:
            yield (f"rate {kind.kind}", "/s"), kind.numel_per_s
    for name, wait_s in report.slot_waits_s.items():
        yield (f"slot-wait {name}", "s"), wait_s
    for what, wait_s in report.waits_s.items():
        yield (f"waited {what}", "s"), wait_s


def describe(first: Report, second: Report, names: tuple[str, str]) -> str:
    """A table of both, with the second over the first, and both verdicts."""
    rows = [("a step", *(_short(name) for name in names), "ratio")]
    for item in differences(first, second):
        ratio = "" if item.ratio is None else f"{item.ratio:.2f} x"
        rows.append((item.name, _written(item.first, item.unit), _written(item.second, item.unit), ratio))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    verdicts = [f"{_short(name)}: {report.verdict}" for name, report in zip(names, (first, second), strict=True)]
    return "\n".join([*lines, "", *verdicts]) + "\n"


def _written(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    if unit == "share":
        return percent(value)
    return seconds(value) if unit == "s" else amount(value, unit)


def _short(name: str, most: int = 28) -> str:
    return name if len(name) <= most else f"...{name[-(most - 3) :]}"
