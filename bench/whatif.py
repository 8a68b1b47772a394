"""How good are the report's what-ifs? Each is checked against a run in which the thing has really been changed.

    python bench/whatif.py --json

Trains the model of bench/overlap.py (layers that take modelled time, real buckets, real Adam, copies on lanes of a
modelled bandwidth) once, takes ``timeline.report()`` and its levers, then makes each change that can be made here
(links, compute, workers, policy, bucket sizes) and trains again. One JSON line a lever:

    base_ms        the step that the report was made of
    predicted_ms   what the report says the lever would make of it
    measured_ms    what it came to
    error          predicted over measured, less one
    saved, saved_measured   the same as shares of the base

``nothing`` is the base once more: two equal runs differ by as much. ``slower_than_modelled`` counts copies for which
this host was slower than the link that it plays: then the change has not really been made. Every figure is emulated: it
tells of the scheduler on this host, not of a GPU. Needs no GPU. Takes about 2 minutes.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import os
import platform
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import torch
from overlap import BALANCES, WARMUP_STEPS, Case, TimedLayer, balanced, in_process
from torch import nn

import zoff_async as zoff
from zoff_async.device import EmulatedDevice
from zoff_async.device.emulated import read_name
from zoff_async.trace import Timeline

#: Links slow enough that this host's memory can play one twice as fast, too.
BALANCES["copy-bound"] = (1 / 2, 1.0, 3.0)
#: The host's own work is most of the step.
BALANCES["adam-bound"] = (1 / 8, 1 / 4, 1 / 4)

#: What makes a lever come true; a lever that is not here (a faster Adam) cannot be had on the same machine.
CHANGES: dict[str, Callable[[Case], Case]] = {
    "nothing": lambda case: case,
    "D2H twice as fast": lambda case: _faster(case, "d2h_bytes_per_s"),
    "H2D twice as fast": lambda case: _faster(case, "h2d_bytes_per_s"),
    "compute twice as fast": lambda case: dataclasses.replace(case, fwd_s=case.fwd_s / 2, bwd_s=case.bwd_s / 2),
    "twice the workers": lambda case: dataclasses.replace(case, workers=2 * case.workers),
    "`in_backward`": lambda case: dataclasses.replace(case, policy="in_backward"),
    "`delayed`": lambda case: dataclasses.replace(case, policy="delayed"),
    "buckets twice as large": lambda case: _regrouped(case, case.buckets // 2),
    "buckets half as large": lambda case: _regrouped(case, case.buckets * 2),
}


def _faster(case: Case, link: str) -> Case:
    machine = dataclasses.replace(case.machine, **{link: 2 * getattr(case.machine, link)})
    return dataclasses.replace(case, machine=machine)


def _regrouped(case: Case, buckets: int) -> Case:
    """As many parameters, chunks as large, and as much compute, in that many buckets."""
    share = case.buckets / buckets
    return dataclasses.replace(
        case,
        buckets=buckets,
        numel=round(case.numel * share),
        chunks=max(1, round(case.chunks * share)),
        fwd_s=case.fwd_s * share,
        bwd_s=case.bwd_s * share,
    )


@dataclass(frozen=True)
class Traced:
    """A run: its step, what its report predicts by lever, and how many copies were slower than the link played."""

    step_s: float
    predicted_s: dict[str, float]
    verdict: str
    slower_than_modelled: int


def traced(case: Case) -> Traced:
    """Train, and read the report."""
    timeline, slower = _train(case)
    report = timeline.report()
    return Traced(report.step_s, {lever.name: lever.step_s for lever in report.levers}, report.verdict, slower)


def _train(case: Case) -> tuple[Timeline, int]:
    device = EmulatedDevice(case.machine, latency_s=case.latency_s)
    model = nn.Sequential(*(TimedLayer(case, device, i, []) for i in range(case.buckets)))
    config = zoff.OffloadConfig(
        device=device,
        bucket_bytes=1,  # every layer its own bucket
        chunk_numel=-(-case.numel // case.chunks),
        workers=case.workers,
        kernel=case.kernel,
        trace_steps=case.steps,
        notice_edits=False,  # would read all weights with the host's cores, where a device would use its own
        backwards_per_step=1 if case.policy in ("in_backward", "delayed") else None,
    )
    x = torch.zeros(1, requires_grad=True)
    with zoff.OffloadAdamW(model.parameters(), lr=1e-4, model=model, policy=case.policy, config=config) as optimizer:
        for _ in range(WARMUP_STEPS + case.steps):
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.synchronize()
        return optimizer.timeline, device.statistics().slower_than_modelled


def _apart(case: Case) -> Traced:
    """In a process of its own: no run leaves threads, memory or a warm cache to the next."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(traced, case).result()


