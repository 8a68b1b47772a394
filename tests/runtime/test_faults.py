"""A failure in every action in turn, under every policy: who is told, what is left, and that everything ends.

Failures come from a device that refuses a copy, from a job in the Adam pool, and from handlers that raise before or
after their work. The right outcome is stated once, in ``aftermath``: the very exception, nothing new started, and
either the last committed step whole (bit for bit a run that never had the failed step) or a torn state that is
refused by name.
"""

from __future__ import annotations

import gc
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

import zoff_async as zoff
from tests.runtime.scenes import Beside, Noted, Outcome, assert_same_bits, wait_until, within
from zoff_async.cpu_ops import Pool
from zoff_async.device import EmulatedDevice, Faults
from zoff_async.scheduler import Action, Executor

POLICIES = ("serial", "overlap", "in_backward", "delayed")
KINDS = ("d2h", "acc", "norm", "adam", "h2d")
#: Nothing may take longer, in seconds: a failure is told, a close returns.
PROMPT_S = 5.0
#: Steps before the one that fails; buckets of the model below.
GOOD_STEPS, BUCKETS = 3, 6


class Injected(Exception):
    """What a test raises inside the machinery."""


def network() -> nn.Sequential:
    torch.manual_seed(11)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))


def build(policy: Any, device: Any = "auto", *, gated: bool = False, **config: Any) -> tuple[nn.Sequential, Any]:
    """The network and an optimizer with a bucket a parameter, two chunks in the larger ones."""
    model = network()
    optimizer = zoff.OffloadAdamW(
        model.named_parameters(),
        lr=0.1,
        model=model if gated else None,
        policy=policy,
        config=zoff.OffloadConfig(
            **{"bucket_bytes": 1, "chunk_numel": 8, "workers": 2, "event_loop": "asyncio", "device": device, **config}
        ),
    )
    return model, optimizer


def backward(model: nn.Module, step: int) -> None:
    x = torch.linspace(-1, 1, 6).view(2, 3) + step
    model(x).square().sum().backward()


def one_step(model: nn.Module, optimizer: Any, step: int) -> None:
    backward(model, step)
    optimizer.step()
    optimizer.zero_grad()


