"""One sentence: what limits the step, and the two changes that would help most."""

from __future__ import annotations

from collections.abc import Sequence

from zoff_async.trace.exposure import KindUse
from zoff_async.trace.figures import percent
from zoff_async.trace.waiting import LaneUse
from zoff_async.trace.whatif import Lever

#: A lane busy for this share of the step limits it.
FULL = 0.75
#: A step this many times its ideal time is limited by what lies between the actions.
SLOW = 1.25
#: A lever that saves a smaller share is not worth a word.
WORTH = 0.02

_BOUND = {
    "compute": "compute-bound",
    "cpu": "host-bound",
    "d2h": "copy-bound",
    "h2d": "copy-bound",
    "net": "network-bound",
}
_WORK = {
    "fwd": "forward",
    "bwd": "backward",
    "d2h": "gradient copies",
    "acc": "gradient sums",
    "norm": "the norm",
    "adam": "Adam",
    "h2d": "uploads",
}


def verdict(
    lanes: Sequence[LaneUse],
    kinds: Sequence[KindUse],
    levers: Sequence[Lever],
    *,
    step_s: float,
    ideal_s: float,
    bound_lane: str,
) -> str:
    """The sentence: ``host-bound: Adam fills 94 % of the step; twice the workers would save 38 %, ...``."""
    return f"{_limit(lanes, kinds, step_s, ideal_s, bound_lane)}; {_advice(levers)}"


def _limit(lanes: Sequence[LaneUse], kinds: Sequence[KindUse], step_s: float, ideal_s: float, bound_lane: str) -> str:
    lane = next((lane for lane in lanes if lane.lane == bound_lane), None)
    if lane is None:
        return "no lane did anything"
    if lane.busy >= FULL:
        shares = [(kind.work_s / lane.capacity / step_s, kind.kind) for kind in kinds if kind.lane == lane.lane]
        share, words = _fillers(sorted(shares, reverse=True))
        return f"{_BOUND.get(lane.lane, lane.lane + '-bound')}: {words} {percent(share)} of the step"
    over = step_s / ideal_s if ideal_s else 1.0
    busiest = f"the busiest lane ({lane.lane}) works {percent(lane.busy)} of the step"
    if over >= SLOW:
        return f"overhead-bound: the step takes {over:.1f} x its ideal time, and {busiest}"
    return f"order-bound: {busiest}, the lanes wait for each other"


def _fillers(shares: list[tuple[float, str]]) -> tuple[float, str]:
    """The kind that fills the lane, or the two together where it takes both."""
    (first, kind), *others = shares
    if not others or others[0][0] < first / 4:
        return first, f"{_WORK.get(kind, kind)} fills" if kind in ("norm", "adam") else f"{_WORK.get(kind, kind)} fill"
    second, other = others[0]
    names = sorted((kind, other), key=list(_WORK).index) if {kind, other} <= set(_WORK) else [kind, other]
    return first + second, f"{_WORK.get(names[0], names[0])} and {_WORK.get(names[1], names[1])} fill"


def _advice(levers: Sequence[Lever]) -> str:
    best = best_two(levers)
    if not best:
        return f"nothing tried would save more than {percent(WORTH)}"
    first = f"{_named(best[0])} would save {percent(best[0].saved)}"
    return ", ".join([first, *(f"{_named(lever)} {percent(lever.saved)}" for lever in best[1:])])


def best_two(levers: Sequence[Lever]) -> list[Lever]:
    """The best lever of each of the two best groups: two ways to go, not one way twice."""
    found: dict[str, Lever] = {}
    for lever in sorted(levers, key=lambda lever: (-round(lever.saved, 2), lever.name != "twice the workers")):
        if lever.saved >= WORTH:
            found.setdefault(lever.group, lever)
    return list(found.values())[:2]


def _named(lever: Lever) -> str:
    return lever.name if lever.exact else f"{lever.name} (stale by one step)"
