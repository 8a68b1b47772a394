"""The loops that users have: a script, a coroutine, a thread, two optimizers, an interrupt, a long run, a forgotten
close.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import sys
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import zoff_async as zoff
from tests.runtime.scenes import (
    LATE,
    PATIENCE_S,
    Beside,
    Noted,
    Outcome,
    Stage,
    assert_same_bits,
    at_stage,
    closing,
    odd_loss,
    play,
    train,
    wait_until,
    within,
)

SHORT = Stage(steps=6, policy="overlap", bucket_bytes=300, gated=True)


def our_threads() -> list[str]:
    names = [thread.name for thread in threading.enumerate()]
    return sorted(name for name in names if name.startswith(("zoff", "adam")))


@pytest.mark.parametrize("event_loop", ["asyncio", "uvloop"])
@pytest.mark.parametrize("policy", ["overlap", "in_backward", "delayed"])
def test_a_plain_loop_inside_a_running_event_loop(policy, event_loop):
    """A synchronous training loop in a coroutine, as in a notebook: the running loop is not needed and not replaced."""
    stage = at_stage(SHORT, policy=policy, event_loop=event_loop)

    async def notebook() -> tuple[Outcome, bool]:
        mine = asyncio.get_running_loop()
        outcome = play(stage)
        await asyncio.sleep(0)
        return outcome, asyncio.get_running_loop() is mine

    outcome, kept = within(PATIENCE_S, lambda: asyncio.run(notebook(), debug=True))
    assert kept
    assert_same_bits(outcome, play(at_stage(stage, event_loop="asyncio", gated=False)))


def test_a_loop_in_a_thread_with_hooks_made_in_another():
    """The optimizer is made here, trained in a thread, and read here."""
    model = SHORT.model()
    optimizer = SHORT.optimizer(model)
    with closing(optimizer):
        Beside(lambda: train(model, optimizer, range(6), SHORT)).result()

        assert_same_bits(Outcome.of(model, optimizer), play(SHORT.oracle()))


def test_two_optimizers_at_once_in_two_threads():
    """Each has its own loop, pool and device, and gives what it gives alone."""
    stages = [SHORT, at_stage(SHORT, policy="in_backward", event_loop="uvloop", workers=2, kernel="numba")]
    runs = [Beside(lambda stage=stage: play(stage)) for stage in stages]
    outcomes = [run.result() for run in runs]

    for stage, outcome in zip(stages, outcomes, strict=True):
        assert_same_bits(outcome, play(stage.oracle()))


def test_two_optimizers_of_one_model_with_policies_of_their_own():
    """Norms and matrices apart, under in_backward and overlap: the numbers of serial optimizers of the same parts."""
    outcomes = []
    for policies in (("serial", "serial"), ("in_backward", "overlap")):
        model = SHORT.model()
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        parts = [[item for item in named if item[1].dim() != 2], [item for item in named if item[1].dim() == 2]]
        optimizers = [
            zoff.OffloadAdamW(part, lr=1e-2, policy=policy, config=zoff.OffloadConfig(bucket_bytes=200))
            for part, policy in zip(parts, policies, strict=True)
        ]
        with closing(*optimizers):
            for step in range(6):
                odd_loss(model, step).backward()
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
            outcomes.append(
                {
                    name: optimizer.master(p)
                    for part, optimizer in zip(parts, optimizers, strict=True)
                    for name, p in part
                }
            )

    assert all(torch.equal(outcomes[0][name], outcomes[1][name]) for name in outcomes[0])


def test_an_interrupt_while_step_waits_loses_nothing():
    """Ctrl-C in step(): KeyboardInterrupt at once, the update goes on, and synchronize() waits for it."""
    stage = at_stage(SHORT, gated=False, steps=4, bucket_bytes=1 << 30)
    model = stage.model()
    device = Noted()
    optimizer = stage.optimizer(model, device=device)
    main = threading.main_thread().ident
    assert main is not None
    with closing(optimizer):
        train(model, optimizer, range(2), stage)
        for group in optimizer.param_groups:
            group["lr"] = group["first_lr"] / 1.2
        odd_loss(model, 2).backward()
        device.hold("h2d")
        before = device.enqueued_h2d

        def interrupt() -> None:
            wait_until(lambda: device.enqueued_h2d > before)
            threading.Event().wait(0.1)  # step() is waiting for the upload by now, or will be
            signal.pthread_kill(main, signal.SIGINT)

        interrupting = Beside(interrupt)
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
        interrupting.result()
        device.let("h2d")
        optimizer.zero_grad()
        optimizer.synchronize()
        train(model, optimizer, range(3, 4), stage)

        assert_same_bits(Outcome.of(model, optimizer), play(stage.oracle()))


def test_the_interpreter_is_left_as_it_was():
    """Threads, switch interval, torch's threads, numexpr's threads and the affinity: as before, with two optimizers."""
    import numexpr

    def found() -> Any:
        return (
            sys.getswitchinterval(),
            torch.get_num_threads(),
            numexpr.get_num_threads(),
            os.sched_getaffinity(0),
            our_threads(),
            torch.is_grad_enabled(),
        )

    before = found()
    models = [SHORT.model(), SHORT.model()]
    optimizers = [SHORT.optimizer(model) for model in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        train(model, optimizer, range(2), SHORT)
    assert sys.getswitchinterval() == pytest.approx(5e-4)
    assert torch.get_num_threads() == before[1]
    assert os.sched_getaffinity(0) == before[3]
    optimizers[0].close()
    assert sys.getswitchinterval() == pytest.approx(5e-4)
    optimizers[0].close()
    optimizers[1].close()

    assert found() == before


def test_an_interpreter_whose_interval_is_to_stay_keeps_it():
    before_s = sys.getswitchinterval()
    model = SHORT.model()
    optimizer = SHORT.optimizer(model, switch_interval_s=None)
    train(model, optimizer, range(1), SHORT)
    assert sys.getswitchinterval() == before_s
    optimizer.close()
    assert sys.getswitchinterval() == before_s


@pytest.mark.parametrize("policy", ["serial", "overlap", "in_backward", "delayed"])
def test_a_forgotten_optimizer_goes_with_its_last_reference(policy):
    """No close(): masters, threads, hooks and gates are gone once nobody holds the optimizer."""
    before = our_threads()
    stage = at_stage(SHORT, policy=policy, faults=LATE)
    model = stage.model()
    optimizer = stage.optimizer(model)
    train(model, optimizer, range(3), stage)
    runtime = weakref.ref(optimizer._runtime)
    masters = [weakref.ref(state.master) for state in optimizer._runtime.states]
    gone = weakref.ref(optimizer)

    del optimizer
    within(PATIENCE_S, gc.collect)
    wait_until(lambda: our_threads() == before)
    gc.collect()

    assert gone() is None
    assert runtime() is None
    assert [master for master in masters if master() is not None] == []
    assert [type(m._parameters) for m in model.modules()] == [dict] * len(list(model.modules()))
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


def test_a_closed_optimizer_frees_its_state():
    """Held or not: after close() a model that is dropped is gone, and so is what the optimizer held of it."""
    model = SHORT.model()
    optimizer = SHORT.optimizer(model)
    train(model, optimizer, range(2), SHORT)
    optimizer.close()
    weight = weakref.ref(model.first.weight)
    del model, optimizer
    gc.collect()

    assert weight() is None


@pytest.mark.parametrize(("policy", "steps"), [("overlap", 500), ("in_backward", 100), ("delayed", 100)])
def test_many_steps_grow_nothing(policy, steps):
    """Tasks, threads, objects and blocks of memory at the end are those of a fifth of the way."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    optimizer = zoff.OffloadAdamW(
        model.parameters(),
        policy=policy,
        model=model,
        config=zoff.OffloadConfig(bucket_bytes=40, workers=1, trace_steps=2),
    )
    x = torch.ones(1, 3)

    def go(count: int) -> tuple[int, int, int, int]:
        for _ in range(count):
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.synchronize()
        gc.collect()
        loop = optimizer._runtime.portal.loop
        return len(asyncio.all_tasks(loop)), threading.active_count(), len(gc.get_objects()), sys.getallocatedblocks()

    with closing(optimizer):
        tasks, threads, objects, blocks = go(steps // 5)
        later = go(steps - steps // 5)
        assert later[0] <= tasks + 1
        assert later[1] == threads
        assert later[2] <= objects + 100
        assert later[3] <= blocks + 1000


def test_closing_twice_and_leaving_a_with_block():
    model = SHORT.model()
    with SHORT.optimizer(model) as optimizer:
        train(model, optimizer, range(2), SHORT)
    optimizer.close()

    for call in (
        optimizer.step,
        optimizer.zero_grad,
        optimizer.state_dict,
        optimizer.synchronize,
        optimizer.statistics,
    ):
        with pytest.raises(zoff.ClosedError) as caught:
            call()
        assert str(caught.value) == "this optimizer has been closed: make a new one"


def test_an_optimizer_that_never_stepped_can_be_closed():
    """No thread was ever started for it."""
    before = our_threads()
    optimizer = SHORT.optimizer(SHORT.model())
    assert our_threads() == before
    optimizer.zero_grad()
    assert our_threads() == before
    optimizer.close()
    assert our_threads() == before


def test_backward_in_several_threads_with_one_optimizer():
    """Hogwild: two threads' backwards through different parts, one step; as if they had come one after the other."""
    outcomes = []
    for threaded in (False, True):
        torch.manual_seed(0)
        model = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        optimizer = zoff.OffloadAdamW(
            model.named_parameters(), config=zoff.OffloadConfig(bucket_bytes=1, device=Noted(faults=LATE))
        )
        with closing(optimizer):
            for step in range(10):
                jobs = [
                    lambda part=part, step=step: part(torch.full((1, 4), 1.0 + step)).square().sum().backward()
                    for part in model
                ]
                if threaded:
                    for running in [Beside(job) for job in jobs]:
                        running.result()
                else:
                    for job in jobs:
                        job()
                optimizer.step()
                optimizer.zero_grad()
            outcomes.append(Outcome.of(model, optimizer))

    assert_same_bits(outcomes[1], outcomes[0])


def test_a_closure_is_run_with_gradients_and_its_loss_is_returned():
    model = nn.Linear(2, 1)
    with zoff.OffloadAdamW(model.parameters()) as optimizer, torch.no_grad():

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(torch.ones(1, 2)).sum()
            loss.backward()
            return loss

        assert optimizer.step(closure).item() == pytest.approx(model.weight.sum().item() + model.bias.item(), abs=0.01)
        assert optimizer.statistics().steps == 1


def test_an_exception_in_a_with_block_closes_and_goes_on():
    model = SHORT.model()
    with contextlib.suppress(ZeroDivisionError), SHORT.optimizer(model) as optimizer:
        train(model, optimizer, range(1), SHORT)
        raise ZeroDivisionError
    with pytest.raises(zoff.ClosedError):
        optimizer.step()