class Faulty:
    """Handlers of an executor that raise in one action, and a log of what was started after that.

    Armed, they raise in the ``nth`` action of that kind and bucket (and chunk 0) that comes from then on.
    """

    def __init__(self, kind: str, bucket: int | None, *, after_work: bool, nth: int = 1) -> None:
        self.error = Injected(f"{kind}:{bucket}")
        self.raised = threading.Event()
        self.armed = threading.Event()
        self.started_later: list[str] = []
        self._target = (kind, bucket)
        self._after_work = after_work
        self._left = nth

    def wrap(self, kind: str, handler: Any) -> Any:
        async def handled(action: Action, live: Any) -> Any:
            if self.raised.is_set():
                self.started_later.append(str(action))
            mine = self.armed.is_set() and (kind, action.bucket) == self._target and not action.chunk
            if mine:
                self._left -= 1
                mine = self._left == 0
            if mine and not self._after_work:
                self.raised.set()
                raise self.error
            times = await handler(action, live)
            if mine:
                self.raised.set()
                raise self.error
            return times

        return handled

    def into(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """From here on every executor that is made has these handlers."""
        init = Executor.__init__

        def faulty_init(executor: Any, handlers: Any, **options: Any) -> None:
            init(executor, {kind: self.wrap(kind, handler) for kind, handler in handlers.items()}, **options)

        monkeypatch.setattr(Executor, "__init__", faulty_init)


@pytest.fixture(autouse=True)
def nothing_is_lost_on_the_loop(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """No "Task exception was never retrieved", no callback that raised: the loop's own logger stays silent."""
    with caplog.at_level(logging.ERROR, "asyncio"):
        yield
        gc.collect()
    told = [
        record.getMessage()
        for phase in ("setup", "call")
        for record in caplog.get_records(phase)
        if record.name == "asyncio"
    ]
    assert told == []


def first_raised(*calls: Callable[[], Any]) -> BaseException | None:
    """What the first of some calls that raises has raised; each must end promptly."""
    for call in calls:
        try:
            within(PROMPT_S, call)
        except BaseException as error:
            return error
    return None


@cache
def undisturbed(policy: str, *, with_the_step: bool) -> Outcome:
    """A run that nothing disturbs, with or without the step that failed in the other one."""
    model, optimizer = build(policy)
    for step in range(GOOD_STEPS + 2):
        if step == GOOD_STEPS:
            optimizer.synchronize()
        if step != GOOD_STEPS or with_the_step:
            one_step(model, optimizer, step)
    optimizer.synchronize()
    outcome = Outcome.of(model, optimizer)
    optimizer.close()
    return outcome


def until_it_fails(model: nn.Module, optimizer: Any, arm: Callable[[], None]) -> tuple[BaseException, Any]:
    """Good steps, a checkpoint, and the step that fails: the exception that the caller sees, and the checkpoint."""
    for step in range(GOOD_STEPS):
        one_step(model, optimizer, step)
    optimizer.synchronize()
    saved = {name: value.clone() for name, value in model.state_dict().items()}, optimizer.state_dict()
    arm()
    error = first_raised(
        lambda: backward(model, GOOD_STEPS), optimizer.step, optimizer.zero_grad, optimizer.synchronize
    )
    assert error is not None, "nothing has failed"
    return error, saved


def aftermath(
    policy: str, model: nn.Module, optimizer: Any, error: BaseException, saved: Any, *, complete: bool = False
) -> bool:
    """Check what the failure of a step has left; give whether the state is torn.

    ``complete``: all of the step's work may have been done when it failed, and then it counts.
    """
    later: BaseException | None = error
    for _ in range(4):  # whoever waited for the step at a gate was told too
        later = first_raised(optimizer.step) if later is error else later
    torn = isinstance(later, zoff.TornStateError)
    assert isinstance(later, zoff.StepError)
    assert later.__cause__ is error
    if torn:
        _refused_by_name(optimizer, error)
        model.load_state_dict(saved[0])
        within(PROMPT_S, lambda: optimizer.load_state_dict(saved[1]))
    else:
        assert str(later) == "an earlier step failed before its update: call zero_grad() to go on"
    within(PROMPT_S, optimizer.zero_grad)
    one_step(model, optimizer, GOOD_STEPS + 1)
    within(PROMPT_S, optimizer.synchronize)
    outcome = Outcome.of(model, optimizer)
    within(PROMPT_S, optimizer.close)
    counts = set(outcome.counts.values())
    with_the_step = complete and not torn and counts == {GOOD_STEPS + 2}
    assert_same_bits(outcome, undisturbed(policy, with_the_step=with_the_step))
    return torn or with_the_step


def _refused_by_name(optimizer: Any, error: BaseException) -> None:
    for call in (optimizer.state_dict, optimizer.step, optimizer.synchronize):
        refusal = first_raised(call)
        assert isinstance(refusal, zoff.TornStateError), call
        assert refusal.__cause__ is error
        assert "failed during its update: '" in str(refusal)
        assert "have moved and the others have not; load a checkpoint with load_state_dict" in str(refusal)


#: First, middle and last bucket of a direction; the update begins with bucket 5, which the next forward reads first.
PLACES = ((0, True), (2, False), (BUCKETS - 1, False))


@pytest.mark.parametrize(("bucket", "after_work"), PLACES, ids=["0-after", "2-before", "5-before"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_failure_in_any_action(policy, kind, bucket, after_work, monkeypatch):
    """An action raises before its work, or after it."""
    fault = Faulty(kind, None if kind == "norm" else bucket, after_work=after_work)
    fault.into(monkeypatch)
    model, optimizer = build(policy)
    error, saved = until_it_fails(model, optimizer, fault.armed.set)

    assert error is fault.error
    assert fault.started_later == []
    torn = aftermath(policy, model, optimizer, error, saved, complete=kind == "h2d" and after_work)
    if policy in ("serial", "overlap"):
        before_any_adam = kind == "adam" and bucket == BUCKETS - 1 and not after_work
        assert torn == (kind in ("adam", "h2d") and not before_any_adam)


@pytest.mark.parametrize("bucket", [0, 2, BUCKETS - 1])
@pytest.mark.parametrize("direction", ["d2h", "h2d"])
@pytest.mark.parametrize("policy", ["serial", "overlap", "in_backward"])
def test_a_copy_that_the_device_refuses(policy, direction, bucket):
    """The device's own exception reaches the caller; h2d fails during an update, d2h before it."""
    number = GOOD_STEPS * BUCKETS + bucket + 1
    device = EmulatedDevice(faults=Faults(**{f"fail_{direction}_at": (number,), "poison_slots": True}))
    model, optimizer = build(policy, device)
    error, saved = until_it_fails(model, optimizer, lambda: None)

    assert type(error) is zoff.DeviceError
    assert str(error).startswith(f"injected failure of zoff-{direction} copy {number}")
    torn = aftermath(policy, model, optimizer, error, saved)
    if policy != "in_backward":
        assert torn == (direction == "h2d")


@pytest.mark.parametrize("job", [1, BUCKETS, BUCKETS + 1, BUCKETS + 5])
@pytest.mark.parametrize("policy", ["serial", "overlap", "in_backward"])
def test_a_job_of_the_pool_that_raises(policy, job, monkeypatch):
    """A kernel or a landing raises in a thread of the pool: its exception, even one that is no Exception."""

    class Abrupt(BaseException):
        pass

    raised = Abrupt("in the pool")
    model, optimizer = build(policy)
    submit, count = Pool.submit, iter(range(10**9))

    def counting(pool: Pool, work: Callable[[], None], done: Any) -> None:
        def failing() -> None:
            raise raised

        bad = armed.is_set() and next(count) + 1 == job
        submit(pool, failing if bad else work, done)

    armed = threading.Event()
    monkeypatch.setattr(Pool, "submit", counting)
    error, saved = until_it_fails(model, optimizer, armed.set)

    assert error is raised
    monkeypatch.undo()
    torn = aftermath(policy, model, optimizer, error, saved)
    if policy != "in_backward":
        assert torn == (job > BUCKETS)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("gated", [False, True])
def test_close_returns_after_a_failure_that_nobody_was_told_of(policy, kind, gated, monkeypatch):
    """The step fails and the caller goes straight to close()."""
    fault = Faulty(kind, None if kind == "norm" else 1, after_work=True, nth=2)
    fault.armed.set()
    fault.into(monkeypatch)
    model, optimizer = build(policy, gated=gated)
    error = first_raised(*[lambda step=step: one_step(model, optimizer, step) for step in range(3)])
    assert error in (None, fault.error)
    within(PROMPT_S, optimizer.close)

    assert all(p.grad is None or type(p.grad) is torch.Tensor for p in model.parameters())
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    assert first_raised(optimizer.step).__class__ is zoff.ClosedError


def test_two_failures_in_a_row_are_both_told(monkeypatch):
    """Each is told once, as itself; the numbers afterwards are those of the good steps alone."""
    device = EmulatedDevice(faults=Faults(fail_d2h_at=(2, 4, 5)))
    model, optimizer = build("overlap", device)
    told = []
    for step in range(8):
        try:
            one_step(model, optimizer, step)
        except zoff.DeviceError as error:
            told.append((step, str(error)))
            optimizer.zero_grad()

    assert len(told) >= 2
    got = Outcome.of(model, optimizer)
    optimizer.close()
    model, optimizer = build("serial")
    for step in range(8):
        if step not in dict(told):
            one_step(model, optimizer, step)
    assert_same_bits(got, Outcome.of(model, optimizer))
    optimizer.close()


@pytest.mark.parametrize("place", ["before the last check", "after it"])
@pytest.mark.parametrize("policy", ["overlap", "delayed"])
def test_a_failure_that_lands_while_step_is_on_its_way_is_told_as_itself(policy, place, monkeypatch):
    """The copy fails after step() has looked for failures and before it has closed the step; work goes on
    afterwards."""
    device = Noted(faults=Faults(fail_d2h_at=(1,)))
    model, optimizer = build(policy, device, bucket_bytes=1 << 20)
    device.hold("d2h")
    within(PROMPT_S, lambda: backward(model, 0))
    runtime = optimizer._runtime
    patched = (runtime.intake, "complete_step") if place == "before the last check" else (device, "mark")
    real = getattr(*patched)

    def and_then_the_copy_fails(*args: Any) -> Any:
        result = real(*args)
        device.let("d2h")
        wait_until(lambda: runtime._failures.error is not None)
        return result

    monkeypatch.setattr(*patched, and_then_the_copy_fails)
    error = first_raised(optimizer.step, optimizer.zero_grad)

    assert isinstance(error, zoff.DeviceError)
    monkeypatch.undo()
    within(PROMPT_S, optimizer.zero_grad)
    within(PROMPT_S, optimizer.synchronize)
    within(PROMPT_S, lambda: one_step(model, optimizer, 1))
    within(PROMPT_S, optimizer.synchronize)
    assert optimizer.statistics().steps == 1
    within(PROMPT_S, optimizer.close)


@pytest.mark.parametrize("policy", ["overlap", "in_backward", "delayed"])
def test_a_failure_that_is_still_being_cleaned_up_is_told_as_itself(policy, monkeypatch):
    """A copy has failed, a job of its step is not over yet, and step() comes in between."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(4, 4, bias=False) for _ in range(3)])
    optimizer = zoff.OffloadAdamW(
        model.named_parameters(),
        policy=policy,
        config=zoff.OffloadConfig(
            bucket_bytes=1, workers=1, event_loop="asyncio", device=EmulatedDevice(faults=Faults(fail_d2h_at=(2,)))
        ),
    )
    failed, go_on = threading.Event(), threading.Event()
    submit, note_failure = Pool.submit, Executor._failed

    def slow(pool: Pool, work: Callable[[], None], done: Any) -> None:
        submit(pool, lambda: (go_on.wait(20), work()), done)

    def noting(*args: Any) -> BaseException:
        failed.set()
        return note_failure(*args)

    monkeypatch.setattr(Pool, "submit", slow)
    monkeypatch.setattr(Executor, "_failed", noting)
    within(PROMPT_S, lambda: model(torch.ones(1, 4)).sum().backward())
    assert failed.wait(PROMPT_S)
    stepping = Beside(optimizer.step)
    stepping.over.wait(0.3)
    go_on.set()
    error = first_raised(stepping.result, optimizer.zero_grad)

    assert isinstance(error, zoff.DeviceError)
    within(PROMPT_S, optimizer.close)


@pytest.mark.parametrize("allocation", [1, 2])
def test_a_device_that_cannot_be_opened_leaves_nothing_behind(allocation):
    """The error comes from backward; the next one may try again, and closing leaves the interpreter as it was."""
    before_s, threads = sys.getswitchinterval(), set(threading.enumerate())
    device = EmulatedDevice(faults=Faults(fail_allocation_at=(allocation,)))
    model, optimizer = build("overlap", device)
    assert isinstance(first_raised(lambda: backward(model, 0)), zoff.DeviceError)
    again = first_raised(lambda: backward(model, 0))
    assert again is None or isinstance(again, zoff.ZoffError)
    within(PROMPT_S, optimizer.close)
    device.close()

    assert sys.getswitchinterval() == before_s
    wait_until(lambda: set(threading.enumerate()) - threads == set())


def test_a_device_that_does_not_fit_can_be_closed():
    model, optimizer = build("overlap", "cuda:7")
    error = first_raised(lambda: backward(model, 0))

    assert isinstance(error, ValueError)
    within(PROMPT_S, optimizer.close)


@pytest.mark.parametrize("policy", ["serial", "overlap"])
def test_a_backward_that_raises_in_the_middle_leaves_the_last_step_whole(policy):
    """An error of the user's own: the gradients that came before it are dropped by zero_grad()."""

    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise Injected("in the user's backward")

    model, optimizer = build(policy)
    for step in range(GOOD_STEPS):
        one_step(model, optimizer, step)
    hidden = Broken.apply(model[:2](torch.ones(2, 3)))
    with pytest.raises(Injected):
        model[2:](hidden).square().sum().backward()
    optimizer.zero_grad()
    one_step(model, optimizer, GOOD_STEPS + 1)

    assert_same_bits(Outcome.of(model, optimizer), undisturbed(policy, with_the_step=False))
    optimizer.close()


def test_a_step_without_backward_in_it_raises_nothing_even_if_nonfinite_gradients_would():
    """step() before any gradient: as torch, nothing happens."""
    model, optimizer = build("overlap", on_nonfinite="raise")
    optimizer.step()
    one_step(model, optimizer, 0)
    optimizer.step()

    assert optimizer.statistics().steps == 1
    optimizer.close()
