"""One optimizer's machinery, and the doors into it from the callers' threads.

    hooks -> Intake -> bwd:b done -> d2h:b -> acc:b -> norm -> adam:b.c -> h2d:b -> gates
             (callers' threads)     (Handlers, on the portal's loop)                (Weights)

A caller's thread hands gradients and steps over. It waits only where its numbers need it: for a weight at its gate, for
a gradient that it reads, and in ``step()`` where no gate stands before the weights.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import warnings
import weakref
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from zoff_async.bucket import Bucket, Entry, pack
from zoff_async.config import OffloadConfig
from zoff_async.cpu_ops import UpdateRule, available_cpus, default_workers, make_kernel
from zoff_async.device import Device, Marker
from zoff_async.errors import ClosedError, NonFiniteGradientError, NonFiniteGradientWarning, StepError
from zoff_async.failures import Failures
from zoff_async.handlers import Counters
from zoff_async.intake import Arrival, Intake
from zoff_async.machinery import MOST_HELD_BUCKETS, Machinery
from zoff_async.planning import Planner, nodes_before_forward
from zoff_async.portal import Portal
from zoff_async.scheduler import Action, Executor, LiveStep, Policy, StepPlan
from zoff_async.state import BucketState
from zoff_async.step import Hyper, Step
from zoff_async.trace import Pieces, Recorder, Timeline
from zoff_async.weights import Weights

logger = logging.getLogger("zoff_async")

#: A step's waves are kept until it closes; a caller that never steps is given a fresh step after so many.
MOST_WAVES = 64


@dataclass(frozen=True)
class Closing:
    """What the caller's thread knows of a step when it closes it."""

    present: list[np.ndarray]
    factor: list[np.ndarray]
    hyper: tuple[Hyper, ...]
    inverse_scale: float = 1.0
    overflowed: bool = False


