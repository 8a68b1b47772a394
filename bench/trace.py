"""What does tracing cost an action, on and off, and a whole step?

    python bench/trace.py --json

Each with the two sides taken in turn, so that a slow moment of the machine meets both:

    recorder    one span made and kept, alone, in a loop; nanoseconds of the thread, as in the next two
    executor    a step of actions that do nothing, with a recorder and without: the difference an action
    off         the same with tracing off, twice: what two equal runs differ by here
    train step  a whole training step on the CPU, with trace_steps=8, with 0, and with 0 again; CPU time of all threads

One JSON line a case. Needs no GPU. Takes about 30 s.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import platform
import statistics
import time
from collections.abc import Callable

import torch

import zoff_async as zoff
from zoff_async.scheduler import Action, Executor, Layout, LiveStep, Span, StepPlan, overlap
from zoff_async.trace import Pieces, Recorder

BUCKETS, CHUNKS = 40, 16


def recorder_ns(steps: int = 100, actions: int = 1000) -> float:
    recorder, action, clock = Recorder(8), Action("adam", 3, 7), time.perf_counter
    plan = overlap(Layout(chunks=(1,)))
    start_s = time.thread_time()
    for step in range(steps):
        recorder.opened(step, plan)
        for _ in range(actions):
            from_s = clock()
            recorder.note(Span(action, "cpu", step, from_s, clock(), 0))
    return (time.thread_time() - start_s) / (steps * actions) * 1e9


async def _step_s(plan: StepPlan, record: Callable[[Span], None] | None, steps: int) -> float:
    """Seconds of this thread for a step whose actions do nothing, the first one left out."""

    async def nothing(action: Action, step: LiveStep) -> None:
        return None

    executor = Executor(
        dict.fromkeys(plan.lane_of, nothing), record=record, bytes_of=lambda action: 0, ahead={"cpu": 2}
    )
    supervisor = asyncio.create_task(executor.run())
    await asyncio.sleep(0)
    taken = []
    for _ in range(steps + 1):
        start_s = time.thread_time()
        step = executor.open(plan)
        step.close()
        await step.wait_done()
        taken.append(time.thread_time() - start_s)
    await executor.close()
    await supervisor
    return statistics.median(taken[1:])


def executor_ns(repeats: int, *, on: bool) -> tuple[list[float], list[float]]:
    """Nanoseconds an action without and with a recorder (``on=False``: without, twice), in turn."""
    plan = overlap(Layout(chunks=(CHUNKS,) * BUCKETS, workers=2))
    pieces = Pieces((1 << 20,) * BUCKETS, 1 << 16)
    first, second = [], []
    for _ in range(repeats):
        recorder = Recorder(8)
        recorder.opened(0, plan, pieces)
        gc.collect()
        first.append(asyncio.run(_step_s(plan, None, 4)))
        second.append(asyncio.run(_step_s(plan, recorder.note if on else None, 4)))
    count = len(plan.actions)
    return [s / count * 1e9 for s in first], [s / count * 1e9 for s in second]


class _Trainer:
    """The same small model and optimizer, with tracing on or off."""

    def __init__(self, trace_steps: int) -> None:
        torch.manual_seed(0)
        layers = [torch.nn.Linear(256, 256) for _ in range(24)]
        self.model = torch.nn.Sequential(*layers).bfloat16()
        self.optimizer = zoff.OffloadAdamW(
            self.model.parameters(),
            model=self.model,
            config=zoff.OffloadConfig(bucket_bytes=1 << 17, chunk_numel=1 << 14, trace_steps=trace_steps),
        )
        self.x = torch.randn(16, 256).bfloat16()

    def step_cpu_s(self) -> float:
        """CPU seconds of all threads for one step, up to its last upload."""
        start_s = time.process_time()
        self.model(self.x).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.optimizer.synchronize()
        return time.process_time() - start_s


def train_ms(rounds: int) -> tuple[dict[str, list[float]], int]:
    """CPU milliseconds of a whole step of the process, by trainer, in an order that turns; and its actions.

    ``off again`` is a second trainer without tracing: what two equal ones differ by.
    """
    trainers = {"off": _Trainer(0), "on": _Trainer(8), "off again": _Trainer(0)}
    names = list(trainers)
    taken: dict[str, list[float]] = {name: [] for name in names}
    try:
        for number in range(rounds + 3):
            for name in names[number % 3 :] + names[: number % 3]:
                cpu_s = trainers[name].step_cpu_s()
                if number >= 3:
                    taken[name].append(cpu_s * 1e3)
        return taken, len(trainers["on"].optimizer.plan.actions)
    finally:
        for trainer in trainers.values():
            trainer.optimizer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=15, help="pairs of executor runs (default 15)")
    parser.add_argument("--steps", type=int, default=60, help="training steps of each kind (default 60)")
    parser.add_argument("--json", action="store_true", help="print JSON lines only")
    args = parser.parse_args()
    machine = {"python": platform.python_version(), "torch": torch.__version__, "cpu": platform.processor()}
    alone = [recorder_ns() for _ in range(7)]
    _tell(
        {"bench": "trace", "case": "recorder", "span_ns": _middle(alone), "min_ns": round(min(alone)), **machine},
        args.json,
    )
    for case, on in (("executor", True), ("off", False)):
        first, second = executor_ns(args.repeats, on=on)
        differences = [b - a for a, b in zip(first, second, strict=True)]
        figures = {
            "action_ns": _middle(first),
            "action_traced_ns": _middle(second),
            "difference_ns": _middle(differences),
            "difference_of_minima_ns": round(min(second) - min(first)),
        }
        _tell({"bench": "trace", "case": case, **figures, "repeats": args.repeats, **machine}, args.json)
    taken, actions = train_ms(args.steps)
    figures = {f"{name.replace(' ', '_')}_ms": _middle(found, 3) for name, found in taken.items()}
    ratios = {
        f"{name.replace(' ', '_')}_ratio": round(
            statistics.median(b / a for a, b in zip(taken["off"], taken[name], strict=True)), 3
        )
        for name in ("on", "off again")
    }
    _tell({"bench": "trace", "case": "train step", **figures, **ratios, "actions": actions, **machine}, args.json)


def _middle(values: list[float], places: int = 0) -> float:
    return round(statistics.median(values), places or None)


def _tell(line: dict[str, object], as_json: bool) -> None:
    if as_json:
        print(json.dumps(line), flush=True)
        return
    shown = {name: value for name, value in line.items() if name not in ("bench", "python", "torch", "cpu")}
    print("  ".join(f"{name} {value}" for name, value in shown.items()), flush=True)


if __name__ == "__main__":
    main()
