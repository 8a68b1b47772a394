"""How fast is one AdamW update on the host, against what this memory can do?

    python bench/adam.py --numel 64e6 --json
    python bench/adam.py --read lines.jsonl --plot docs/kernels.png

Every case does the same work: bf16 gradients in, fp32 master and moments updated, bf16 weights out.

    floor          reads g, reads and writes p, m, v and writes w, with one multiplication each: 28 B an element
    numba          the kernels of zoff_async in its pool, in chunks
    numexpr
    torch
    numba-second   the new state goes to a second buffer
    naive          numexpr.evaluate on whole arrays with numexpr's own threads, the textbook's expressions
    naive-lines    the same with the expressions of the numexpr kernel
    for-loop       torch.optim.AdamW(foreach=False), foreach, fused; deepspeed: DeepSpeedCPUAdam, where it is installed;
    ...            each with the casts that make it the same work, in tensors of 4 Mi elements

Cases take turns, so that a slow moment of the machine hits all of them. One JSON line a case; ratios are to the floor
with as many workers. Needs numba for the floor, 3 GB of memory and no GPU. Takes about two minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import queue
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from zoff_async.cpu_ops import ADAMW, Pool, available_cpus, default_workers, make_kernel

BYTES_PER_ELEMENT = 28  # gradient 2, master and moments in and out 24, weights 2
FLOOR_CHUNK = 1 << 20
TENSOR_NUMEL = 1 << 22
HYPER: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
MACHINE = {"torch": torch.__version__, "python": platform.python_version(), "cpus": len(available_cpus())}
SCALARS = ADAMW.scalars(step=10, **HYPER)

FLOOR = """
def floor(g, p, m, v, w, one):
    for i in range(p.size):
        p[i] = p[i] * one
        m[i] = m[i] * one
        v[i] = v[i] * one
        w[i] = g[i]
"""


class Arrays(NamedTuple):
    """One model's host state, flat."""

    master: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    grad: Tensor  # bf16
    out: Tensor  # bf16
    wide: Tensor  # fp32, for those who need a widened gradient
    second: tuple[Tensor, ...]


@dataclass
class Case:
    """One line of the result."""

    impl: str
    workers: int
    chunk_numel: int | None
    run: Callable[[], None]
    samples_s: list[float] = field(default_factory=list)


def arrays_of(numel: int) -> Arrays:
    master = torch.randn(numel)
    grad = torch.randn(numel).bfloat16()
    return Arrays(
        master,
        grad.float().mul_(0.1),
        grad.float().square_().mul_(0.5).add_(1e-6),
        grad,
        torch.zeros(numel, dtype=torch.bfloat16),
        torch.zeros(numel),
        tuple(torch.zeros(numel) for _ in range(3)),
    )


def through(pool: Pool, jobs: list[Callable[[], None]]) -> Callable[[], None]:
    """Hand ``jobs`` to the pool and wait for all."""

    def run() -> None:
        ended: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        for job in jobs:
            pool.submit(job, lambda error, start_s, end_s: ended.put(error))
        for _ in jobs:
            if (error := ended.get()) is not None:
                raise error

    return run


def ranges(numel: int, chunk_numel: int) -> Iterator[slice]:
    for start in range(0, numel, chunk_numel):
        yield slice(start, min(start + chunk_numel, numel))


def floor_jobs(a: Arrays, chunk_numel: int) -> list[Callable[[], None]]:
    from zoff_async.cpu_ops import numba_text

    loop = numba_text.compiled(
        "floor", FLOOR, "void(uint16[::1], float32[::1], float32[::1], float32[::1], uint16[::1], float32)"
    )
    jobs = []
    for part in ranges(a.master.numel(), chunk_numel):
        cut = [numba_text.bits(t[part]) for t in (a.grad, a.master, a.exp_avg, a.exp_avg_sq, a.out)]
        jobs.append(lambda cut=cut: loop(*cut, np.float32(1)))
    return jobs


def kernel_jobs(name: str, a: Arrays, chunk_numel: int, *, second: bool = False) -> list[Callable[[], None]]:
    kernel = make_kernel(name, ADAMW)
    jobs = []
    for part in ranges(a.master.numel(), chunk_numel):
        outs = [t[part] for t in a.second]
        update = kernel.bind(
            a.master[part],
            (a.exp_avg[part], a.exp_avg_sq[part]),
            a.grad[part],
            a.out[part],
            master_out=outs[0] if second else None,
            state_out=outs[1:] if second else None,
        )
        jobs.append(lambda update=update: update.run(SCALARS))
    return jobs