def compare(case: Case, balance: str, names: Sequence[str], repeats: int) -> Iterator[dict[str, object]]:
    """A line a lever: the base is run before each change, so that both meet the same moment of the machine."""
    for name in names:
        change = CHANGES[name]
        pairs = [(_apart(case), _apart(change(case))) for _ in range(repeats)]
        base_s = statistics.median(base.step_s for base, _ in pairs)
        predicted_s = statistics.median(base.predicted_s.get(name, base.step_s) for base, _ in pairs)
        measured_s = statistics.median(changed.step_s for _, changed in pairs)
        yield {
            "bench": "whatif",
            "figures": "emulated",
            "balance": balance,
            "lever": name,
            "base_ms": round(base_s * 1e3, 1),
            "predicted_ms": round(predicted_s * 1e3, 1),
            "measured_ms": round(measured_s * 1e3, 1),
            "error": round(predicted_s / measured_s - 1, 3),
            "saved": round(1 - predicted_s / base_s, 3),
            "saved_measured": round(1 - measured_s / base_s, 3),
            "buckets": case.buckets,
            "chunks": case.chunks,
            "workers": case.workers,
            "parameters": case.buckets * case.numel,
            "repeats": repeats,
            "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "slower_than_modelled": max(changed.slower_than_modelled for _, changed in pairs),
            "verdict": pairs[-1][0].verdict,
        }


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="emulated:v100-32g-dgx2", help="an emulated machine")
    parser.add_argument("--balance", nargs="+", default=["copy-bound", "adam-bound"], choices=list(BALANCES))
    parser.add_argument("--numel", type=float, default=64e6, help="parameters of the whole model")
    parser.add_argument("--buckets", type=int, default=16)
    parser.add_argument("--chunks", type=int, default=4, help="Adam jobs of a bucket")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--lever", nargs="+", default=list(CHANGES), choices=list(CHANGES))
    parser.add_argument("--repeats", type=int, default=1, help="pairs of runs a lever")
    parser.add_argument("--kernel", default="auto")
    parser.add_argument("--json", action="store_true", help="JSON lines instead of a table")
    options = parser.parse_args(arguments)
    machine, scale, latency_s = read_name(options.device)
    plain = Case(
        policy="overlap",
        buckets=options.buckets,
        numel=int(options.numel) // options.buckets,
        chunks=options.chunks,
        workers=1,
        kernel=options.kernel,
        steps=options.steps,
        fwd_s=1e-3,
        bwd_s=2e-3,
        machine=machine.scaled(scale),
        latency_s=latency_s,
    )
    host_s = in_process(plain).host_s
    for balance in options.balance:
        for line in compare(balanced(plain, host_s, balance), balance, options.lever, options.repeats):
            _print(line, options.json)


def _print(line: dict[str, object], as_json: bool) -> None:
    if as_json:
        print(json.dumps(line), flush=True)
        return
    names = ("balance", "lever", "base_ms", "predicted_ms", "measured_ms", "error", "saved", "saved_measured")
    print("  ".join(f"{name} {line[name]}" for name in names), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
