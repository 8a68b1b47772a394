"""The measured critical path: the chain of actions that one step's length consists of."""

from __future__ import annotations

from dataclasses import dataclass

from zoff_async.scheduler import Action, Span
from zoff_async.trace.causes import LANE, Causes, Release
from zoff_async.trace.steps import Window, first_spans


@dataclass(frozen=True)
class PathAction:
    """One action of the critical path.

    ``start_s`` and ``end_s`` are cut to what the path goes through: from the step's beginning, and up to the
    beginning of the action that waited for it. ``gap_s`` lies between the end of the action before it in the
    path and its own beginning: hand-over, or the caller's own code. ``rule`` says why it waited for that one:
    a rule of the plan, or ``lane``.
    """

    action: Action
    step: int
    lane: str
    start_s: float
    end_s: float
    gap_s: float
    rule: str


def critical_path(causes: Causes, window: Window) -> tuple[PathAction, ...]:
    """What the step waited for, in order: walked back from the next step's first action.

    Durations and gaps add up to the step's length. A gap before the next step's beginning stands at the end,
    with that action and no duration.
    """
    after = first_spans(causes.timeline).get(window.step + 1)
    if after is None:
        return ()
    found: list[PathAction] = []
    until_s = after.start_s
    for span, release in causes.walk(after, window.start_s):
        item = _item(span, release, window.start_s, until_s)
        until_s = item.start_s - item.gap_s
        # The next step's first action is there for its gap only, and one that was over before the step not at all.
        if item.end_s > item.start_s or item.gap_s:
            found.append(item)
    return tuple(reversed(found))


def _item(span: Span, release: Release | None, from_s: float, until_s: float) -> PathAction:
    start_s = min(max(span.start_s, from_s), until_s)
    end_s = min(max(span.end_s, from_s), until_s)
    released_s = from_s if release is None else min(max(release.span.end_s, from_s), start_s)
    rule = LANE if release is None else release.rule
    return PathAction(span.action, span.step, span.lane, start_s, end_s, start_s - released_s, rule)