def naive(a: Arrays, threads: int, *, textbook: bool) -> Callable[[], None]:
    """What one writes with numexpr.evaluate: whole arrays, numexpr's own threads."""
    import numexpr

    names: dict[str, Any] = {"m": a.exp_avg.numpy(), "v": a.exp_avg_sq.numpy(), "p": a.master.numpy()}
    names["g"] = a.wide.numpy()
    program = ADAMW.programs[SCALARS.program]
    names.update(zip(program.scalars, SCALARS.values, strict=True))
    hyper = SCALARS.hyper
    beta1, beta2 = hyper.betas
    numbers = {"b1": beta1, "b2": beta2, "a1": 1 - beta1, "a2": 1 - beta2, "lr": hyper.lr, "eps": hyper.eps}
    numbers |= {"bc1": 1 - beta1**hyper.step, "bc2": 1 - beta2**hyper.step, "decay": 1 - hyper.lr * hyper.weight_decay}
    names.update((name, np.float32(value)) for name, value in numbers.items())
    lines = [(line.target, line.expression) for line in program.lines if line.unit != "f"]
    if textbook:
        lines = [
            ("m", "b1*m + a1*g"),
            ("v", "b2*v + a2*g*g"),
            ("p", "p*decay - lr*(m/bc1)/(sqrt(v/bc2) + eps)"),
        ]

    def run() -> None:
        numexpr.set_num_threads(threads)
        a.wide.copy_(a.grad)
        for target, text in lines:
            numexpr.evaluate(text, local_dict=names, global_dict={}, out=names[target])
        a.out.copy_(a.master)

    return run


def optimizer(a: Arrays, threads: int, make: Callable[[list[Tensor]], torch.optim.Optimizer]) -> Callable[[], None]:
    """A torch optimizer over views of the arrays, with its state in them too."""
    parts = list(ranges(a.master.numel(), TENSOR_NUMEL))
    parameters = [torch.nn.Parameter(a.master[part]) for part in parts]
    made = make(parameters)
    for parameter, part in zip(parameters, parts, strict=True):
        parameter.grad = a.wide[part]
        step: Any = 9 if type(made).__name__.startswith("DeepSpeed") else torch.tensor(9.0)
        made.state[parameter].update(step=step, exp_avg=a.exp_avg[part], exp_avg_sq=a.exp_avg_sq[part])

    def run() -> None:
        torch.set_num_threads(threads)
        a.wide.copy_(a.grad)
        made.step()
        a.out.copy_(a.master)

    return run


def deepspeed_adam(parameters: list[Tensor]) -> torch.optim.Optimizer:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    return DeepSpeedCPUAdam(parameters, adamw_mode=True, **HYPER)  # type: ignore[no-any-return]


