"""The async face: a running loop awaits a step, and is neither blocked nor replaced."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zoff_async as zoff
from tests.runtime.scenes import (
    PATIENCE_S,
    Noted,
    Outcome,
    Stage,
    assert_same_bits,
    at_stage,
    odd_loss,
    play,
    set_lr,
    within,
)
from zoff_async.device import Faults

STAGE = Stage(policy="overlap", gated=True, bucket_bytes=200, steps=6)


def on_a_loop(make: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    """Run a coroutine on a fresh loop of asyncio in debug mode; one that hangs fails."""
    return within(3 * PATIENCE_S, lambda: asyncio.run(make(), debug=True))


def linear(**config: Any) -> tuple[nn.Linear, zoff.OffloadAdamW]:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    return model, zoff.OffloadAdamW(model.parameters(), lr=0.1, model=model, config=zoff.OffloadConfig(**config))


def loss_of(model: nn.Module, value: float = 1.0) -> Tensor:
    return model(torch.full((1, 4), value)).square().sum()


@pytest.mark.parametrize("policy", ["serial", "overlap", "in_backward", "delayed"])
@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_steps_that_are_awaited_give_the_numbers_of_a_plain_loop(policy, loop):
    import uvloop

    stage = at_stage(STAGE, policy=policy)

    async def train() -> Outcome:
        model = stage.model()
        optimizer = stage.optimizer(model)
        async with zoff.Engine(model, optimizer) as engine:
            for step in range(stage.steps):
                set_lr(optimizer, step)
                loss = await engine.step(lambda step=step: odd_loss(model, step))
                assert loss.shape == ()
                assert not loss.requires_grad
        optimizer.synchronize()
        outcome = Outcome.of(model, optimizer)
        optimizer.close()
        return outcome

    runner = asyncio.Runner(loop_factory=uvloop.new_event_loop if loop == "uvloop" else None, debug=True)
    with runner:
        outcome = within(3 * PATIENCE_S, lambda: runner.run(train()))
    assert_same_bits(outcome, play(stage))


def test_several_closures_accumulate_into_one_step():
    stage = at_stage(STAGE, accumulate=3, steps=4)

    async def train() -> Outcome:
        model = stage.model()
        optimizer = stage.optimizer(model)
        async with zoff.Engine(model, optimizer) as engine:
            for step in range(stage.steps):
                set_lr(optimizer, step)
                losses = await engine.step([lambda call=3 * step + i: odd_loss(model, call) for i in range(3)])
                assert len(losses) == 3
        optimizer.synchronize()
        outcome = Outcome.of(model, optimizer)
        optimizer.close()
        return outcome

    assert_same_bits(on_a_loop(train), play(stage.oracle()))


def test_the_callers_loop_turns_while_a_step_computes_and_updates():
    """Another coroutine makes progress while the closure is blocked and while uploads are held back."""
    device = Noted()
    model, optimizer = linear(device=device)
    blocked, go_on = threading.Event(), threading.Event()

    async def main() -> None:
        loop = asyncio.get_running_loop()
        async with zoff.Engine(model, optimizer) as engine:

            def slow() -> Tensor:
                blocked.set()
                go_on.wait(PATIENCE_S)
                return loss_of(model)

            step = loop.create_task(engine.step(slow))
            await asyncio.to_thread(blocked.wait, PATIENCE_S)
            turns = [await asyncio.sleep(0, turn) for turn in range(10)]
            assert turns == list(range(10))
            assert not step.done()
            device.hold("h2d")
            go_on.set()
            await step  # backward is over; the uploads are not
            assert asyncio.get_running_loop() is loop
            device.let("h2d")

    on_a_loop(main)
    optimizer.close()


def test_the_loss_comes_as_soon_as_backward_is_over():
    """Without gates step() waits for the uploads, and the caller of the engine does not."""
    device = Noted()
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = zoff.OffloadAdamW(model.parameters(), config=zoff.OffloadConfig(device=device))

    async def main() -> None:
        async with zoff.Engine(model, optimizer) as engine:
            device.hold("h2d")
            loss = await engine.step(lambda: loss_of(model))
            assert loss.isfinite()
            device.let("h2d")

    on_a_loop(main)
    optimizer.close()


def late_step(optimizer: zoff.OffloadAdamW, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """From here on the optimizer's step() begins only once the event is set (or its caller has had enough time)."""
    go_on, step = threading.Event(), optimizer.step
    monkeypatch.setattr(optimizer, "step", lambda: (go_on.wait(0.3), step())[1])
    return go_on


