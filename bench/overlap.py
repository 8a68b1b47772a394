"""How much of the copies and of Adam does each policy hide, and how close does it come to what it could reach?

    python bench/overlap.py --device emulated:v100-32g-dgx2 --json

Trains a model whose layers take modelled time (the thread sleeps) on an emulated device: real autograd hooks, real
buckets, real copies on lanes of a modelled bandwidth, real Adam on the host. First the host's own time for a step is
measured (Adam, and taking the gradients in); then compute and links are set against it:

    balanced    forward 1/3, backward 2/3, D2H 1, host 1, H2D 1
    host-bound  forward 1/6, backward 1/3, D2H 1/2, host 1, H2D 1/2

and every policy is run twice in a process of its own: a calibration run, from whose action durations the step time is
predicted by simulation, and the run that is measured. One JSON line a case, medians over the steps:

    step_ms            measured period of a step
    ideal_ms           the same plan simulated with the measured run's own action durations and no overhead
    resource_bound_ms  the busiest lane's work in a step over its capacity
    exposed_ms         step_ms less the compute in it
    predicted_ms       the plan simulated with the calibration run's durations; prediction_error against step_ms

Every figure is emulated: it tells of the scheduler on this host, not of a GPU. Needs no GPU, an idle machine and, at
the default size, 5 GB; takes about 8 minutes. A hand-over between threads costs the same whatever is handed over, so
smaller models (``--numel 64e6``) show it larger.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import multiprocessing
import os
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import zoff_async as zoff
from zoff_async.device import EmulatedDevice, Hardware
from zoff_async.device.emulated import read_name
from zoff_async.scheduler import Action, MeasuredCost, Span, simulate

#: Share of the host's time that forward, backward and each link take.
BALANCES = {"balanced": (1 / 3, 2 / 3, 1.0), "host-bound": (1 / 6, 1 / 3, 1 / 2)}
POLICIES = ("serial", "overlap", "in_backward", "delayed")
WARMUP_STEPS = 3


@dataclass(frozen=True)
class Case:
    """One run: what the model, the machine and the optimizer are."""

    policy: str
    buckets: int
    numel: int  # of one layer, which is one bucket
    chunks: int  # of a bucket
    workers: int
    kernel: str
    steps: int
    fwd_s: float  # of one layer
    bwd_s: float
    machine: Hardware
    latency_s: float

    @property
    def nbytes(self) -> int:
        """Of all weights, and of all gradients."""
        return self.buckets * self.numel * torch.bfloat16.itemsize


class _Timed(torch.autograd.Function):
    """Takes modelled time in both directions and hands out a gradient that lies ready."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: TimedLayer) -> Tensor:
        ctx.layer = layer
        layer.take("fwd", layer.case.fwd_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        layer = ctx.layer
        layer.take("bwd", layer.case.bwd_s)
        return grad, layer.gradient.detach(), None


class TimedLayer(nn.Module):
    """One weight of ``numel`` bf16 elements. What its compute took is noted as spans."""

    def __init__(self, case: Case, device: EmulatedDevice, index: int, spans: list[Span]) -> None:
        super().__init__()
        self.case, self._device, self._spans = case, device, spans
        self.bucket = case.buckets - 1 - index
        self.weight = nn.Parameter(torch.zeros(case.numel, dtype=torch.bfloat16))
        self.gradient = torch.full((case.numel,), 1e-3, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        # The read of self.weight waits for its upload; only what follows is compute.
        out: Tensor = _Timed.apply(x, self.weight, self)
        return out

    def take(self, kind: str, seconds: float) -> None:
        start_s = time.perf_counter()
        with self._device.compute(seconds):
            pass
        self._spans.append(Span(Action(kind, self.bucket), "compute", 0, start_s, time.perf_counter(), 0))


@dataclass(frozen=True)
class Run:
    """What one run measured: its period, its plan's simulation with its own durations, and the host's work."""

    step_s: float
    simulated_s: float
    resource_bound_s: float
    compute_s: float
    host_s: float
    slower_than_modelled: int


def run(case: Case) -> Run:
    """Train ``case.steps`` steps and say what they took."""
    device = EmulatedDevice(case.machine, latency_s=case.latency_s)
    compute: list[Span] = []
    model = nn.Sequential(*(TimedLayer(case, device, i, compute) for i in range(case.buckets)))
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
    ends_s = []
    with zoff.OffloadAdamW(model.parameters(), lr=1e-4, model=model, policy=case.policy, config=config) as optimizer:
        for _ in range(WARMUP_STEPS + case.steps):
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            ends_s.append(time.perf_counter())
        optimizer.synchronize()
        spans, plan = optimizer.timeline.spans, optimizer.plan
    layers = 2 * case.buckets
    kept = compute[WARMUP_STEPS * layers :]
    simulation = simulate(plan, MeasuredCost([*(s for s in spans if s.lane != "compute"), *kept]))
    periods_s = [later - sooner for sooner, later in itertools.pairwise(ends_s[WARMUP_STEPS:])]
    return Run(
        step_s=statistics.median(periods_s),
        simulated_s=simulation.period_s,
        resource_bound_s=simulation.resource_bound_s,
        compute_s=sum(s.end_s - s.start_s for s in kept) / case.steps,
        host_s=sum(s.end_s - s.start_s for s in spans if s.lane == "cpu") / len({s.step for s in spans}) / case.workers,
        slower_than_modelled=device.statistics().slower_than_modelled,
    )


def in_process(case: Case) -> Run:
    """The same in a process of its own: no run leaves threads, memory or a warm cache to the next."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(run, case).result()


def balanced(case: Case, host_s: float, balance: str) -> Case:
    """The case with compute and links set against the host's time."""
    fwd, bwd, link = BALANCES[balance]
    rate = case.nbytes / (host_s * link)
    return dataclasses.replace(
        case,
        fwd_s=host_s * fwd / case.buckets,
        bwd_s=host_s * bwd / case.buckets,
        machine=dataclasses.replace(case.machine, d2h_bytes_per_s=rate, h2d_bytes_per_s=rate),
    )


def measure(case: Case, balance: str) -> dict[str, object]:
    """The line of one case."""
    calibration, measured = in_process(case), in_process(case)
    return {
        "bench": "overlap",
        "figures": "emulated",
        "policy": case.policy,
        "balance": balance,
        "buckets": case.buckets,
        "step_ms": round(measured.step_s * 1e3, 2),
        "ideal_ms": round(measured.simulated_s * 1e3, 2),
        "resource_bound_ms": round(measured.resource_bound_s * 1e3, 2),
        "ratio_to_ideal": round(measured.step_s / measured.simulated_s, 3),
        "ratio_to_bound": round(measured.step_s / measured.resource_bound_s, 3),
        "exposed_ms": round((measured.step_s - measured.compute_s) * 1e3, 2),
        "predicted_ms": round(calibration.simulated_s * 1e3, 2),
        "prediction_error": round(calibration.simulated_s / measured.step_s - 1, 3),
        "compute_ms": round(measured.compute_s * 1e3, 2),
        "host_ms": round(measured.host_s * 1e3, 2),
        "link_GBps": round(case.machine.d2h_bytes_per_s / 1e9, 3),
        "steps": case.steps,
        "parameters": case.buckets * case.numel,
        "chunks": case.chunks,
        "workers": case.workers,
        "kernel": case.kernel,
        "slower_than_modelled": measured.slower_than_modelled,
        "device": f"emulated:{case.machine.name}",
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="emulated:v100-32g-dgx2", help="an emulated machine")
    parser.add_argument("--buckets", type=int, nargs="+", default=[40, 16])
    parser.add_argument("--balance", nargs="+", default=list(BALANCES), choices=list(BALANCES))
    parser.add_argument("--policy", nargs="+", default=list(POLICIES), choices=list(POLICIES))
    parser.add_argument("--numel", type=float, default=256e6, help="parameters of the whole model")
    parser.add_argument("--chunks", type=int, default=1, help="Adam jobs of a bucket")
    parser.add_argument("--workers", type=int, default=1, help="threads of the Adam pool")
    parser.add_argument("--kernel", default="auto")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--json", action="store_true", help="JSON lines instead of a table")
    return parser.parse_args(arguments)


def print_line(line: dict[str, object], as_json: bool) -> None:
    if as_json:
        print(json.dumps(line), flush=True)
        return
    shown = ("policy", "balance", "buckets", "step_ms", "ideal_ms", "resource_bound_ms", "ratio_to_ideal")
    more = ("ratio_to_bound", "exposed_ms", "predicted_ms", "prediction_error")
    print("  ".join(f"{name} {line[name]}" for name in (*shown, *more)), flush=True)


def main(arguments: Sequence[str]) -> None:
    options = parse(arguments)
    machine, scale, latency_s = read_name(options.device)
    for buckets in options.buckets:
        plain = Case(
            policy="overlap",
            buckets=buckets,
            numel=int(options.numel) // buckets,
            chunks=options.chunks,
            workers=options.workers,
            kernel=options.kernel,
            steps=options.steps,
            fwd_s=1e-3,
            bwd_s=2e-3,
            machine=machine.scaled(scale),
            latency_s=latency_s,
        )
        host_s = in_process(plain).host_s
        # Once more at the balance itself: the host is slower while copies run beside it.
        host_s = in_process(balanced(plain, host_s, "balanced")).host_s
        for balance in options.balance:
            case = balanced(plain, host_s, balance)
            for policy in options.policy:
                print_line(measure(dataclasses.replace(case, policy=policy), balance), options.json)


if __name__ == "__main__":
    main(sys.argv[1:])
