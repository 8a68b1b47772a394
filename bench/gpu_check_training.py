"""The sections of gpu_check.py that train: exactness, races, memory and the demo. Each yields its findings."""

from __future__ import annotations

import importlib.util
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from gpu_check_device import MIB, Finding, Place
from torch import Tensor, nn

import zoff_async as zoff
from zoff_async.device import EmulatedDevice
from zoff_async.train.model import SIZES, VOCABULARY, build_model, parameter_groups

EXACT_POLICIES = ("overlap", "in_backward")


def _config(place: Place, **fields: Any) -> zoff.OffloadConfig:
    return zoff.OffloadConfig(device="auto" if place.on_gpu else EmulatedDevice("h200-141g"), **fields)


def _mlp(place: Place, width: int, layers: int, dtype: torch.dtype) -> nn.Module:
    """The same weights every time it is called."""
    generator = torch.Generator().manual_seed(1)
    parts: list[nn.Module] = []
    for _ in range(layers):
        linear = nn.Linear(width, width)
        with torch.no_grad():
            for parameter in linear.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * width**-0.5)
        parts += [linear, nn.GELU(), nn.LayerNorm(width)]
    return nn.Sequential(*parts).to(dtype).to(place.torch_device)


def _batch(place: Place, step: int, rows: int, width: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(1000 + step)
    return torch.randn(rows, width, generator=generator).to(dtype).to(place.torch_device)


def _loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).float().square().mean()


def _train(place: Place, policy: str, *, steps: int, shape: tuple[int, int], dtype: torch.dtype, **fields: Any) -> Any:
    """Weights (on the host), masters and seconds a step after ``steps`` steps."""
    width, layers = shape
    model = _mlp(place, width, layers, dtype)
    max_norm = fields.pop("max_norm", None)
    with zoff.OffloadAdamW(
        model.parameters(), lr=1e-3, model=model, policy=policy, max_norm=max_norm, config=_config(place, **fields)
    ) as optimizer:
        optimizer_start_s = time.perf_counter()
        for step in range(steps):
            _loss(model, _batch(place, step, 16, width, dtype)).backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.synchronize()
        seconds = (time.perf_counter() - optimizer_start_s) / steps
        masters = [optimizer.master(parameter) for parameter in model.parameters()]
        weights = [parameter.detach().cpu() for parameter in model.parameters()]
    return weights, masters, seconds


def _differences(one: Any, other: Any) -> int:
    return sum(not torch.equal(a, b) for kind in (0, 1) for a, b in zip(one[kind], other[kind], strict=True))


def exactness(place: Place) -> Iterator[Finding]:
    """Every policy, dtype and shape of buckets against serial; both kernels where both are there."""
    shape = (64, 4) if place.small else (512, 6)
    steps = 6 if place.small else 20
    for dtype in (torch.bfloat16, torch.float32, torch.float16):
        serial = _train(place, "serial", steps=steps, shape=shape, dtype=dtype)
        broken = []
        for policy in EXACT_POLICIES:
            for bucket_bytes in (1, 300_000, None):
                run = _train(place, policy, steps=steps, shape=shape, dtype=dtype, bucket_bytes=bucket_bytes)
                if _differences(run, serial):
                    broken.append([policy, bucket_bytes])
        yield {"ok": not broken, "what": "policies equal serial", "dtype": str(dtype), "steps": steps, "broken": broken}
    clipped = [
        _train(place, policy, steps=steps, shape=shape, dtype=torch.bfloat16, max_norm=1e-3)
        for policy in ("serial", "overlap")
    ]
    yield {"ok": _differences(*clipped) == 0, "what": "clipped overlap equals clipped serial"}
    yield _kernels_agree(place, shape, steps)
    yield _delayed_is_exact(place, shape, steps)


