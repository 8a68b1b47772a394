"""A plan as text: one form that reads back, one for people, one for Graphviz."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby

from zoff_async.errors import PlanError
from zoff_async.scheduler.action import Action, Edge, Kind, Lane, Staging
from zoff_async.scheduler.plan import StepPlan

_WIDTH = 100


def write(plan: StepPlan) -> str:
    """The form that ``read`` takes back: a word and its values a line, then the edges under their rules."""
    lines = [
        f"plan {plan.name}",
        f"closes {plan.closes}",
        f"stale {plan.stale}",
        f"clip {'yes' if plan.clip else 'no'}",
        f"backwards {'any' if plan.backwards is None else plan.backwards}",
        f"external {' '.join(plan.external)}",
    ]
    lines += [f"lane {lane.name} {lane.capacity}" for lane in plan.lanes]
    lines += [f"kind {kind.name} {kind.lane} {kind.part}" for kind in plan.kinds]
    lines += [f"staging {s.name} {s.slots} {s.filled_by} {s.freed_by}" for s in plan.staging]
    if plan.bucket_bytes:
        lines += _wrapped("bytes", map(str, plan.bucket_bytes))
    lines += _wrapped("actions", map(str, plan.actions))
    for rule, edges in groupby(plan.edges, key=lambda edge: edge.rule):
        lines.append(f"rule {rule}")
        lines += [f"  {line}" for line in _bundles(list(edges))]
    return "\n".join(lines) + "\n"


def _wrapped(word: str, items: Iterable[str]) -> list[str]:
    lines = [word]
    for item in items:
        if len(lines[-1]) + 1 + len(item) > _WIDTH:
            lines.append(word)
        lines[-1] += f" {item}"
    return lines


def _bundles(edges: list[Edge]) -> Iterator[str]:
    """Neighbouring edges with a common end share a line, in order."""
    befores, afters = [edge.before for edge in edges], [edge.after for edge in edges]
    place = 0
    while place < len(edges):
        first = edges[place]
        into, out = _run_length(afters, place), _run_length(befores, place)
        count = max(into, out)
        bundle = edges[place : place + count]
        if into >= out:
            yield f"{' '.join(str(edge.before) for edge in bundle)} -> {first.after}"
        else:
            yield f"{first.before} -> {' '.join(str(edge.after) for edge in bundle)}"
        place += count


def _run_length(ends: list[Action], place: int) -> int:
    """How many of ``ends`` from ``place`` on are the same."""
    stop = place
    while stop < len(ends) and ends[stop] == ends[place]:
        stop += 1
    return stop - place


def read(text: str) -> StepPlan:
    """The plan that ``write`` wrote; not validated.

    Raises:
        PlanError: naming the line and what was expected.
    """
    reader = _Reader()
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            reader.take(line)
        except PlanError:
            raise
        except ValueError as error:
            raise PlanError(f"cannot read line {number} of the plan, {line.strip()!r}: {error}") from error
    return reader.plan()


class _Reader:
    """Collects lines into a plan."""

    def __init__(self) -> None:
        self.values: dict[str, list[str]] = {}
        self.lanes: list[Lane] = []
        self.kinds: list[Kind] = []
        self.staging: list[Staging] = []
        self.sizes: list[int] = []
        self.actions: list[Action] = []
        self.edges: list[Edge] = []
        self.rule: str | None = None

    def take(self, line: str) -> None:
        if line.startswith("  "):
            self._take_edges(line)
            return
        word, *rest = line.split()
        if word in ("plan", "closes", "stale", "clip", "backwards", "external"):
            self.values[word] = rest
        elif word == "lane":
            name, capacity = _exactly(rest, "NAME CAPACITY")
            self.lanes.append(Lane(name, int(capacity)))
        elif word == "kind":
            name, lane, part = _exactly(rest, "NAME LANE PART")
            self.kinds.append(Kind(name, lane, part))
        elif word == "staging":
            name, slots, filled_by, freed_by = _exactly(rest, "NAME SLOTS FILLED_BY FREED_BY")
            self.staging.append(Staging(name, int(slots), filled_by, freed_by))
        elif word == "bytes":
            self.sizes += map(int, rest)
        elif word == "actions":
            self.actions += map(Action.parse, rest)
        elif word == "rule":
            (self.rule,) = _exactly(rest, "NAME")
        else:
            raise ValueError(f"{word!r} is not a word of a plan")

    def _take_edges(self, line: str) -> None:
        left, arrow, right = line.partition("->")
        if not arrow or self.rule is None:
            raise ValueError("expected 'rule NAME' and below it lines of 'ACTION... -> ACTION...'")
        after = [Action.parse(text) for text in right.split()]
        for before in map(Action.parse, left.split()):
            self.edges += [Edge(before, target, self.rule) for target in after]

    def plan(self) -> StepPlan:
        backwards = self._value("backwards", "any")
        return StepPlan(
            name=self._value("plan", ""),
            actions=tuple(self.actions),
            edges=tuple(self.edges),
            kinds=tuple(self.kinds),
            lanes=tuple(self.lanes),
            closes=self._value("closes", "step"),
            stale=int(self._value("stale", "0")),
            clip=self._value("clip", "no") == "yes",
            backwards=None if backwards == "any" else int(backwards),
            staging=tuple(self.staging),
            bucket_bytes=tuple(self.sizes),
            external=tuple(self.values.get("external", ["fwd", "bwd"])),
        )

    def _value(self, word: str, default: str) -> str:
        (value,) = self.values.get(word) or [default]
        return value


def _exactly(values: list[str], form: str) -> list[str]:
    if len(values) != len(form.split()):
        raise ValueError(f"expected {form}")
    return values


# For people


def describe(plan: StepPlan) -> str:
    """See ``StepPlan.describe``."""
    buckets = len({action.bucket for action in plan.actions if action.bucket is not None})
    kind_of_step = "exact" if plan.exact else f"stale by {plan.stale}"
    closing = "step()" if plan.closes == "step" else "its last backward"
    number = "any number of backwards" if plan.backwards is None else f"{plan.backwards} backward"
    if (plan.backwards or 0) > 1:
        number += "s"
    lines = [f"{plan.name}: {buckets} buckets, {kind_of_step}, {number}, closes with {closing}", "", "lanes"]
    for lane in plan.lanes:
        held = [action for action in plan.actions if plan.lane_of[action.kind] == lane.name]
        if held:
            head = lane.name if lane.capacity == 1 else f"{lane.name} x{lane.capacity}"
            lines.append(f"  {head:<12} {_folded(held)}")
    if plan.staging:
        lines.append("slots")
    lines += [
        f"  {slot.name:<12} {slot.slots}, filled by {slot.filled_by}, freed by {slot.freed_by}" for slot in plan.staging
    ]
    lines.append("waits")
    rules: dict[str, list[Edge]] = {}
    for edge in plan.edges:
        rules.setdefault(edge.rule, []).append(edge)
    width = max(map(len, rules), default=0)
    for rule, edges in rules.items():
        for number_of_line, text in enumerate(_patterns(plan, edges)):
            lines.append(f"  {'' if number_of_line else rule:<{width}}  {text}")
    return "\n".join(lines) + "\n"


def _folded(actions: list[Action]) -> str:
    """Actions in order, the chunks of one bucket as ``adam:3.0-7``."""
    words = []
    for (kind, bucket, chunked), group in groupby(actions, key=lambda a: (a.kind, a.bucket, a.chunk is not None)):
        chunks = [action.chunk for action in group]
        word = str(Action(kind, bucket, chunks[0]))
        words.append(f"{word}-{chunks[-1]}" if chunked and len(chunks) > 1 else word)
    if len(words) > 24:
        words = [*words[:12], f"... {len(words) - 24} more ...", *words[-12:]]
    return " ".join(words)


def _patterns(plan: StepPlan, edges: list[Edge]) -> list[str]:
    """``h2d:B -> fwd:B@+1`` where that holds for every bucket B (and chunk C); the other edges as chains."""
    shapes: dict[tuple[str, ...], list[Edge]] = {}
    for edge in edges:
        shapes.setdefault((_letters(edge.before), _letters(edge.after)), []).append(edge)
    lines, single = [], []
    for (before, after), same in shapes.items():
        if _holds_everywhere(plan, same):
            lines.append(f"{before} -> {after}")
        else:
            single += same
    return lines + _shortened(_chains(single))


def _holds_everywhere(plan: StepPlan, edges: list[Edge]) -> bool:
    """Whether these edges of one shape join every pair of actions of the same bucket and chunk."""
    if not all(_same_place(edge.before, edge.after) for edge in edges):
        return False
    before, after, _ = edges[0]
    sources = [action for action in plan.actions if _letters(action) == _letters(before)]
    targets = [action for action in plan.actions if _letters(action) == _letters(after.template())]
    # Each bucket's chunks hang on one side, so the larger side counts the pairs.
    return len(edges) == max(len(sources), len(targets))


def _same_place(before: Action, after: Action) -> bool:
    buckets = {before.bucket, after.bucket} - {None}
    chunks = {before.chunk, after.chunk} - {None}
    return len(buckets) <= 1 and len(chunks) <= 1


def _chains(edges: list[Edge]) -> list[str]:
    """``a -> b -> c`` where an edge begins at the end of the line before."""
    lines: list[list[str]] = []
    for edge in edges:
        before, after = _unchunked(edge.before), _unchunked(edge.after)
        if lines and lines[-1][-1] == before:
            if before != after or edge.before == edge.after:
                lines[-1].append(after)
        elif [before, after] not in lines:
            lines.append([before, after])
    return [_chain(line) for line in lines]


def _chain(words: list[str]) -> str:
    if len(words) > 12:
        words = [*words[:6], f"({len(words) - 9} more)", *words[-3:]]
    return " -> ".join(words)


def _shortened(lines: list[str]) -> list[str]:
    return lines if len(lines) <= 8 else [*lines[:4], f"({len(lines) - 6} more)", *lines[-2:]]


def _letters(action: Action) -> str:
    text = action.kind
    if action.bucket is not None:
        text += ":B" if action.chunk is None else ":B.C"
    return text + _suffix(action)


def _unchunked(action: Action) -> str:
    return f"{action.kind}:{action.bucket}.C{_suffix(action)}" if action.chunk is not None else str(action)


def _suffix(action: Action) -> str:
    return str(Action("", None, None, action.backward, action.lag))


# Graphviz


def to_dot(plan: StepPlan) -> str:
    """See ``StepPlan.to_dot``."""
    lines = [f'digraph "{plan.name}" {{', "  rankdir=LR;", "  node [shape=box, fontname=monospace];"]
    for lane in plan.lanes:
        held = [action for action in plan.actions if plan.lane_of[action.kind] == lane.name]
        if not held:
            continue
        lines += [f'  subgraph "cluster_{lane.name}" {{', f'    label="{lane.name} x{lane.capacity}";']
        lines += [f'    "{action}";' for action in held]
        lines.append("  }")
    for before, after, rule in plan.edges:
        later = _suffix(after)
        looks = f'label="{rule} {later}", style=dashed, constraint=false' if later else f'label="{rule}"'
        lines.append(f'  "{before}" -> "{after.template()}" [{looks}];')
    lines.append("}")
    return "\n".join(lines) + "\n"
