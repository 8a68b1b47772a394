"""The progress of a run: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

#: Drawing takes the interpreter from the training threads: not more often than this.
REFRESH_S = 0.25
#: Without a terminal: about so many lines a run.
PLAIN_LINES = 10

#: Share of the last step that each lane was busy.
Lanes = Mapping[str, float]
NO_LANES: Lanes = MappingProxyType({})


class Watch(Protocol):
    """Is told how a run goes."""

    def wants_step(self, step: int) -> bool:
        """Would ``show`` do anything now? What is costly to find out is found out only then."""

    def show(
        self, step: int, loss: float, tokens_per_s: float, hidden_share: float | None, lanes: Lanes = NO_LANES
    ) -> None:
        """``step`` steps are done."""


def describe(loss: float, tokens_per_s: float, hidden_share: float | None, lanes: Lanes = NO_LANES) -> str:
    hidden = "" if hidden_share is None else f"  host work hidden {hidden_share:4.0%}"
    busy = "".join(f" {lane} {share:.0%}" for lane, share in lanes.items() if share)
    return f"loss {loss:6.4f}  {tokens_per_s:>9,.0f} tokens/s{hidden}" + (f"  busy:{busy}" if busy else "")


class Silent:
    """Shows nothing."""

    def wants_step(self, step: int) -> bool:
        return False

    def show(
        self, step: int, loss: float, tokens_per_s: float, hidden_share: float | None, lanes: Lanes = NO_LANES
    ) -> None:
        pass


class PlainLines:
    """About ten lines a run, the first step and the last one among them."""

    def __init__(self, title: str, first: int, last: int) -> None:
        self._title = title
        self._first = first
        self._last = last
        self._every = max(1, last // PLAIN_LINES)

    def wants_step(self, step: int) -> bool:
        return step % self._every == 0 or step in (self._first + 1, self._last)

    def show(
        self, step: int, loss: float, tokens_per_s: float, hidden_share: float | None, lanes: Lanes = NO_LANES
    ) -> None:
        figures = describe(loss, tokens_per_s, hidden_share, lanes)
        print(f"{self._title}  step {step:>6}/{self._last}  {figures}", file=sys.stderr, flush=True)


class Bar:
    """A rich progress bar, drawn from the training thread only."""

    def __init__(self, progress: Progress, task: TaskID, last: int) -> None:
        self._progress = progress
        self._task = task
        self._last = last
        self._next_s = 0.0

    def wants_step(self, step: int) -> bool:
        return step == self._last or time.monotonic() >= self._next_s

    def show(
        self, step: int, loss: float, tokens_per_s: float, hidden_share: float | None, lanes: Lanes = NO_LANES
    ) -> None:
        figures = describe(loss, tokens_per_s, hidden_share, lanes)
        self._progress.update(self._task, completed=step, figures=figures)
        self._progress.refresh()
        self._next_s = time.monotonic() + REFRESH_S


@contextmanager
def watching(title: str, *, first: int, last: int, quiet: bool) -> Iterator[Watch]:
    """What suits standard error: a bar on a terminal, else lines, or nothing if ``quiet``."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield Silent() if quiet else PlainLines(title, first, last)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TextColumn("{task.fields[figures]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, auto_refresh=False) as progress:
        task = progress.add_task(title, total=last, completed=first, figures="")
        yield Bar(progress, task, last)