def _kernels_agree(place: Place, shape: tuple[int, int], steps: int) -> Finding:
    here = [name for name in ("numba", "numexpr") if importlib.util.find_spec(name)]
    if len(here) < 2:
        return {"skipped": f"only {here[0] if here else 'neither kernel'} is installed", "what": "kernels agree"}
    runs = [_train(place, "overlap", steps=steps, shape=shape, dtype=torch.bfloat16, kernel=name) for name in here]
    return {"ok": _differences(*runs) == 0, "what": "kernels agree"}


def _delayed_is_exact(place: Place, shape: tuple[int, int], steps: int) -> Finding:
    """The gradient of step t is applied after the backward of step t + 1, by hand and by the policy."""
    dtype, (width, layers) = torch.bfloat16, shape
    delayed = _train(place, "delayed", steps=steps, shape=shape, dtype=dtype)
    model, source = _mlp(place, width, layers, dtype), _mlp(place, width, layers, dtype)
    with zoff.OffloadAdamW(
        model.parameters(), lr=1e-3, model=model, policy="serial", config=_config(place)
    ) as optimizer:
        pending: list[Tensor] = []
        for step in range(steps + 1):
            with torch.no_grad():
                for mine, theirs in zip(source.parameters(), model.parameters(), strict=True):
                    mine.copy_(theirs)
            gradients: list[Tensor] = []
            if step < steps:
                loss = _loss(source, _batch(place, step, 16, width, dtype))
                gradients = list(torch.autograd.grad(loss, list(source.parameters())))
            for parameter, gradient in zip(model.parameters(), pending, strict=False):
                parameter.grad = gradient
            if pending:
                optimizer.step()
                optimizer.zero_grad()
            pending = gradients
        by_hand = (
            [parameter.detach().cpu() for parameter in model.parameters()],
            [optimizer.master(parameter) for parameter in model.parameters()],
        )
    return {"ok": _differences(delayed, by_hand) == 0, "what": "delayed equals the hand-written delayed loop"}


def races(place: Place) -> Iterator[Finding]:
    """Copies as long as possible, compute as short as possible: whoever does not wait is caught."""
    shape = (128, 4) if place.small else (4096, 6)  # 32 MiB a weight
    steps = 10 if place.small else 200
    serial = _train(place, "serial", steps=steps, shape=shape, dtype=torch.bfloat16)
    yield {"ok": True, "what": "serial", "step_ms": round(serial[2] * 1e3, 2), "steps": steps}
    for policy in EXACT_POLICIES:
        run = _train(place, policy, steps=steps, shape=shape, dtype=torch.bfloat16, slots=2)
        wrong = _differences(run, serial)
        yield {
            "ok": wrong == 0,
            "what": policy,
            "steps": steps,
            "tensors_that_differ": wrong,
            "step_ms": round(run[2] * 1e3, 2),
            "faster_than_serial": round(serial[2] / run[2], 2),
        }


def memory(place: Place) -> Iterator[Finding]:
    """Device bytes of training beyond the weights and what forward keeps, against what is promised."""
    width, layers, dtype = (128, 4, torch.bfloat16) if place.small else (4096, 16, torch.bfloat16)
    bucket_bytes = 32 * MIB
    for policy in EXACT_POLICIES:
        model = _mlp(place, width, layers, dtype)
        weight_bytes = sum(parameter.nbytes for parameter in model.parameters())
        largest_bytes = max(max(parameter.nbytes for parameter in model.parameters()), bucket_bytes)
        if place.on_gpu:
            torch.cuda.reset_peak_memory_stats()
        reserved = []
        with zoff.OffloadAdamW(
            model.parameters(), model=model, policy=policy, config=_config(place, bucket_bytes=bucket_bytes)
        ) as optimizer:
            base_bytes = torch.cuda.memory_allocated() if place.on_gpu else weight_bytes
            for step in range(30):
                _loss(model, _batch(place, step, 16, width, dtype)).backward()
                optimizer.step()
                optimizer.zero_grad()
                if place.on_gpu:
                    reserved.append(torch.cuda.memory_reserved())
            held = optimizer.statistics()
        peak_bytes = torch.cuda.max_memory_allocated() if place.on_gpu else weight_bytes
        # The bound, the bucket that backward is still filling, staging, and activations with cuBLAS's workspace.
        allowed_bytes = 3 * largest_bytes + held.device_bytes + 64 * MIB
        grown = reserved[-1] - reserved[4] if reserved else 0
        yield {
            "ok": peak_bytes - base_bytes <= allowed_bytes and grown == 0,
            "policy": policy,
            "weight_bytes": weight_bytes,
            "beyond_weights_bytes": peak_bytes - base_bytes,
            "allowed_bytes": allowed_bytes,
            "plain_gradients_would_take_bytes": weight_bytes,
            "reserved_growth_after_step_5_bytes": grown,
            "pinned_bytes": held.pinned_bytes,
            "staging_bytes": held.device_bytes,
            "slot_waits": held.slot_waits,
        }
        del model


