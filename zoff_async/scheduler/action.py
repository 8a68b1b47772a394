"""The nodes and arrows of a step, as plain data with a text form that reads back.

adam:3.7          chunk 7 of bucket 3 is updated
d2h:3#1           bucket 3 is copied to the host in the second backward of the step
fwd:0@+1          the forward of bucket 0 in the next step (only as the target of an edge)
"""

from __future__ import annotations

import re
from typing import NamedTuple

_NUMBER = r"(?:0|[1-9][0-9]*)"
_TEXT = re.compile(
    rf"(?P<kind>[a-z_][a-z0-9_]*)(?::(?P<bucket>{_NUMBER})(?:\.(?P<chunk>{_NUMBER}))?)?"
    r"(?:#(?P<backward>[1-9][0-9]*))?(?:@\+(?P<lag>[1-9][0-9]*))?"
)


class Action(NamedTuple):
    """One node of a step: ``d2h:3`` copies bucket 3's gradients to the host.

    In a plan ``backward`` and ``lag`` are relative and non-zero only in the ``after`` of an edge:
    ``d2h:3#1`` there is bucket 3's copy in the *next* backward, ``fwd:0@+1`` the forward in the next step.
    In a running step ``backward`` is the number of the backward, counted from 0.
    """

    kind: str
    bucket: int | None = None
    chunk: int | None = None
    backward: int = 0
    lag: int = 0

    def __str__(self) -> str:
        text = self.kind
        if self.bucket is not None:
            text += f":{self.bucket}"
            if self.chunk is not None:
                text += f".{self.chunk}"
        if self.backward:
            text += f"#{self.backward}"
        if self.lag:
            text += f"@+{self.lag}"
        return text

    @classmethod
    def parse(cls, text: str) -> Action:
        """Read an action as ``str(action)`` writes it.

        Raises:
            ValueError: if ``text`` is not ``KIND[:BUCKET[.CHUNK]][#BACKWARD][@+LAG]``.
        """
        found = _TEXT.fullmatch(text)
        if found is None:
            raise ValueError(
                f"cannot read action {text!r}: expected KIND[:BUCKET[.CHUNK]][#BACKWARD][@+LAG], "
                "for example 'norm', 'd2h:3', 'adam:3.7#1' or 'fwd:0@+1', with KIND a lower-case word"
            )
        bucket, chunk = found["bucket"], found["chunk"]
        return cls(
            found["kind"],
            None if bucket is None else int(bucket),
            None if chunk is None else int(chunk),
            int(found["backward"] or 0),
            int(found["lag"] or 0),
        )

    def later(self, *, backward: int = 0, lag: int = 0) -> Action:
        """The same action in a later backward or a later step."""
        return Action(self.kind, self.bucket, self.chunk, self.backward + backward, self.lag + lag)

    def template(self) -> Action:
        """The same action without backward and lag: how the plan lists it."""
        if not self.backward and not self.lag:
            return self
        return Action(self.kind, self.bucket, self.chunk)


class Edge(NamedTuple):
    """``after`` starts when ``before`` is done, because of ``rule``."""

    before: Action
    after: Action
    rule: str

    def __str__(self) -> str:
        return f"{self.before} -> {self.after}"


class Lane(NamedTuple):
    """What runs actions; ``capacity`` of them at a time."""

    name: str
    capacity: int = 1


class Kind(NamedTuple):
    """Where the actions of one kind run, and when in a step they come to life.

    ``part`` is ``open`` (when the step opens), ``backward`` (once a backward) or ``close`` (when it closes).
    """

    name: str
    lane: str
    part: str


class Staging(NamedTuple):
    """Pinned slots of one direction: taken with a bucket's first ``filled_by``, free after its last ``freed_by``."""

    name: str
    slots: int
    filled_by: str
    freed_by: str


class Span(NamedTuple):
    """What happened: ``action`` held ``lane`` from ``start_s`` to ``end_s`` in step number ``step``."""

    action: Action
    lane: str
    step: int
    start_s: float
    end_s: float
    bytes: int
