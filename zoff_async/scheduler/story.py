"""Who waits for what: the lines a deadlock error, or a person, wants to read."""

from __future__ import annotations

from collections.abc import Iterable

from zoff_async.scheduler.live import LiveStep


def waiting(live: Iterable[LiveStep]) -> list[str]:
    """A line for each action of the live steps that has come to life and is not done, in priority order."""
    steps = list(live)
    lines = []
    for older, step in zip([None, *steps], steps, strict=False):
        if not step.closed:
            lines.append(f"step {step.index} waits for its close()")
        blockers = _blockers(step, older)
        lines += [
            _line(step, i, wave, blockers.get((i, wave), []))
            for wave in range(step.waves)
            for i in range(step.program.size)
            if _alive(step, i, wave) and not step.done[wave][i]
        ]
    return lines


def _line(step: LiveStep, i: int, wave: int, blockers: list[str]) -> str:
    text = f"{step.instance(i, wave)}{step.suffix}"
    if blockers:
        more = f" and {len(blockers) - 4} more" if len(blockers) > 4 else ""
        return f"{text} waits for {', '.join(blockers[:4])}{more}"
    if step.program.external[i]:
        return f"{text} waits for its complete() from outside"
    return f"{text} is running, or ready on lane {step.program.lanes[i]}"


def _alive(step: LiveStep, i: int, wave: int) -> bool:
    part = step.program.part[i]
    return part == "backward" or (wave == 0 and (part == "open" or step.closed))


def _blockers(step: LiveStep, older: LiveStep | None) -> dict[tuple[int, int], list[str]]:
    """The undone predecessors of every instance of ``step``."""
    program = step.program
    found: dict[tuple[int, int], list[str]] = {}

    def add(target: tuple[int, int], holder: LiveStep, i: int, wave: int) -> None:
        if not holder.done[wave][i]:
            found.setdefault(target, []).append(f"{holder.instance(i, wave)}{holder.suffix}")

    if older is not None and older.following is step:
        for wave in range(older.waves):
            for i, targets in enumerate(older.lagged):
                if wave and not older.program.waving[i]:
                    continue
                for j in targets:
                    add((j, 0), older, i, wave)
    for wave in range(step.waves):
        for i in range(program.size):
            if wave and not program.waving[i]:
                continue
            for j in program.direct[i]:
                for r in _targets(step, i, j, wave):
                    add((j, r), step, i, wave)
            if wave + 1 < step.waves:
                for j in program.following[i]:
                    add((j, wave + 1), step, i, wave)
            if step.waves - 1 == program.last_wave:
                for j in program.last[i]:
                    add((j, program.last_wave), step, i, wave)
    return found


def _targets(step: LiveStep, i: int, j: int, wave: int) -> Iterable[int]:
    waving = step.program.waving
    if not waving[j]:
        return (0,)
    return (wave,) if waving[i] else range(step.waves)