def demo(place: Place, left_s: Callable[[], float]) -> Iterator[Finding]:
    """A GPT by name, trained for a few steps under each policy, with where the time goes.

    2.5 B parameters and 16 x 1024 tokens: some 60 GB with all activations kept.
    """
    size = SIZES["tiny" if place.small else "3b"]
    batch, steps = (2, 4) if place.small else (16, 6)
    needed_s = 0.0
    for policy in ("overlap", "in_backward", "delayed"):
        if left_s() < 1.3 * needed_s:
            yield {"skipped": f"needs about {needed_s:.0f} s, {left_s():.0f} s are left", "policy": policy}
            continue
        start_s = time.perf_counter()
        model = build_model(size.config(), seed=0, dtype=torch.bfloat16, device=place.torch_device)
        numel = sum(parameter.numel() for parameter in model.parameters())
        with zoff.OffloadAdamW(
            parameter_groups(model, 0.1),
            lr=size.lr,
            model=model,
            policy=policy,
            config=_config(place, trace_steps=steps),
        ) as optimizer:
            ends_s, losses = [], []
            for step in range(steps):
                tokens = _tokens(place, step, batch, size.context)
                loss = model.loss(tokens[:, :-1], tokens[:, 1:])
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.detach())
                ends_s.append(time.perf_counter())
            optimizer.synchronize()
            timeline, held = optimizer.timeline, optimizer.statistics()
        periods_s = [later - sooner for sooner, later in itertools.pairwise(ends_s[1:])]
        step_s = statistics.median(periods_s)
        shown = [loss.item() for loss in losses]
        yield {
            "ok": all(value == value for value in shown),
            "policy": policy,
            "parameters": numel,
            "set_up_s": round(ends_s[0] - start_s, 1),
            "step_ms": round(step_s * 1e3, 1),
            "tokens_per_s": round(batch * size.context / step_s),
            "losses": [round(value, 4) for value in shown],
            "busy_ms_a_step": {lane: round(s * 1e3 / steps, 1) for lane, s in timeline.busy_s().items()},
            "gpu_peak_bytes": torch.cuda.max_memory_allocated() if place.on_gpu else None,
            "host_bytes": held.host_bytes,
            "pinned_bytes": held.pinned_bytes,
            "kernel": held.kernel,
            "workers": held.workers,
        }
        yield {"policy": policy, "timeline_of_one_step": _one_step(timeline)}
        del model, loss, tokens
        needed_s = time.perf_counter() - start_s


def _tokens(place: Place, step: int, batch: int, context: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, VOCABULARY, (batch, context + 1), generator=generator).to(place.torch_device)


def _one_step(timeline: zoff.Timeline) -> list[list[object]]:
    """[action, lane, start ms, end ms] of the last whole step."""
    steps = sorted({span.step for span in timeline.spans})
    spans = sorted(timeline.step(steps[-2] if len(steps) > 1 else steps[-1]).spans, key=lambda span: span.start_s)
    zero_s = spans[0].start_s
    return [
        [str(span.action), span.lane, round((span.start_s - zero_s) * 1e3, 3), round((span.end_s - zero_s) * 1e3, 3)]
        for span in spans
    ]
