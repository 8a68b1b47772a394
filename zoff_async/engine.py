"""The async face: a training step that a running event loop can await.

    async with Engine(model, optimizer) as engine:
        loss = await engine.step(lambda: loss_fn(model(x), y))

Forward and backward block the thread they run in, so they run in the engine's compute thread and never on a loop's. The
caller's loop is neither blocked nor replaced; the executor stays on the optimizer's own.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self, overload

import torch
from torch import Tensor, nn

from zoff_async.errors import ClosedError
from zoff_async.optimizer import OffloadAdam, OffloadAdamW

Closure = Callable[[], Tensor]


class Engine:
    """Runs steps of ``model`` with ``optimizer`` for a coroutine.

    Args:
        model: The module that the closures call; with ``optimizer`` made with ``model=`` the update's tail hides behind
            the next forward.
        optimizer: Stays the caller's: leaving the block finishes what is under way and leaves it open.

    Steps run one after the other, in the order in which they were awaited. An error of a step's update, which runs
    after ``step`` has returned its loss, is raised by the next ``step`` or on leaving the block.
    """

    def __init__(self, model: nn.Module, optimizer: OffloadAdamW | OffloadAdam) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
        if not isinstance(optimizer, OffloadAdamW | OffloadAdam):
            raise TypeError(f"optimizer must be an OffloadAdamW or OffloadAdam, got {type(optimizer).__name__}")
        self.model = model
        self.optimizer = optimizer
        self._compute: ThreadPoolExecutor | None = None
        self._update_error: BaseException | None = None

    async def __aenter__(self) -> Self:
        self._compute = ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine-compute")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        compute = self._open_compute()
        self._compute = None
        try:
            await _until_over(asyncio.wrap_future(compute.submit(self.optimizer.synchronize)))
        except ClosedError:
            pass  # the optimizer was closed inside the block: it has drained itself
        except BaseException as late:
            self._update_error = self._update_error or late
        finally:
            compute.shutdown(wait=False)
        update_error, self._update_error = self._update_error, None
        if update_error is not None and error is None:
            raise update_error

    @overload
    async def step(self, closure: Closure) -> Tensor: ...
    @overload
    async def step(self, closure: Sequence[Closure]) -> list[Tensor]: ...
    async def step(self, closure: Closure | Sequence[Closure]) -> Tensor | list[Tensor]:
        """Run closure and backward, then step and zero_grad; returns the detached loss as soon as backward is done.

        A sequence of closures accumulates their gradients into one step, and gives their losses in order. Device,
        stream, grad mode, autocast and context variables are the caller's. When this call is cancelled, it waits for
        the closure that runs and drops the gradients.

        Raises:
            Whatever the closure, backward or an earlier step's update raised; after an error in the closure or in
            backward the gradients are dropped, and the next step starts clean.
        """
        compute = self._open_compute()
        closures = [closure] if callable(closure) else list(closure)
        if not closures:
            raise ValueError("closure is an empty sequence: give at least one function that returns a loss")
        job = _Job(self.optimizer, closures, _surroundings())
        future = compute.submit(
            contextvars.copy_context().run, job.run, self._take_update_error, self._keep_update_error
        )
        future.add_done_callback(job.abandoned)
        try:
            losses = await asyncio.shield(asyncio.wrap_future(job.losses))
        except asyncio.CancelledError:
            job.cancelled.set()
            await _until_over(asyncio.wrap_future(future))
            raise
        return losses[0] if callable(closure) else losses

    def _open_compute(self) -> ThreadPoolExecutor:
        if self._compute is None:
            raise ClosedError("the engine is not open: use it inside 'async with Engine(model, optimizer) as engine'")
        return self._compute

    def _take_update_error(self) -> None:
        error, self._update_error = self._update_error, None
        if error is not None:
            raise error

    def _keep_update_error(self, error: BaseException) -> None:
        self._update_error = error


class _Job:
    """One step in the compute thread."""

    def __init__(
        self,
        optimizer: OffloadAdamW | OffloadAdam,
        closures: Sequence[Closure],
        surroundings: Callable[[], contextlib.AbstractContextManager[None]],
    ) -> None:
        self._optimizer = optimizer
        self._closures = closures
        self._surroundings = surroundings
        self.losses: Future[list[Tensor]] = Future()
        self.cancelled = threading.Event()

    def run(self, raise_earlier: Callable[[], None], keep_error: Callable[[BaseException], None]) -> None:
        try:
            raise_earlier()
            losses = self._forward_and_backward()
        except BaseException as error:
            with contextlib.suppress(Exception):  # what is wrong with the optimizer shows at the next step
                self._optimizer.zero_grad()
            self.losses.set_exception(error)
            return
        if self.cancelled.is_set():
            self._drop(keep_error)
            self.losses.set_result(losses)
            return
        try:
            with self._optimizer._closed_without_waiting():
                # The step is closed before the loss is out: what the caller changes next belongs to the next step.
                self._optimizer.step()
                self._optimizer.zero_grad()
                self.losses.set_result(losses)
        except BaseException as error:
            keep_error(error)
        finally:
            if not self.losses.done():
                self.losses.set_result(losses)

    def abandoned(self, future: Future[Any]) -> None:
        """The compute thread took no more jobs: whoever waits for the loss is told."""
        if future.cancelled() and not self.losses.done():
            self.losses.set_exception(ClosedError("the engine was closed before this step began"))

    def _forward_and_backward(self) -> list[Tensor]:
        losses = []
        with self._surroundings():
            for closure in self._closures:
                if self.cancelled.is_set():
                    break
                loss = closure()
                if not isinstance(loss, Tensor):
                    raise TypeError(f"the closure must return its loss as a tensor, got {type(loss).__name__}")
                loss.backward()  # type: ignore[no-untyped-call]
                losses.append(loss.detach())
        return losses

    def _drop(self, keep_error: Callable[[BaseException], None]) -> None:
        try:
            self._optimizer.zero_grad()
        except BaseException as error:
            keep_error(error)


def _surroundings() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """What torch keeps a thread (grad mode, autocast, CUDA device and stream), as the calling thread has it."""
    grad_enabled = torch.is_grad_enabled()
    autocasts = [
        (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind), torch.is_autocast_cache_enabled())
        for kind in ("cpu", "cuda")
    ]
    stream = torch.cuda.current_stream() if torch.cuda.is_available() and torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]

    @contextlib.contextmanager
    def entered() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(grad_enabled))
            for kind, dtype, enabled, cache in autocasts:
                if enabled:
                    stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=True, cache_enabled=cache))
            if stream is not None:
                stack.enter_context(torch.cuda.stream(stream))
            yield

    return entered


async def _until_over(future: asyncio.Future[Any]) -> Any:
    """Await to the end, cancelled or not; a cancellation meanwhile is raised afterwards."""
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.shield(future)
        except asyncio.CancelledError as error:
            if future.cancelled():
                raise
            cancelled = error
        except BaseException:
            break
    if cancelled is not None:
        raise cancelled
    return future.result()
