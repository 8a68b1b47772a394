"""Steps small enough to work out by hand.

``overlap`` with two buckets of one chunk and one worker. Seconds: forward 1, backward 1, d2h 2, acc 0.5, norm 0.5,
adam 3, h2d 1. From the second step on a step takes 14 s:

    compute  fwd:1 12-13 . . fwd:0 15-16 bwd:0 16-17 bwd:1 17-18
    d2h                                  d2h:0 17-19 d2h:1 19-21
    cpu      adam:0.0 11-14                   acc:0 19-19.5   acc:1 21-21.5 norm 21.5-22 adam:1.0 22-25 adam:0.0 25-28
    h2d      h2d:1 11-12    h2d:0 14-15                                                 h2d:1 25-26
    compute                                                                                        fwd:1 26
"""

from __future__ import annotations

from collections.abc import Mapping

from zoff_async.scheduler import POLICIES, Action, KindCost, Layout, Simulation, Span, StepPlan, simulate
from zoff_async.trace import Pieces, Timeline, Wait

SECONDS = {"fwd": 1.0, "bwd": 1.0, "d2h": 2.0, "acc": 0.5, "norm": 0.5, "adam": 3.0, "h2d": 1.0}
PERIOD_S = 14.0
#: A step of the table above: from its first forward to the next one's.
STEP_1 = (12.0, 26.0)
PIECES = Pieces((100, 300), 300)


def plan(policy: str = "overlap", **layout: object) -> StepPlan:
    """Two buckets of one chunk, unless said otherwise."""
    given = {"chunks": (1, 1), "bucket_bytes": (200, 600), **layout}
    return POLICIES[policy](Layout(**given))


def simulated(policy: str = "overlap", *, steps: int = 4, seconds: Mapping[str, float] = SECONDS) -> Simulation:
    return simulate(plan(policy), KindCost(seconds), steps=steps)


def timeline(policy: str = "overlap", *, steps: int = 4, seconds: Mapping[str, float] = SECONDS) -> Timeline:
    """The table above, as if it had been recorded."""
    return Timeline.of(simulated(policy, steps=steps, seconds=seconds), PIECES)


def span(text: str, lane: str, start_s: float, end_s: float, *, step: int = 0, nbytes: int = 0) -> Span:
    return Span(Action.parse(text), lane, step, start_s, end_s, nbytes)


def recorded(*spans: Span, of: StepPlan | None = None, waits: tuple[Wait, ...] = (), **facts: object) -> Timeline:
    """A timeline of these spans, all steps with one plan."""
    plans = {s.step: of for s in spans} if of is not None else {}
    ordered = tuple(sorted(spans, key=lambda s: s.end_s))
    return Timeline(ordered, plans, PIECES, waits, facts)  # type: ignore[arg-type]


def late(source: Timeline, seconds: float) -> Timeline:
    """Every action takes as long as before, and begins that much later after what released it: a slow hand-over.

    Only for a chain: nothing may depend on two lanes that drift apart.
    """
    order = sorted(source.spans, key=lambda s: s.start_s)
    starts = sorted({s.start_s for s in order})
    shift = {start: seconds * place for place, start in enumerate(starts)}
    spans = (s._replace(start_s=s.start_s + shift[s.start_s], end_s=s.end_s + shift[s.start_s]) for s in order)
    return Timeline(tuple(sorted(spans, key=lambda s: s.end_s)), source.plans, source.pieces, (), source.facts)


def texts(spans: object) -> list[str]:
    """Names of the actions of spans, or of anything with an ``action``."""
    return [str(item.action) for item in spans]  # type: ignore[attr-defined]
