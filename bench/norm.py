"""What does the gradient norm with its finite check cost a core, and what when the gradient is stored on the way?

    python bench/norm.py --numel 32e6 --json

    numba, numpy    landing as zoff_async does it: squares in fp64, in a fixed order; non-finite squares are the check
    torch           torch.linalg.vector_norm in fp32 (of bf16 in blocks widened first), then isfinite of the norm
    torch-as-is     torch.linalg.vector_norm of the gradient as it is: bf16 in, bf16 out

``stored`` is what the same call does besides: nothing, a copy, a widening copy, or an addition in fp32. Every case runs
in one pinned thread of the pool. One JSON line a case. Needs no GPU. Takes about 20 s.
"""

from __future__ import annotations

import argparse
import json
import platform
import queue
import statistics
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from zoff_async.cpu_ops import Pool, available_cpus, make_landing

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
BLOCK_NUMEL = 1 << 16


class Case(NamedTuple):
    """One line of the result."""

    impl: str
    dtype: str
    stored: str
    parameter_numel: int
    moved_bytes: int  # an element, read and written
    run: Callable[[], Any]


def torch_norm(gradient: Tensor) -> Callable[[], bool]:
    scratch = torch.empty(BLOCK_NUMEL)
    blocks = gradient.split(BLOCK_NUMEL)

    def run() -> bool:
        norms = [torch.linalg.vector_norm(scratch[: len(block)].copy_(block)) for block in blocks]
        return bool(torch.linalg.vector_norm(torch.stack(norms)).isfinite())

    return run


def cases(numel: int) -> Iterator[Case]:
    names = {"numba": "numba"} if find_spec("numba") is not None else {}
    for dtype, kind in DTYPES.items():
        gradient = torch.randn(numel).to(kind)
        size = gradient.element_size()
        held: dict[str, tuple[Tensor | None, bool, int]] = {
            "nothing": (None, False, 0),
            "copy": (torch.zeros(numel, dtype=kind), False, size),
            "fp32": (torch.zeros(numel), False, 4),
            "added": (torch.zeros(numel), True, 8),
        }
        if dtype == "fp32":
            del held["fp32"]
        for impl, kernel in {**names, "numpy": "numexpr"}.items():
            for stored, (target, add, extra) in held.items():
                for each in (numel, 4096, 64) if (dtype, stored) == ("bf16", "nothing") else (numel,):
                    bounds = np.append(np.arange(0, numel, each), numel).astype(np.int64)
                    squares = np.empty(len(bounds) - 1)
                    landing = make_landing(kernel)

                    def run(landing=landing, g=gradient, t=target, b=bounds, s=squares, add=add) -> bool:
                        landing.land(g, t, b, s, add=add)
                        return bool(np.isfinite(s.sum()))

                    yield Case(impl, dtype, stored, each, size + extra, run)
        yield Case("torch", dtype, "nothing", numel, size, torch_norm(gradient))
        as_is = lambda g=gradient: bool(torch.linalg.vector_norm(g).isfinite())  # noqa: E731
        yield Case("torch-as-is", dtype, "nothing", numel, size, as_is)


def seconds_of(pool: Pool, run: Callable[[], Any]) -> float:
    """In the pool's thread, without the hand-over."""
    ended: queue.SimpleQueue[tuple[BaseException | None, float]] = queue.SimpleQueue()
    pool.submit(lambda: run() and None, lambda error, start_s, end_s: ended.put((error, end_s - start_s)))
    error, taken_s = ended.get()
    if error is not None:
        raise error
    return taken_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numel", type=float, default=32e6)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", action="store_true", help="one JSON line a case instead of a table")
    arguments = parser.parse_args()

    numel = int(arguments.numel)
    pool = Pool(1, available_cpus(), "norm")
    for case in cases(numel):
        samples_s = [seconds_of(pool, case.run) for _ in range(arguments.repeats + 1)][1:]
        median_s = statistics.median(samples_s)
        line = {
            "bench": "norm",
            "impl": case.impl,
            "dtype": case.dtype,
            "stored": case.stored,
            "parameter_numel": case.parameter_numel,
            "numel": numel,
            "median_ms": round(median_s * 1e3, 3),
            "min_ms": round(min(samples_s) * 1e3, 3),
            "ns_per_param_core": round(median_s / numel * 1e9, 4),
            "gb_per_s": round(case.moved_bytes * numel / median_s / 1e9, 2),
        }
        if arguments.json:
            print(json.dumps({**line, "torch": torch.__version__, "python": platform.python_version()}))
        else:
            print("  ".join(f"{key}={value}" for key, value in line.items() if key not in ("bench", "numel")))
    pool.close()


if __name__ == "__main__":
    main()