@pytest.mark.parametrize("gated", [True, False])
def test_a_learning_rate_set_after_a_step_belongs_to_the_next_one(gated, monkeypatch):
    """``loss = await engine.step(...)`` and then ``scheduler.step()``: the step that was awaited keeps its own rate."""
    outcomes = []
    for late in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        optimizer = zoff.OffloadAdamW(model.parameters(), lr=0.1, model=model if gated else None)
        go_on = late_step(optimizer, monkeypatch) if late else threading.Event()

        async def main(model=model, optimizer=optimizer, go_on=go_on) -> None:
            async with zoff.Engine(model, optimizer) as engine:
                await engine.step(lambda: loss_of(model))
                optimizer.param_groups[0]["lr"] = 0.0
                go_on.set()

        if late:
            on_a_loop(main)
        else:
            loss_of(model).backward()
            optimizer.step()
            optimizer.synchronize()
        monkeypatch.undo()
        outcomes.append(Outcome.of(model, optimizer))
        optimizer.close()

    assert_same_bits(outcomes[1], outcomes[0])


def test_a_weight_read_after_a_step_is_the_new_one(monkeypatch):
    """With gates, reads through the model right after the await see the step that was awaited."""
    model, optimizer = linear()
    go_on = late_step(optimizer, monkeypatch)

    async def main() -> Tensor:
        async with zoff.Engine(model, optimizer) as engine:
            await engine.step(lambda: loss_of(model))
            reading = asyncio.create_task(asyncio.to_thread(lambda: model.weight.detach().clone()))
            await asyncio.wait([reading], timeout=0.2)
            go_on.set()
            return await reading

    read = on_a_loop(main)
    assert torch.equal(read, optimizer.master(model.weight))
    optimizer.close()


def test_the_closure_runs_in_a_thread_of_its_own_with_the_callers_surroundings():
    model, optimizer = linear()
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="none")
    seen: dict[str, Any] = {}

    def closure() -> Tensor:
        seen.update(
            thread=threading.current_thread(),
            variable=variable.get(),
            grad=torch.is_grad_enabled(),
            autocast=torch.is_autocast_enabled("cpu"),
            dtype=(model(torch.ones(1, 4))).dtype,
        )
        return loss_of(model)

    async def main() -> None:
        variable.set("mine")
        async with zoff.Engine(model, optimizer) as engine:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                await engine.step(closure)

    on_a_loop(main)
    assert seen.pop("thread") is not threading.main_thread()
    assert seen == {"variable": "mine", "grad": True, "autocast": True, "dtype": torch.bfloat16}
    optimizer.close()


def test_an_error_of_the_closure_is_raised_and_the_next_step_starts_clean():
    """Gradients of the closures before it are dropped."""
    outcomes = []
    for fails in (False, True):
        model, optimizer = linear()

        def broken() -> Tensor:
            raise ZeroDivisionError("in the closure")

        async def main(model=model, optimizer=optimizer, fails=fails, broken=broken) -> None:
            async with zoff.Engine(model, optimizer) as engine:
                await engine.step(lambda: loss_of(model))
                if fails:
                    with pytest.raises(ZeroDivisionError):
                        await engine.step([lambda: loss_of(model, 9.0), broken])
                await engine.step(lambda: loss_of(model, 2.0))

        on_a_loop(main)
        outcomes.append(Outcome.of(model, optimizer))
        optimizer.close()

    assert_same_bits(outcomes[1], outcomes[0])


def test_cancelling_a_step_waits_for_its_closure_and_drops_the_gradients():
    outcomes = []
    for cancelled in (False, True):
        model, optimizer = linear()
        entered, go_on, left = threading.Event(), threading.Event(), threading.Event()

        def slow(model=model, entered=entered, go_on=go_on, left=left) -> Tensor:
            entered.set()
            go_on.wait(PATIENCE_S)
            left.set()
            return loss_of(model, 9.0)

        async def main(
            model=model, optimizer=optimizer, cancelled=cancelled, slow=slow, entered=entered, go_on=go_on, left=left
        ) -> None:
            async with zoff.Engine(model, optimizer) as engine:
                await engine.step(lambda: loss_of(model))
                if cancelled:
                    task = asyncio.get_running_loop().create_task(engine.step(slow))
                    await asyncio.to_thread(entered.wait, PATIENCE_S)
                    task.cancel()
                    await asyncio.sleep(0)
                    assert not task.done()
                    go_on.set()
                    with pytest.raises(asyncio.CancelledError):
                        await task
                    assert left.is_set()
                await engine.step(lambda: loss_of(model, 2.0))

        on_a_loop(main)
        outcomes.append(Outcome.of(model, optimizer))
        assert optimizer.statistics().steps == 2
        optimizer.close()

    assert_same_bits(outcomes[1], outcomes[0])


