"""Trace files: Chrome's JSON, which Perfetto, chrome://tracing and torch's own tools read.

Note [What is in a file]
    ``traceEvents``: a slice an action, on one thread a row (slices of one thread may not overlap); flow arrows
    along the plan's edges; counters of staging slots; a row with the steps and one with the caller's waits.
    ``baseTimeNanoseconds`` is the Unix time of ``ts`` 0, as torch.profiler writes it, so that traces of one run
    can be laid over each other. ``zoff_async`` holds what a reader of ours needs besides: format number,
    plans, sizes, facts and waits. Slices carry their times in nanoseconds too, so that a file reads back as it
    was written.
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from zoff_async.scheduler import Span
from zoff_async.trace.counters import samples
from zoff_async.trace.edges import Edges
from zoff_async.trace.own_part import own_part
from zoff_async.trace.steps import windows
from zoff_async.trace.timeline import Timeline
from zoff_async.trace.tracks import Track, tracks

#: Above every process number of the system, so that a merged trace keeps ours apart.
PROCESS = 1 << 22
_STEPS, _CALLER, _FIRST_TRACK = 1, 2, 10

Event: TypeAlias = dict[str, Any]


def save(timeline: Timeline, path: str | Path) -> None:
    """Write the file whole or not at all; compressed if its name ends in ``.gz``.

    Raises:
        OSError: if it cannot be written.
    """
    target = Path(path)
    text = json.dumps(document(timeline), separators=(", ", ": "), allow_nan=False)
    data = text.encode()
    if target.suffix == ".gz":
        data = gzip.compress(data, mtime=0)
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        part.write_bytes(data)
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)


def document(timeline: Timeline) -> dict[str, Any]:
    """What ``save`` writes, as plain values."""
    rows = tracks(timeline)
    base_s = min((span.start_s for span in timeline.spans), default=0.0)
    clock = timeline.clock
    return {
        "schemaVersion": 1,
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": 0 if clock is None else clock.wall_ns_at(base_s),
        "traceEvents": list(_Events(timeline, rows, base_s)),
        "zoff_async": own_part(timeline, base_s),
    }


class _Events:
    """The events of one timeline, in an order that viewers like: names, slices, arrows, counters."""

    def __init__(self, timeline: Timeline, rows: list[Track], base_s: float) -> None:
        self._timeline = timeline
        self._rows = rows
        self._base_s = base_s
        self._thread: dict[Span, int] = {}
        for number, row in enumerate(rows):
            for span in row.spans:
                self._thread[span] = _FIRST_TRACK + number

    def __iter__(self) -> Iterator[Event]:
        yield from self._names()
        yield from self._steps()
        for row in self._rows:
            yield from (self._slice(span) for span in row.spans)
        yield from self._waits()
        yield from self._arrows()
        yield from self._counters()

    def _names(self) -> Iterator[Event]:
        facts = self._timeline.facts
        label = " ".join(str(facts[name]) for name in ("policy", "device") if name in facts)
        yield _meta("process_name", 0, {"name": f"zoff_async {label}".strip()})
        yield _meta("process_sort_index", 0, {"sort_index": -1})
        named = [(_STEPS, "steps"), (_CALLER, "caller waits")] if self._timeline.waits else [(_STEPS, "steps")]
        named += [(_FIRST_TRACK + number, row.name) for number, row in enumerate(self._rows)]
        for thread, name in named:
            yield _meta("thread_name", thread, {"name": name})
            yield _meta("thread_sort_index", thread, {"sort_index": thread})

    def _steps(self) -> Iterator[Event]:
        for step, start_s, end_s in windows(self._timeline):
            plan = self._timeline.plans.get(step)
            name = f"step {step}" if plan is None else f"step {step}, {plan.name}"
            yield self._complete(name, "step", _STEPS, start_s, end_s, {"step": step})

    def _slice(self, span: Span) -> Event:
        args: Event = {"step": span.step, "lane": span.lane, "bytes": span.bytes}
        numel = self._timeline.numel(span.action)
        if numel:
            args["parameters"] = numel
        args["ns"] = [_ns(span.start_s - self._base_s), _ns(span.end_s - self._base_s)]
        thread = self._thread[span]
        return self._complete(str(span.action), span.action.kind, thread, span.start_s, span.end_s, args)

    def _waits(self) -> Iterator[Event]:
        for what, bucket, start_s, end_s in self._timeline.waits:
            if end_s > self._base_s:
                name = what if bucket is None else f"{what} of bucket {bucket}"
                yield self._complete(name, "wait", _CALLER, max(start_s, self._base_s), end_s, {})

    def _arrows(self) -> Iterator[Event]:
        """An arrow a plan edge: from the end of the one slice to the beginning of the other."""
        for number, (before, after, rule) in enumerate(Edges(self._timeline).arrows(), start=1):
            common = {"name": rule, "cat": "edge", "id": number, "pid": PROCESS}
            # A viewer ties an arrow to the slice that holds its time; the very end is outside.
            from_s = max(before.start_s, before.end_s - 1e-9)
            yield {"ph": "s", **common, "tid": self._thread[before], "ts": self._us(from_s)}
            yield {"ph": "f", "bp": "e", **common, "tid": self._thread[after], "ts": self._us(after.start_s)}

    def _counters(self) -> Iterator[Event]:
        for name, series in samples(self._timeline).items():
            sized = any(sample.bytes for sample in series)
            for at_s, slots, nbytes in series:
                common = {"ph": "C", "pid": PROCESS, "tid": 0, "ts": self._us(at_s)}
                yield {**common, "name": f"{name} slots in use", "args": {"slots": slots}}
                if sized:
                    yield {**common, "name": f"{name} bytes in flight", "args": {"bytes": nbytes}}

    def _complete(self, name: str, category: str, thread: int, start_s: float, end_s: float, args: Event) -> Event:
        start_us, end_us = self._us(start_s), self._us(end_s)
        # A slice of no length is not drawn: it gets a nanosecond.
        length_us = max(round(end_us - start_us, 3), 0.001)
        head: Event = {"ph": "X", "name": name, "cat": category, "pid": PROCESS, "tid": thread}
        return {**head, "ts": start_us, "dur": length_us, "args": args}

    def _us(self, at_s: float) -> float:
        return _ns(at_s - self._base_s) / 1000


def _meta(name: str, thread: int, args: Mapping[str, Any]) -> Event:
    return {"ph": "M", "name": name, "pid": PROCESS, "tid": thread, "ts": 0, "args": dict(args)}


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
