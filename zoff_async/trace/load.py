"""Reads trace files back, and says in one line what is wrong with one that cannot be read."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from zoff_async.errors import PlanError, TraceError
from zoff_async.scheduler import Action, Span, StepPlan
from zoff_async.trace.own_part import FORMAT
from zoff_async.trace.timeline import Clock, Pieces, Timeline, Wait


def load(path: str | Path) -> Timeline:
    """See ``Timeline.load``."""
    document = _document(Path(path))
    own = _own_part(path, document)
    try:
        return _timeline(document, own)
    except (KeyError, TypeError, ValueError, IndexError, PlanError, AttributeError) as error:
        raise TraceError(
            f"trace {str(path)!r} is damaged: {_first_line(error)}; write it again with timeline.save()"
        ) from error


def _document(path: Path) -> dict[str, Any]:
    name, data = str(path), path.read_bytes()
    if not data:
        raise TraceError(f"trace {name!r} is empty: the run that wrote it has not got so far")
    if data[:2] == b"\x1f\x8b":
        try:
            data = gzip.decompress(data)
        except (EOFError, OSError, zlib.error) as error:
            raise TraceError(f"trace {name!r} is cut off or damaged ({error}): copy it again") from error
    try:
        found = json.loads(data)
    except UnicodeDecodeError as error:
        raise TraceError(f"trace {name!r} is no trace: it is not text") from error
    except json.JSONDecodeError as error:
        if _is_cut_off(error):
            raise TraceError(f"trace {name!r} is cut off in line {error.lineno}: copy it again") from error
        raise TraceError(f"trace {name!r} is no trace: {error.msg} in line {error.lineno}") from error
    if not isinstance(found, dict):
        raise TraceError(f"trace {name!r} is of another program: expected what timeline.save() or --trace writes")
    return found


def _is_cut_off(error: json.JSONDecodeError) -> bool:
    """Whether a JSON object ends before its end, rather than that something in it is wrong."""
    text = error.doc.strip()
    if text[:1] != "{":
        return False
    return text[-1:] != "}" or error.pos >= len(error.doc.rstrip()) - 1


def _own_part(path: str | Path, document: Mapping[str, Any]) -> Mapping[str, Any]:
    own = document.get("zoff_async")
    if not isinstance(own, dict) or not isinstance(document.get("traceEvents"), list):
        raise TraceError(
            f"trace {str(path)!r} is of another program (it has no 'zoff_async' part): expected what "
            "timeline.save() or --trace writes"
        )
    number = own.get("format")
    if not isinstance(number, int) or number < 1:
        raise TraceError(f"trace {str(path)!r} has format {number!r}: this version reads 1 to {FORMAT}")
    if number > FORMAT:
        raise TraceError(
            f"trace {str(path)!r} has format {number}, this version reads up to {FORMAT}: use the "
            "zoff_async that wrote it, or a newer one"
        )
    return own


def _timeline(document: Mapping[str, Any], own: Mapping[str, Any]) -> Timeline:
    base_s = float(own["base_s"])
    plans = [StepPlan.parse(text) for text in own["plans"]]
    pieces = own["pieces"]
    wall_ns = int(document["baseTimeNanoseconds"])
    return Timeline(
        spans=tuple(sorted(_spans(document["traceEvents"], base_s), key=lambda span: span.end_s)),
        plans={int(step): plans[index] for step, index in own["steps"].items()},
        pieces=None if pieces is None else Pieces(tuple(int(n) for n in pieces[0]), int(pieces[1])),
        waits=tuple(_wait(entry, base_s) for entry in own["waits"]),
        facts=dict(own["facts"]),
        clock=Clock(wall_ns, base_s) if own["wall"] else None,
    )


def _spans(events: Sequence[Mapping[str, Any]], base_s: float) -> list[Span]:
    spans = []
    for event in events:
        args = event.get("args", {})
        if event.get("ph") == "X" and "ns" in args:
            start_ns, end_ns = args["ns"]
            action = Action.parse(event["name"])
            start_s, end_s = base_s + start_ns / 1e9, base_s + end_ns / 1e9
            spans.append(Span(action, str(args["lane"]), int(args["step"]), start_s, end_s, int(args["bytes"])))
    return spans


def _wait(entry: Sequence[Any], base_s: float) -> Wait:
    what, bucket, start_ns, end_ns = entry
    return Wait(str(what), bucket, base_s + start_ns / 1e9, base_s + end_ns / 1e9)


def _first_line(error: Exception) -> str:
    text = str(error).splitlines()[0] if str(error) else ""
    return f"{type(error).__name__}: {text}" if not isinstance(error, ValueError) else text