def test_a_timeout_is_a_cancellation():
    model, optimizer = linear()
    go_on = threading.Event()

    def slow() -> Tensor:
        go_on.wait(PATIENCE_S)
        return loss_of(model)

    async def main() -> None:
        async with zoff.Engine(model, optimizer) as engine:
            asyncio.get_running_loop().call_later(0.2, go_on.set)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await engine.step(slow)
            await engine.step(lambda: loss_of(model))

    on_a_loop(main)
    assert optimizer.statistics().steps == 1
    optimizer.close()


def test_an_error_of_an_update_is_raised_by_the_next_step_or_on_leaving():
    for leaves in (False, True):
        model, optimizer = linear(device=Noted(faults=Faults(fail_d2h_at=(1,))))

        async def main(model=model, optimizer=optimizer, leaves=leaves) -> None:
            async with zoff.Engine(model, optimizer) as engine:
                await engine.step(lambda: loss_of(model))
                if not leaves:
                    with pytest.raises(zoff.DeviceError):
                        await engine.step(lambda: loss_of(model))
                    await engine.step(lambda: loss_of(model))

        if leaves:
            with pytest.raises(zoff.DeviceError):
                on_a_loop(main)
        else:
            on_a_loop(main)
            assert optimizer.statistics().steps == 1
        within(PATIENCE_S, optimizer.close)


def test_leaving_the_block_finishes_what_is_under_way_and_leaves_the_optimizer_open():
    device = Noted()
    model, optimizer = linear(device=device)

    async def main() -> None:
        async with zoff.Engine(model, optimizer) as engine:
            device.hold("h2d")
            await engine.step(lambda: loss_of(model))
            asyncio.get_running_loop().call_later(0.1, device.let, "h2d")

    on_a_loop(main)
    assert torch.equal(dict.__getitem__(model._parameters, "weight"), optimizer.master(model.weight))
    loss_of(model).backward()
    optimizer.step()
    assert optimizer.statistics().steps == 2
    optimizer.close()


def test_steps_of_two_coroutines_run_one_after_the_other():
    """In the order in which they were awaited; no gradient of one reaches the other."""
    model, optimizer = linear()
    order: list[float] = []

    def closure(value: float) -> Callable[[], Tensor]:
        def run() -> Tensor:
            order.append(value)
            return loss_of(model, value)

        return run

    async def main() -> None:
        async with zoff.Engine(model, optimizer) as engine:
            await asyncio.gather(*(engine.step(closure(float(value))) for value in range(8)))

    on_a_loop(main)
    assert order == [float(value) for value in range(8)]
    assert optimizer.statistics().steps == 8
    optimizer.close()


def test_two_engines_on_one_loop():
    pairs = [linear() for _ in range(2)]

    async def run(model: nn.Module, optimizer: zoff.OffloadAdamW) -> None:
        async with zoff.Engine(model, optimizer) as engine:
            for step in range(5):
                await engine.step(lambda step=step: loss_of(model, 1.0 + step))

    async def main() -> None:
        await asyncio.gather(*(run(model, optimizer) for model, optimizer in pairs))

    on_a_loop(main)
    outcomes = [Outcome.of(model, optimizer) for model, optimizer in pairs]
    assert_same_bits(outcomes[1], outcomes[0])
    for _, optimizer in pairs:
        optimizer.close()


def test_what_is_no_model_optimizer_or_loss_is_refused():
    model, optimizer = linear()
    with pytest.raises(TypeError) as caught:
        zoff.Engine(optimizer, optimizer)
    assert str(caught.value) == "model must be a torch.nn.Module, got OffloadAdamW"
    with pytest.raises(TypeError) as caught:
        zoff.Engine(model, torch.optim.AdamW(model.parameters()))
    assert str(caught.value) == "optimizer must be an OffloadAdamW or OffloadAdam, got AdamW"

    async def main() -> list[str]:
        told = []
        async with zoff.Engine(model, optimizer) as engine:
            for closure in (lambda: 3.0, []):
                with pytest.raises((TypeError, ValueError)) as caught:
                    await engine.step(closure)
                told.append(str(caught.value))
        with pytest.raises(zoff.ClosedError) as closed:
            await engine.step(lambda: loss_of(model))
        told.append(str(closed.value))
        return told

    assert on_a_loop(main) == [
        "the closure must return its loss as a tensor, got float",
        "closure is an empty sequence: give at least one function that returns a loss",
        "the engine is not open: use it inside 'async with Engine(model, optimizer) as engine'",
    ]
    optimizer.close()


def test_an_optimizer_that_is_closed_inside_the_block_ends_it_quietly():
    model, optimizer = linear()

    async def main() -> None:
        async with zoff.Engine(model, optimizer) as engine:
            await engine.step(lambda: loss_of(model))
            await asyncio.to_thread(optimizer.close)

    on_a_loop(main)
