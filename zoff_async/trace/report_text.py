"""A report as text for a terminal: what the words mean stands beside the figures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

from zoff_async.trace.critical import PathAction
from zoff_async.trace.figures import amount, percent, seconds
from zoff_async.trace.report import Report

_MOST_CAUSES = 3
_MOST_LEVERS = 6
_MOST_PATH = 14


def describe(report: Report) -> str:
    """The whole printout, the verdict first."""
    parts = [
        _wrapped(report.verdict),
        _times(report),
        "lanes            busy   waits for\n" + _table(_lane_rows(report)),
        "a step           hidden      exposed     moved and rate\n" + _table(_kind_rows(report)),
        *_standing_still(report),
        "critical path    " + _path(report),
        "what if                           step        saves\n" + _table(_lever_rows(report)),
    ]
    return "\n\n".join(parts) + "\n"


def _times(report: Report) -> str:
    policy = report.facts.get("policy", "the policy")
    shown = f"steps {report.steps[0]} to {report.steps[-1]}" if len(report.steps) > 1 else f"step {report.steps[0]}"
    rows = [
        ("step", seconds(report.step_s), f"median of {len(report.steps)}, {shown}"),
        (
            "ideal",
            seconds(report.ideal_s),
            f"{policy} without overhead: the step takes {report.over_ideal:.2f} x as long",
        ),
        (
            "bound",
            seconds(report.bound_s),
            f"{report.bound_lane} alone, no policy is faster: the step takes {report.over_bound:.2f} x as long",
        ),
    ]
    return _table([f"{name:<17}{time:<10}  {text}" for name, time, text in rows])


def _lane_rows(report: Report) -> Iterable[str]:
    for lane in report.lanes:
        name = lane.lane if lane.capacity == 1 else f"{lane.lane} (x{lane.capacity})"
        causes = [(cause, share) for cause, share in lane.waiting.items() if share >= 0.005]
        texts = [f"{cause} {percent(share)}" for cause, share in causes[:_MOST_CAUSES]]
        yield f"{name:<17}{percent(lane.busy):>5}  {', '.join(texts)}"


def _kind_rows(report: Report) -> Iterable[str]:
    for kind in report.kinds:
        rates = []
        if kind.bytes_per_s is not None:
            rates.append(f"{amount(kind.bytes, 'B')} at {amount(kind.bytes_per_s, 'B/s')}")
        if kind.kind == "adam" and kind.numel_per_s is not None:
            rates.append(f"{amount(kind.numel, '')}parameters at {amount(kind.numel_per_s, '/s')} a worker")
        covered = ("", "") if kind.lane == "compute" else (seconds(kind.hidden_s), seconds(kind.exposed_s))
        if kind.lane == "compute":
            rates = [f"{seconds(kind.work_s)} on the compute lane"]
        yield f"{kind.kind:<17}{covered[0]:<12}{covered[1]:<12}{', '.join(rates)}".rstrip()


def _standing_still(report: Report) -> list[str]:
    rows = [
        f"slot waits       {name}: {seconds(time)} a step for a free staging slot"
        for name, time in report.slot_waits_s.items()
        if time > 0
    ]
    words = {
        "weights": "in forward, for a weight's upload",
        "room": "in backward, for gradients to leave the device",
        "step": "inside step()",
    }
    rows += [
        f"caller           {seconds(time)} a step {words.get(what, what)}" for what, time in report.waits_s.items()
    ]
    return ["\n".join(rows)] if rows else []


def _path(report: Report) -> str:
    by_kind = sorted(report.path_s.items(), key=lambda item: -item[1])
    total_s = sum(time for _, time in by_kind) or 1.0
    shares = ", ".join(f"{kind} {percent(time / total_s)}" for kind, time in by_kind)
    return f"{shares}\n                 {folded(report.critical_path)}"


def folded(path: Sequence[PathAction]) -> str:
    """The path in few words: runs of one kind are written as first .. last."""
    words = []
    for _, group in groupby(path, key=lambda item: (item.action.kind, item.step)):
        run = list(group)
        words.append(str(run[0].action) if len(run) == 1 else f"{run[0].action}..{run[-1].action} ({len(run)})")
    if len(words) > _MOST_PATH:
        half = _MOST_PATH // 2
        words = [*words[:half], f"({len(words) - 2 * half} more runs)", *words[-half:]]
    return " > ".join(words)


def _lever_rows(report: Report) -> Iterable[str]:
    for lever in report.levers[:_MOST_LEVERS]:
        name = lever.name if lever.exact else f"{lever.name} (stale by one step)"
        yield f"{name:<34}{seconds(lever.step_s):<12}{percent(lever.saved):>5}"


def _table(rows: Iterable[str]) -> str:
    return "\n".join(rows)


def _wrapped(text: str, width: int = 100) -> str:
    import textwrap

    return "\n".join(textwrap.wrap(text, width))