class Runtime:
    """Threads, staging and the device are opened at the first gradient or step, not before.

    Callers' threads may use every public method, one at a time; hooks may run beside them.
    """

    def __init__(
        self,
        entries: Sequence[Entry],
        rule: UpdateRule,
        policy: Policy,
        config: OffloadConfig,
        *,
        max_norm: float | None,
        model: nn.Module | None,
        read_hyper: Callable[[], tuple[Hyper, ...]],
        new_entries: Callable[[], list[Entry]],
    ) -> None:
        self.config = config
        self.rule = rule
        self.max_norm = max_norm
        self.counters = Counters()
        self.kernel = make_kernel(config.kernel, rule)
        self.workers = config.workers or default_workers()
        _check_cores(config.cpu_affinity)
        self.started = False
        self.set_aside: dict[Tensor, Mapping[str, Any]] = {}  # saved state of parameters that are frozen now
        self.steps_done = 0  # closed with gradients; over saves and loads
        self._read_hyper = read_hyper
        self._new_entries = new_entries
        self._recorder = Recorder(config.trace_steps) if config.trace_steps else None
        self._failures = Failures()
        self._weights = Weights(self._failures, model, note_reads=model is not None and self._recorder is not None)
        self._planner = Planner(
            policy, config, workers=self.workers, clip=max_norm is not None, node_done=self._node_done
        )
        self._machinery = Machinery(
            config,
            self.kernel,
            self.workers,
            self._planner,
            self._weights,
            self.counters,
            max_norm=max_norm,
            receiver=self,
            record=None if self._recorder is None else self._recorder.note,
            on_failure=self._on_failure,
        )
        self._warned = False
        self._closed = False
        self._pid = os.getpid()
        self._starting = threading.RLock()
        self._live: LiveStep | None = None
        self._last: Step | None = None  # the last step that was closed
        self._forward_reads: tuple[int, ...] = ()  # of the open step's first forward
        self._set_states([BucketState(bucket, rule) for bucket in self._pack(entries)])
        self._planner.set_buckets([state.bucket for state in self.states])
        self._weights.gate_model()
        self._hooks = [self._watch(entry) for entry in self.entries]

    # --- what there is ------------------------------------------------------------------------------------------------

    @property
    def plan(self) -> StepPlan:
        """The step plan in force."""
        return self._planner.plan

    @property
    def device(self) -> Device:
        return self._machinery.device

    @property
    def portal(self) -> Portal:
        return self._machinery.portal

    @property
    def executor(self) -> Executor:
        return self._machinery.executor

    @property
    def intake(self) -> Intake:
        return self._machinery.intake

    def entry_of(self, parameter: Tensor) -> Entry | None:
        """The entry of a parameter that is trained here."""
        return self._entry_of.get(parameter)

    def _pack(self, entries: Sequence[Entry], first_index: int = 0) -> list[Bucket]:
        total_bytes = sum(entry.numel * entry.parameter.dtype.itemsize for entry in entries)
        bucket_bytes = self.config.bucket_bytes_for(total_bytes)
        return pack(entries, bucket_bytes, self.config.chunk_numel, first_index=first_index)

    def _set_states(self, states: list[BucketState]) -> None:
        self.states = states
        self.entries = sorted((e for state in states for e in state.bucket.entries), key=lambda entry: entry.index)
        self._entry_of = {entry.parameter: entry for entry in self.entries}
        self._weights.set_states(states)

    def _watch(self, entry: Entry) -> RemovableHandle:
        runtime = weakref.ref(self)

        def accumulated(parameter: Tensor) -> None:
            alive = runtime()
            if alive is not None:
                alive.accumulated(parameter)

        register = entry.parameter.register_post_accumulate_grad_hook
        handle: RemovableHandle = register(accumulated)  # type: ignore[no-untyped-call]
        return handle

    # --- life ---------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Open device, threads, staging and the first step. Idempotent; all of it or, on an error, nothing."""
        with self._starting:
            self.refuse_closed()
            if self.started:
                return
            self._refuse_unreduced_gradients()
            if any(entry.parameter.dtype != entry.bucket.dtype for entry in self.entries):
                self._repack()
                self._planner.set_buckets([state.bucket for state in self.states])
            self._machinery.open(self.states, self.entries)
            self.portal.run(self._open_first)
            self.started = True
        if self._recorder is not None:
            self._recorder.facts.update(
                policy=self.plan.name,
                device=self.device.name,
                device_kind=self.device.kind,
                kernel=self.kernel.name,
                workers=self.workers,
                gated=self._weights.gated,
                held_buckets=MOST_HELD_BUCKETS,
                torch=torch.__version__,
            )
        logger.info(
            "%s: kernel %s, %d workers, device %s", self.rule.name, self.kernel.name, self.workers, self.device.name
        )

    def _refuse_unreduced_gradients(self) -> None:
        """Ranks that each keep their own gradients train apart: DistributedDataParallel's reduction is not seen
        here."""
        dist = torch.distributed
        if not (self.config.data_parallel and dist.is_available() and dist.is_initialized()):
            return
        if dist.get_world_size() > 1:
            raise StepError(
                f"{self.entries[0].name!r} is a plain parameter in a process group of {dist.get_world_size()} ranks: "
                "its gradient leaves for the host before DistributedDataParallel averages it, so the ranks would part. "
                "Shard the model with FSDP2 (not supported yet), train on one rank, or pass "
                "OffloadConfig(data_parallel=False) if the ranks are meant to train apart"
            )

    async def _open_first(self) -> None:
        self._open_next(None)

    def _open_next(self, before: Step | None) -> None:
        """On the loop: open the step that follows ``before``."""
        plan = self._planner.next_plan(self.steps_done)
        step = Step(stale=bool(plan.stale), states=self.states, run_in_pool=self._machinery.handlers.run_in_pool)
        step.update = step
        if plan.stale:
            step.update = before if before is not None and before.stale else None
            if before is not None and before.update is not None and before.update is not before:
                before.update.update = None  # no chain of past steps
        step.present = [np.zeros(len(state.bucket.entries), dtype=np.bool_) for state in self.states]
        step.factor = [np.ones(len(state.bucket.entries)) for state in self.states]
        self._live = self.executor.open(plan, step)
        if self._recorder is not None:
            pieces = Pieces(tuple(state.bucket.numel for state in self.states), self.config.chunk_numel)
            self._recorder.opened(self._live.index, plan, pieces)

    def add(self, entries: Sequence[Entry]) -> None:
        """Take further parameters in, with buckets of their own."""
        if self.started:
            self._quiesce()
        buckets = self._pack(entries, first_index=len(self.states))
        self._set_states([*self.states, *(BucketState(bucket, self.rule) for bucket in buckets)])
        for entry in entries:
            if entry.parameter in self.set_aside:
                self.take_saved(entry, self.set_aside.pop(entry.parameter))
        self._hooks += [self._watch(entry) for entry in entries]
        self._refit()

    def rebuild(self) -> None:
        """The model was moved or cast: new buckets, staging and device; masters, moments and gradients are kept."""
        self._quiesce()
        self._weights.adopt_edits()
        self._repack()
        self._refit()

    def _repack(self) -> None:
        old = {e.parameter: (self.states[e.bucket.index], e.position, e.start) for e in self.entries}
        states = [BucketState(bucket, self.rule) for bucket in self._pack(self.entries)]
        for state in states:
            for entry in state.bucket.entries:
                state.take_over(entry, *old[entry.parameter])
        self._set_states(states)

    def _misfits(self, entry: Entry) -> bool:
        parameter = entry.parameter
        return parameter.dtype != entry.bucket.dtype or parameter.device != self.device.torch_device

    def _quiesce(self) -> None:
        """Every update is done and every gradient has landed; the open step has nothing under way."""
        self.flush()
        self._let_land()

    def _let_land(self) -> None:
        if self.intake.waves:
            self.intake.complete_step()
            self.intake.wait_all_landed()

    def _refit(self) -> None:
        """Plan, staging, device and open step for the present buckets."""
        self._planner.set_buckets([state.bucket for state in self.states])
        self._weights.take_reads()
        self._forward_reads = ()  # they name buckets that are no more
        if not self.started:
            return
        held = [parameter for parameter, source in self.intake.sources.items() if parameter.grad is source.stand_in]
        self._machinery.unfit()
        if self.device.torch_device != self.entries[0].parameter.device:
            self.device.close()
            self._machinery.open_device(self.entries)
        self._machinery.fit(self.states)
        for parameter in held:
            parameter.grad = self.intake.sources[parameter].stand_in
        self.portal.run(self._reopen_on_loop)

    def close(self) -> None:
        """Finish what is under way, end every thread, give the model back. Always returns; idempotent."""
        with self._starting:
            if self._closed:
                return
            self._closed = True
        for hook in self._hooks:
            hook.remove()
        if self.started and os.getpid() == self._pid:
            if self._machinery.in_own_thread:  # the garbage collector ran in one of the threads that are to be joined
                threading.Thread(target=self._close_threads, name="closing-zoff", daemon=True).start()
            else:
                self._close_threads()
        self._weights.ungate_model()

    def _close_threads(self) -> None:
        if self._failures.error is None:
            self._closed = False  # only for this: the doors refuse a closed optimizer
            try:
                self._finish_for_close()
            except BaseException as error:
                logger.error("an optimizer was closed with its last step unfinished: %r", error)
            finally:
                self._closed = True
        for source in self.intake.sources.values():
            if source.entry.parameter.grad is source.stand_in:
                source.entry.parameter.grad = None
        self._machinery.close()
        self._weights.release()

    def _finish_for_close(self) -> None:
        if self._planner.adam_in_backward and self.intake.waves:
            self._abandon_backward()
        self.flush()
        self.intake.wait_all_landed()
        for source in self.intake.sources.values():
            if source.entry.parameter.grad is source.stand_in:
                source.entry.parameter.grad = source.read()

    # --- from callers: gradients and steps ----------------------------------------------------------------------------

    def accumulated(self, parameter: Tensor) -> None:
        """In autograd's threads: a parameter has a gradient."""
        self._refuse_fork()
        self.start()
        if self._misfits(self._entry_of[parameter]):
            self.rebuild()
        if self._planner.adam_in_backward:
            self._prepare_adam(parameter)
        self.intake.accumulated(parameter)

    def _prepare_adam(self, parameter: Tensor) -> None:
        """Before the backward in which Adam runs: unfrozen parameters and edited weights are taken in."""
        if not self.intake.waves:
            self._add_unfrozen()
        if self.intake.opens_wave(self._entry_of[parameter]) == self._planner.declared_backwards - 1:
            self._weights.adopt_edits()

    def _add_unfrozen(self) -> None:
        """Take in parameters that require gradients by now; one that has its gradient already hands it over."""
        entries = self._new_entries()
        if not entries:
            return
        self.add(entries)
        if self._planner.adam_in_backward:
            for entry in entries:
                self.intake.accumulated(entry.parameter)

    def step(
        self, hyper: tuple[Hyper, ...], *, inverse_scale: float = 1.0, overflowed: bool = False, wait: bool = True
    ) -> None:
        """Close the step: what is present is applied. Returns when that is safe for the caller's next line.

        With ``wait=False`` the caller sees to that itself, by ``wait_after_step``.
        """
        entered_s = time.perf_counter()
        self.start()
        self.check()
        if any(self._misfits(entry) for entry in self.entries):
            self.rebuild()
        if self._planner.adam_in_backward:
            if inverse_scale != 1.0 or overflowed:
                raise StepError("a GradScaler cannot work with Adam inside backward: use policy='overlap'")
            if not self.intake.waves:
                self._add_unfrozen()
            stepped = self._step_in_backward(hyper)
        else:
            self._add_unfrozen()
            stepped = self._step_after_backward(hyper, inverse_scale, overflowed)
        if wait:
            self.wait_after_step()
        if stepped and self.config.on_nonfinite == "raise":
            self.last_norm()
        self.check()
        if self._recorder is not None:
            returned_s = time.perf_counter()
            self._weights.take_reads()  # step's own are no forward's
            self._recorder.waited("step", entered_s, returned_s)
            self._recorder.forward_may_begin(returned_s)

    def wait_after_step(self) -> None:
        """Wait for the weights that no gate stands before."""
        self._weights.wait_before_return(all_of_them=self.plan.name == "serial")
        self.check()

    def _step_after_backward(self, hyper: tuple[Hyper, ...], inverse_scale: float, overflowed: bool) -> bool:
        self.settle()
        adopted = self.intake.adopt()
        self.intake.complete_step()
        if adopted:
            self.intake.wait_all_landed()
        if not any(state.present.any() for state in self.states):
            return False  # as torch: without a gradient nothing happens, and nothing is counted
        if self._is_stale():
            self._weights.refuse_edits("a delayed update is pending")
        else:
            self._weights.adopt_edits()
        self.intake.fold_clip()
        if any(state.zeroed.any() for state in self.states):
            self.wait_gradients_unread()
            self.intake.wait_all_landed()  # what is still to land would land over the zeros
            for state in self.states:
                state.set_zeros()
        present = [state.present.copy() for state in self.states]
        factor = [state.factor.copy() for state in self.states]
        self.steps_done += 1
        self._advance(Closing(present, factor, hyper, inverse_scale, overflowed))
        if self.max_norm is not None:
            self.intake.clip_of = self._last
        return True

    def _step_in_backward(self, hyper: tuple[Hyper, ...]) -> bool:
        if self.intake.waves:
            self.intake.refuse_replaced()
        else:
            self.intake.adopt()
        began, declared = self.intake.waves, self._planner.declared_backwards
        if not began:
            return False
        if began < declared:
            raise StepError(
                f"step() after {began} backward(s), and policy {self.plan.name!r} was told that a step has {declared}: "
                "call backward that often, or change OffloadConfig(backwards_per_step=...)"
            )
        self.intake.complete_step()
        self.steps_done += 1
        self._advance(None)
        self.intake.drop_all()
        assert self._last is not None
        if hyper != self._last.hyper:
            raise StepError(
                "lr, betas, eps or weight_decay changed between backward and step(): Adam has already run with the "
                "values that held when backward began; change them after step(), or use policy='overlap'"
            )
        return True

    def _advance(self, closing: Closing | None) -> None:
        """Close the open step (``closing=None``: it has closed itself in backward) and open the next."""
        step, plan = self._open_step()
        self._weights.gate_model()
        marker = self.device.mark()
        self._planner.learn(self._forward_reads)
        self._forward_reads = ()
        self._weights.expect(step, nodes_before_forward(plan))
        self._last = step
        self.portal.run(self._advance_on_loop, step, closing, marker)
        self.intake.new_step()

    async def _advance_on_loop(self, step: Step, closing: Closing | None, marker: Marker) -> None:
        if self._live is None:
            return  # it has failed meanwhile
        if closing is not None:
            step.present, step.factor, step.hyper = closing.present, closing.factor, closing.hyper
            step.inverse_scale, step.overflowed = closing.inverse_scale, closing.overflowed
            step.markers = dict.fromkeys(range(len(self.states)), marker)
            self._live.close()
        await self._or_failure(self.executor.wait_room())
        if self._failures.error is None:
            self._open_next(step)

    def _open_step(self) -> tuple[Step, StepPlan]:
        self.check()
        live = self._live
        assert live is not None
        return _step(live), live.plan

    def settle(self) -> None:
        """Wait until no closed step is under way. Raises what failed."""
        if not self.started:
            return
        self.check()
        if self._planner.adam_in_backward and self.intake.waves:
            return  # the step of this backward is under way, and is the caller's own
        self.portal.run(self._wait_no_closed_step)
        self.check()

    async def _wait_no_closed_step(self) -> None:
        executor = self.executor
        await self._or_failure(executor.wait_until(lambda: not any(live.closed for live in executor.live)))

    def wait_gradients_unread(self) -> None:
        """Wait until no Adam reads the gradient stores any more, a delayed one neither."""
        self.settle()
        step, _ = self._open_step()
        if step.stale and step.update is not None:
            self.portal.run(self._wait_update_done, step.update)
            self.check()

    async def _wait_update_done(self, update: Step) -> None:
        buckets = len(self.states)
        await self._or_failure(self.executor.wait_until(lambda: update.updated(buckets)))

    async def _or_failure(self, wait: Awaitable[None]) -> None:
        """Wait, or return when the executor has failed: ``check`` is what tells."""
        try:
            await wait
        except BaseException as error:
            if error is not self._failures.error:
                raise

    def flush(self) -> None:
        """Every gradient that was stepped is in the masters and in the model."""
        if not self.started:
            return
        self.check()
        self._refuse_inside_backward()
        self.settle()
        if self._is_stale():
            self._flush_stale()
        self._weights.wait_all_current()
        self.settle()

    def _refuse_inside_backward(self) -> None:
        if self._planner.adam_in_backward and self.intake.waves:
            raise StepError(
                "Adam runs inside this backward: call step() before reading or changing the optimizer's state"
            )

    def _is_stale(self) -> bool:
        """Whether a gradient of an earlier step waits to be applied, or its update to be uploaded."""
        step, _ = self._open_step()
        return step.stale and step.update is not None and any(present.any() for present in step.update.present)

    def _flush_stale(self) -> None:
        """Close the open step without a gradient: its Adam applies the pending one, and its uploads may go."""
        self._weights.refuse_edits("a delayed update is pending")
        self._let_land()
        self.intake.complete_step()
        none = [np.zeros_like(state.present) for state in self.states]
        last = self._last
        self._advance(Closing(none, [np.ones_like(state.factor) for state in self.states], self._read_hyper()))
        self.settle()
        self._last = last

    def discard_gradients(self) -> None:
        """Forget every gradient. Never waits for the update in flight, and does not disturb it."""
        if not self.started:
            for entry in self.entries:
                entry.parameter.grad = None
            return
        self._failures.tell()
        if self._planner.adam_in_backward and self.intake.waves and self._failures.error is None:
            self._abandon_backward()
        self.intake.drop_all()
        if self._failures.error is not None:
            if not self._failures.torn:
                self.recover()
        elif self.intake.waves >= MOST_WAVES:
            self._quiesce()
            self.portal.run(self._reopen_on_loop)
            self.intake.new_step()

    def _abandon_backward(self) -> None:
        """Gradients are dropped that Adam inside backward may have used: the state is torn where it has."""
        self.intake.complete_step()
        step, _ = self._open_step()
        self.portal.run(self._finish_abandoned, step)
        moved = [entry.name for entry in self.entries if entry.bucket.index in step.moved]
        self.intake.new_step()
        if moved:
            error = StepError("a backward with Adam inside was not followed by step(): its gradients were dropped")
            self._failures.record(error, moved)
            self._failures.tell()

    async def _finish_abandoned(self, step: Step) -> None:
        live = self._live
        if live is not None and live.closed:
            await self._or_failure(live.wait_done())
            if self._failures.error is None:
                self._open_next(step)
        else:
            await self._reopen_on_loop()

    async def _reopen_on_loop(self) -> None:
        """Replace the open step by a fresh one. A delayed update that it would have uploaded is dropped with it."""
        if self._live is not None:
            await self.executor.discard(self._live)
            self._machinery.handlers.release_slots(_step(self._live))
        self._open_next(None)

    # --- from callers: state and figures ------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Take over the model's weights now, element by element where they differ."""
        self.flush()
        self._weights.suspect_all()
        self._weights.adopt_edits()

    def prepare_load(self, steps_done: int | None = None) -> None:
        """Before the state is replaced: nothing is under way, and what was torn or pending is forgotten."""
        self.start()
        if steps_done is not None:
            self.steps_done = steps_done
        if self._failures.error is not None:
            self.recover()
            return
        self._refuse_inside_backward()
        self.settle()
        self._let_land()
        self.portal.run(self._reopen_on_loop)
        self.intake.new_step()

    def take_saved(self, entry: Entry, values: Mapping[str, Any] | None) -> None:
        """Copy one parameter's saved state into our own buffers; None: it has never been updated.

        Weights that are not the masters are taken over before the next update.
        """
        self.states[entry.bucket.index].take_saved(entry, self.rule.state_names, values)

    def last_norm(self) -> float | None:
        """The norm of the last step that was closed; waits for its last copy."""
        step = self._last
        if step is None:
            return None
        step.norm_known.wait()
        return step.norm

    def timeline(self) -> Timeline:
        """What was recorded."""
        return Timeline(()) if self._recorder is None else self._recorder.timeline()

    # --- failures -----------------------------------------------------------------------------------------------------

    def refuse_closed(self) -> None:
        """Raise ClosedError after ``close()``."""
        if self._closed:
            raise ClosedError("this optimizer has been closed: make a new one")

    def check(self) -> None:
        """Raise what has failed; warn of what was skipped."""
        self.refuse_closed()
        self._refuse_fork()
        self._failures.check()
        self._tell_nonfinite()

    def _refuse_fork(self) -> None:
        if os.getpid() != self._pid:
            raise StepError(
                "this optimizer was made before a fork: its threads are not in this process; make a new one"
            )

    def _tell_nonfinite(self) -> None:
        step = self._last
        if step is None or step.nonfinite is None or not step.norm_known.is_set():
            return
        name, step.nonfinite = step.nonfinite, None
        if self.config.on_nonfinite == "raise":
            raise NonFiniteGradientError(f"the gradient of {name!r} is not finite; nothing was updated")
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"the gradient of {name!r} is not finite: the step was skipped and everything left as it was; further "
                "skipped steps are only counted, see statistics().skipped_steps",
                NonFiniteGradientWarning,
                stacklevel=5,
            )

    def _on_failure(self, error: BaseException) -> None:
        """On the loop, when every action has ended: keep the error, and wake everybody who waits."""
        moved: set[int] = set()
        for step in (self._last, None if self._live is None else _step(self._live)):
            if step is not None and len(step.uploaded) < len(self.states):
                moved |= set() if step.update is None else step.update.moved
                step.norm_known.set()
        self._failures.record(error, [entry.name for entry in self.entries if entry.bucket.index in moved])
        self._machinery.handlers.downloads.reset()
        self._machinery.handlers.uploads.reset()
        self._live = None
        self.intake.fail(error)
        self._weights.release()

    def recover(self) -> None:
        """Go on after a failure: the state is whole (again), and no gradient is present."""
        self._failures.clear()
        self._weights.release()  # step() may have begun to expect uploads when the failure had released them already
        self.intake.fail(None)
        self.intake.drop_all()
        self.portal.run(self._recover_on_loop)

    async def _recover_on_loop(self) -> None:
        self.executor.reset()
        for live in reversed(self.executor.live):  # where a message failed, and not an action
            await self.executor.discard(live)
        self._open_next(None)

    # --- Intake's receiver: called in the callers' threads, in order --------------------------------------------------

    def squares(self, piece: Tensor, out: np.ndarray) -> None:
        self._machinery.handlers.squares(piece, out)

    def wave_opened(self, wave: int) -> None:
        hyper = None
        if self._planner.adam_in_backward and wave == self._planner.declared_backwards - 1:
            hyper = self._read_hyper()
        reads = self._weights.take_reads()
        if not wave:
            self._forward_reads = tuple(reads)
        self.portal.post(self._wave_opened_on_loop, wave, hyper, reads, self._instant(None))

    def _wave_opened_on_loop(
        self, wave: int, hyper: tuple[Hyper, ...] | None, reads: dict[int, tuple[float, float]], at: float | Marker
    ) -> None:
        live = self._live
        if live is None:
            return
        if wave:
            live.backward()
        if self._recorder is not None:
            firsts = [(bucket, *times) for bucket, times in reads.items()]
            self._recorder.backward_began(live.index, wave, at, firsts)
        if hyper is not None:
            _step(live).hyper = hyper
            live.close()

    def waited_for_room(self, start_s: float, end_s: float) -> None:
        if self._recorder is not None:
            self._recorder.waited("room", start_s, end_s)

    def arrived(self, arrival: Arrival) -> None:
        self.portal.post(self._arrived_on_loop, arrival, self._instant(arrival.marker))

    def _arrived_on_loop(self, arrival: Arrival, at: float | Marker) -> None:
        live = self._live
        if live is None:
            return
        step, bucket = _step(live), arrival.bucket.index
        step.arrivals[bucket, arrival.wave] = arrival
        if live.plan.closes == "last_backward":
            step.present[bucket], step.factor[bucket] = arrival.present, arrival.factor
            if arrival.marker is not None:
                step.markers[bucket] = arrival.marker
        if self._recorder is not None:
            self._recorder.arrived(live.index, arrival.wave, bucket, at)
        live.complete(Action("bwd", bucket, None, arrival.wave))
        self._machinery.note_progress()

    def _instant(self, marker: Marker | None) -> float | Marker:
        """Now, as compute sees it: on an accelerator the host is ahead of it, and a marker tells when it was there."""
        if self._recorder is None or self.device.kind != "cuda":
            return time.perf_counter()
        return self.device.mark() if marker is None else marker

    def _node_done(self, live: LiveStep, action: Action) -> None:
        self._weights.node_done(_step(live), action)


def _check_cores(wanted: tuple[int, ...] | None) -> None:
    allowed = available_cpus()
    for cpu in wanted or ():
        if cpu not in allowed:
            raise ValueError(
                f"cpu_affinity names core {cpu}, and this process may use {', '.join(map(str, allowed))}: name some "
                f"of those, "
                "() to pin to none, or None"
            )


def _step(live: LiveStep) -> Step:
    assert isinstance(live.context, Step)
    return live.context
