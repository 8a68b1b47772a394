"""What does the executor cost an action, against handing the same jobs to a thread pool by hand?

    python bench/scheduler.py --json

Runs one step of buckets of 16 chunks (d2h -> 16 adam -> h2d, all on one lane), with actions that do nothing:

    bare  no executor: as many coroutines as the lane has room, each awaiting loop.run_in_executor in turn
    pool  the executor, every action a job in the same pool
    pure  the executor, every action an empty coroutine

One JSON line a case with the median of the repeats. Needs no GPU. Takes about half a minute.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import statistics
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from zoff_async.scheduler import Action, Edge, Executor, Kind, Lane, LiveStep, StepPlan

CHUNKS = 16
AHEAD = 2


def plan_of(actions: int, workers: int) -> StepPlan:
    """About ``actions`` actions: buckets of a copy, sixteen chunks and an upload."""
    listed: list[Action] = []
    edges: list[Edge] = []
    for bucket in range(max(1, round(actions / (CHUNKS + 2)))):
        d2h, h2d = Action("d2h", bucket), Action("h2d", bucket)
        chunks = [Action("adam", bucket, chunk) for chunk in range(CHUNKS)]
        listed += [d2h, *chunks, h2d]
        edges += [Edge(d2h, chunk, "gradient") for chunk in chunks]
        edges += [Edge(chunk, h2d, "update") for chunk in chunks]
    kinds = tuple(Kind(name, "cpu", "open") for name in ("d2h", "adam", "h2d"))
    return StepPlan("bench", tuple(listed), tuple(edges), kinds, (Lane("cpu", workers),))


def nothing() -> None:
    pass


async def bare_s(pool: ThreadPoolExecutor, count: int, room: int) -> float:
    loop = asyncio.get_running_loop()
    left = iter(range(count))

    async def feed() -> None:
        for _ in left:
            await loop.run_in_executor(pool, nothing)

    start_s = time.perf_counter()
    await asyncio.gather(*(feed() for _ in range(room)))
    return time.perf_counter() - start_s


async def executor_s(plan: StepPlan, handler: Callable[[Action, LiveStep], Any]) -> float:
    """One step, from its opening to its end; the plan has been turned into integers before."""
    executor = Executor(dict.fromkeys(plan.lane_of, handler), ahead={"cpu": AHEAD})
    supervisor = asyncio.create_task(executor.run())
    await asyncio.sleep(0)
    step = executor.open(plan)
    step.close()
    await step.wait_done()
    start_s = time.perf_counter()
    step = executor.open(plan)
    step.close()
    await step.wait_done()
    took_s = time.perf_counter() - start_s
    await executor.close()
    await supervisor
    return took_s


async def pool_s(plan: StepPlan, pool: ThreadPoolExecutor) -> float:
    loop = asyncio.get_running_loop()
    return await executor_s(plan, lambda action, step: loop.run_in_executor(pool, nothing))


async def pure_s(plan: StepPlan) -> float:
    async def handler(action: Action, step: LiveStep) -> None:
        pass

    return await executor_s(plan, handler)


def runner(loop_name: str) -> Callable[[Coroutine[Any, Any, float]], float]:
    if loop_name == "uvloop":
        import uvloop

        return lambda main: asyncio.Runner(loop_factory=uvloop.new_event_loop).run(main)
    return asyncio.run


def measure(loop_name: str, actions: int, repeats: int, workers: int) -> list[dict[str, object]]:
    """All three cases by turns, so that they share the machine's weather."""
    plan = plan_of(actions, workers)
    count, run = len(plan.actions), runner(loop_name)
    samples: dict[str, list[float]] = {"bare": [], "pool": [], "pure": []}
    with ThreadPoolExecutor(workers) as pool:
        for _ in range(repeats):
            samples["bare"].append(run(bare_s(pool, count, workers + AHEAD)))
            samples["pool"].append(run(pool_s(plan, pool)))
            samples["pure"].append(run(pure_s(plan)))
    return [
        {
            "bench": "scheduler",
            "loop": loop_name,
            "case": case,
            "actions": actions,
            "us_per_action": round(1e6 * statistics.median(found) / count, 2),
            "min_us_per_action": round(1e6 * min(found) / count, 2),
            "repeats": repeats,
            "workers": workers,
            "python": platform.python_version(),
        }
        for case, found in samples.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="JSON lines instead of a table")
    parser.add_argument("--actions", type=int, nargs="+", default=[100, 1_000, 10_000])
    parser.add_argument("--loops", nargs="+", default=["asyncio", "uvloop"], choices=["asyncio", "uvloop"])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    for loop_name in args.loops:
        for actions in args.actions:
            # Small steps are short: repeat them more often.
            repeats = args.repeats * (1 if actions > 2_000 else 4)
            for line in measure(loop_name, actions, repeats, args.workers):
                if args.json:
                    print(json.dumps(line))
                else:
                    print("{loop:8} {case:5} {actions:6} actions {us_per_action:8.2f} us an action".format(**line))


if __name__ == "__main__":
    main()