def baselines(a: Arrays, threads: int) -> Iterator[Case]:
    if find_spec("numexpr") is not None:
        yield Case("naive", threads, None, naive(a, threads, textbook=True))
        yield Case("naive-lines", threads, None, naive(a, threads, textbook=False))
    ways = {"for-loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}
    for name, way in ways.items():
        made = optimizer(a, threads, lambda ps, way=way: torch.optim.AdamW(ps, **HYPER, **way))
        yield Case(name, threads, None, made)
    if find_spec("deepspeed") is not None and threads == torch.get_num_threads():
        # Its own OpenMP threads are as many as the machine allows, whatever torch is told.
        yield Case("deepspeed", threads, None, optimizer(a, threads, deepspeed_adam))


def cases(a: Arrays, pools: list[Pool], chunks: list[int], only: set[str]) -> Iterator[Case]:
    for pool in pools:
        workers = pool.statistics().workers
        if find_spec("numba") is not None:
            yield Case("floor", workers, FLOOR_CHUNK, through(pool, floor_jobs(a, FLOOR_CHUNK)))
            jobs = kernel_jobs("numba", a, FLOOR_CHUNK, second=True)
            yield Case("numba-second", workers, FLOOR_CHUNK, through(pool, jobs))
        for name in ("numba", "numexpr", "torch"):
            if name == "torch" or find_spec(name) is not None:
                for chunk_numel in chunks if not only or name in only else []:
                    yield Case(name, workers, chunk_numel, through(pool, kernel_jobs(name, a, chunk_numel)))
        if not only or only & {"naive", "naive-lines", "for-loop", "foreach", "fused", "deepspeed"}:
            yield from baselines(a, workers)


def measure(found: list[Case], repeats: int) -> None:
    for turn in range(repeats + 1):
        for case in found:
            start_s = time.perf_counter()
            case.run()
            if turn:  # the first turn warms up
                case.samples_s.append(time.perf_counter() - start_s)


def line_of(case: Case, floor_s: float | None, numel: int) -> dict[str, Any]:
    median_s = statistics.median(case.samples_s)
    return {
        "bench": "adam",
        "impl": case.impl,
        "workers": case.workers,
        "chunk_numel": case.chunk_numel,
        "numel": numel,
        "median_ms": round(median_s * 1e3, 3),
        "min_ms": round(min(case.samples_s) * 1e3, 3),
        "ns_per_param": round(median_s / numel * 1e9, 4),
        "gb_per_s": round(BYTES_PER_ELEMENT * numel / median_s / 1e9, 2),
        "ratio_to_floor": None if floor_s is None else round(median_s / floor_s, 3),
    }


def lines_of(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    numel = int(arguments.numel)
    arrays = arrays_of(numel)
    pools = [Pool(workers, available_cpus()) for workers in sorted({1, arguments.workers})]
    only = set(filter(None, arguments.only.split(",")))
    chunks = [int(float(text)) for text in arguments.chunks.split(",")]
    found = [c for c in cases(arrays, pools, chunks, only) if not only or c.impl in only | {"floor"}]
    measure(found, arguments.repeats)
    for pool in pools:
        pool.close()
    floors = {case.workers: statistics.median(case.samples_s) for case in found if case.impl == "floor"}
    if not floors:
        print("no floor: numba is not installed", file=sys.stderr)
    return [{**line_of(case, floors.get(case.workers), numel), **MACHINE} for case in found]


def plot(lines: list[dict[str, Any]], file: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    colours = {"numba": "tab:blue", "numexpr": "tab:orange", "torch": "tab:green"}
    for workers in sorted({line["workers"] for line in lines}):
        style = "--" if workers == 1 else "-"
        for impl, colour in colours.items():
            points = [
                (x["chunk_numel"], x["ns_per_param"]) for x in lines if (x["impl"], x["workers"]) == (impl, workers)
            ]
            axes.plot(*zip(*points, strict=True), style, marker="o", color=colour, label=f"{impl}, {workers} workers")
        for line in lines:
            if (line["impl"], line["workers"]) == ("floor", workers):
                axes.axhline(line["ns_per_param"], linestyle=style, color="grey", label=f"floor, {workers} workers")
    axes.set(xscale="log", yscale="log", xlabel="chunk_numel", ylabel="ns a parameter (lower is better)")
    axes.set_title("AdamW on the host: bf16 gradient in, bf16 weights out")
    axes.grid(visible=True, which="both", alpha=0.3)
    axes.legend(fontsize="small", ncols=2)
    figure.savefig(file, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numel", type=float, default=64e6)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--chunks", default="16384,65536,262144,1048576,4194304", help="chunk sizes, in elements")
    parser.add_argument("--workers", type=int, default=default_workers(), help="besides 1")
    parser.add_argument("--only", default="", help="implementations to time, separated by commas (and the floor)")
    parser.add_argument("--json", action="store_true", help="one JSON line a case instead of a table")
    parser.add_argument("--read", metavar="FILE", help="take the JSON lines of an earlier run instead of measuring")
    parser.add_argument("--plot", metavar="FILE", help="draw ns/param over chunk size")
    arguments = parser.parse_args()

    if arguments.read:
        with open(arguments.read) as saved:
            lines = [json.loads(line) for line in saved]
    else:
        lines = lines_of(arguments)
    for line in lines:
        if arguments.json:
            print(json.dumps(line))
        else:
            print("  ".join(f"{key}={line[key]}" for key in line if key not in ("bench", "numel", *MACHINE)))
    if arguments.plot:
        plot(lines, arguments.plot)


if __name__ == "__main__":
    main()
