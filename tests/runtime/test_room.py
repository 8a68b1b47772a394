"""Gradients on the device are bounded: a hook waits while copies are under way, and never when nothing could end its
wait.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn

import zoff_async as zoff
from tests.runtime.scenes import PATIENCE_S, Beside, Noted, closing, wait_until, within
from zoff_async.device import Faults
from zoff_async.scheduler import Executor

BUCKETS = 6


def build(policy: str = "overlap", *, slots: int = 4, faults: Faults | None = None) -> tuple[nn.ModuleList, Any, Noted]:
    """Six layers of one size, a bucket each; bucket i is layer i from the end."""
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(4, 4, bias=False) for _ in range(BUCKETS)])
    device = Noted() if faults is None else Noted(faults=faults)
    config = zoff.OffloadConfig(bucket_bytes=1, slots=slots, device=device, workers=1, event_loop="asyncio")
    return model, zoff.OffloadAdamW(model.parameters(), policy=policy, config=config), device


def backward(model: nn.ModuleList, *layers: int) -> None:
    """Through some layers, the last of them first in backward."""
    x = torch.ones(1, 4)
    for layer in layers:
        x = torch.tanh(model[layer](x))
    x.sum().backward()


def test_a_backward_waits_while_copies_are_held_and_goes_on_with_them():
    """Twice the largest bucket may be under way; the third gradient waits, is counted, and loses nothing."""
    model, optimizer, device = build()
    with closing(optimizer):
        backward(model, *range(BUCKETS))
        optimizer.step()
        optimizer.zero_grad()
        before = optimizer.statistics().slot_waits
        device.hold("d2h")
        running = Beside(lambda: backward(model, *range(BUCKETS)))
        wait_until(lambda: optimizer._runtime.intake.slot_waits > before)
        assert not running.over.is_set()
        delivered = [p.grad is not None for p in model.parameters()]
        assert sum(delivered) == 3
        device.let("d2h")
        running.result()
        within(PATIENCE_S, optimizer.step)

        assert optimizer.statistics().steps == 2
        assert optimizer.statistics().slot_waits > before


@pytest.mark.parametrize("slots", [1, 2])
def test_a_backward_does_not_wait_for_copies_that_wait_for_its_end(slots):
    """Bucket 0 is not used, so with one slot no copy can begin before backward has ended."""
    model, optimizer, _ = build(slots=slots)
    with closing(optimizer):
        for _ in range(3):
            within(PATIENCE_S, lambda: backward(model, *range(BUCKETS - 1)))
            within(PATIENCE_S, optimizer.step)
            optimizer.zero_grad()

        assert optimizer.statistics().steps == 3


def test_an_empty_copy_that_ends_late_does_not_leave_a_backward_waiting(monkeypatch):
    """The lane was busy with a bucket that has no gradient when the last one arrived, and is idle afterwards."""
    go_on, held = threading.Event(), threading.Event()
    init = Executor.__init__

    def with_a_slow_empty_copy(executor: Any, handlers: Any, **options: Any) -> None:
        async def d2h(action: Any, step: Any) -> Any:
            if str(action) == "d2h:5" and not held.is_set():
                held.set()
                await executor._loop.run_in_executor(None, go_on.wait, PATIENCE_S)
            return await handlers["d2h"](action, step)

        init(executor, {**handlers, "d2h": d2h}, **options)

    monkeypatch.setattr(Executor, "__init__", with_a_slow_empty_copy)
    model, optimizer, _ = build(slots=1)
    with closing(optimizer):
        within(PATIENCE_S, lambda: backward(model, 5))  # bucket 0; the others arrive with nothing
        assert held.wait(PATIENCE_S)
        running = Beside(lambda: backward(model, 0, 1, 2, 3, 4))
        wait_until(lambda: running.over.is_set() or optimizer._runtime.intake.slot_waits > 0)
        go_on.set()
        running.result(5.0)
        within(PATIENCE_S, optimizer.step)


def test_a_failed_copy_lets_the_waiting_backward_go():
    model, optimizer, device = build(faults=Faults(fail_d2h_at=(1,)))
    with closing(optimizer):
        device.hold("d2h")
        running = Beside(lambda: backward(model, *range(BUCKETS)))
        wait_until(lambda: optimizer.statistics().slot_waits > 0 if optimizer._runtime.started else False)
        device.let("d2h")
        with pytest.raises(zoff.DeviceError):
            running.result()
            within(PATIENCE_S, optimizer.step)


def test_closing_lets_a_waiting_backward_go():
    """close() in another thread while a backward waits for room: both return."""
    model, optimizer, device = build()
    device.hold("d2h")
    running = Beside(lambda: backward(model, *range(BUCKETS)))
    wait_until(lambda: optimizer._runtime.started and optimizer._runtime.intake.slot_waits > 0)
    closing_it = Beside(optimizer.close)
    closing_it.over.wait(0.2)
    device.let("d2h")
    try:
        running.result(5.0)
    except zoff.ZoffError as error:
        assert isinstance(error, zoff.ClosedError)  # noqa: PT017
    closing_it.result(5.0)
