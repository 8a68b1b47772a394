"""Which weights are current: uploads under way, the reads that wait for them, and edits by others."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterable, Sequence

import numpy as np
from torch import Tensor, nn

from zoff_async import gate as gates
from zoff_async.bucket import Entry
from zoff_async.device import Transfer
from zoff_async.errors import StepError
from zoff_async.failures import Failures, some
from zoff_async.gate import Gate
from zoff_async.scheduler import Action
from zoff_async.state import BucketState
from zoff_async.step import Step

logger = logging.getLogger("zoff_async")


class Weights:
    """The model's weights as an optimizer sees them; what its `Gate` asks.

    From ``step()`` until its upload is done a bucket is *pending*: a read waits until the upload has been enqueued,
    then lets the reader's stream wait for it. While first reads are wanted for the timeline the gate stays closed for
    them too.
    """

    def __init__(self, failures: Failures, model: nn.Module | None, *, note_reads: bool) -> None:
        self._gate = Gate(self)
        self._model = model
        self._ungated: dict[int, Tensor] = {}  # bucket -> a parameter of it that is read elsewhere than in the model
        self._failures = failures
        self._note_reads = note_reads
        self._changed = threading.Condition()
        self._states: Sequence[BucketState] = ()
        self._bucket_of: dict[Tensor, int] = {}
        self._pending: set[int] = set()
        self._told_of_edits = False
        self._pid = os.getpid()
        self._nodes: set[Action] = set()  # the user's own actions that the next forward waits for
        self._step: Step | None = None  # whose uploads are waited for
        self._reads: dict[int, tuple[float, float]] = {}  # bucket -> (asked, got) of its first read, in that order

    def set_states(self, states: Sequence[BucketState]) -> None:
        """The buckets there are now."""
        self._states = states
        self._bucket_of = {entry.parameter: s.bucket.index for s in states for entry in s.bucket.entries}

    # --- gates ---

    @property
    def gated(self) -> bool:
        """Whether there is a model whose reads wait."""
        return self._model is not None

    def gate_model(self) -> None:
        """Gate what the model holds now; parameters that it does not hold are waited for in ``step()``."""
        behind = set() if self._model is None else gates.install(self._model, self._gate)
        self._ungated = {bucket: p for p, bucket in self._bucket_of.items() if p not in behind}

    def ungate_model(self) -> None:
        """Give the model its plain dicts back."""
        if self._model is not None:
            gates.remove(self._model, self._gate)

    def wait_before_return(self, *, all_of_them: bool) -> None:
        """At the end of ``step()``: wait for the weights that no gate stands before."""
        if all_of_them or self._gate.bypassed:
            self.wait_all_current()
        for parameter in self._ungated.values():
            self.wait_current(parameter)

    # --- reads, in callers' threads ---

    @property
    def current(self) -> bool:
        """Whether nothing is pending."""
        return not self._pending and not self._nodes

    def wait_current(self, parameter: Tensor) -> None:
        """Return when this thread's next work sees the parameter's newest weights. Raises what failed meanwhile."""
        bucket = self._bucket_of.get(parameter)
        if bucket is None:
            return
        if os.getpid() != self._pid:
            raise StepError(
                "this model was forked while its weights were on their way: fork before step(), or after synchronize()"
            )
        asked_s = time.perf_counter()
        transfer: Transfer | None = None
        with self._changed:
            while bucket in self._pending or self._nodes:
                transfer = None if self._step is None else self._step.transfers.get(bucket)
                if self._failures.error is not None or (transfer is not None and not self._nodes):
                    break
                self._changed.wait()
        if transfer is not None:
            transfer.make_current_stream_wait()
        self._failures.tell()
        if bucket not in self._reads:
            with self._changed:
                self._reads.setdefault(bucket, (asked_s, time.perf_counter()))
                self._set_gate()

    def wait_all_current(self) -> None:
        """The same for all parameters."""
        if self.current:
            return
        for state in self._states:
            self.wait_current(state.bucket.entries[0].parameter)

    def take_reads(self) -> dict[int, tuple[float, float]]:
        """First reads since the last call, in their order: bucket -> (asked, got), in seconds."""
        with self._changed:
            reads, self._reads = self._reads, {}
            self._set_gate()
        return reads

    # --- uploads ---

    def expect(self, step: Step, nodes: Iterable[Action]) -> None:
        """From now on reads wait for this step's uploads, and for these of its actions.

        Called while the step is under way: what has been uploaded already is not waited for, and what an earlier step
        still has to tell changes nothing any more.
        """
        with self._changed:
            if self._failures.error is not None:
                return  # they will never come
            self._step = step
            self._pending = set(range(len(self._states))) - step.uploaded
            self._nodes = set(nodes) - step.done_nodes
            self._set_gate()

    def enqueued(self, step: Step, bucket: int, transfer: Transfer) -> None:
        """A bucket's upload is under way: streams can wait for it from now on."""
        with self._changed:
            step.transfers[bucket] = transfer
            self._changed.notify_all()

    def uploaded(self, step: Step, bucket: int) -> None:
        """A bucket's weights are those of this step."""
        with self._changed:
            step.uploaded.add(bucket)
            step.transfers.pop(bucket, None)
            if step is self._step:
                self._pending.discard(bucket)
                self._set_gate()
            self._changed.notify_all()

    def node_done(self, step: Step, action: Action) -> None:
        """An action of the user's own has ended; if reads waited for it, they do not any more."""
        with self._changed:
            step.done_nodes.add(action)
            if step is self._step:
                self._nodes.discard(action)
                self._set_gate()
            self._changed.notify_all()

    def release(self) -> None:
        """Nothing is under way any more: after a failure or on closing."""
        with self._changed:
            self._pending.clear()
            self._nodes.clear()
            self._set_gate()
            self._changed.notify_all()

    def _set_gate(self) -> None:
        wanted = self._note_reads and len(self._reads) < len(self._states)
        self._gate.open = self.current and not wanted

    # --- edits by others ---

    def adopt_edits(self) -> None:
        """Take over weights that somebody else has written since ours were sent; a warning the first time."""
        edited = self._edited()
        changed = sum(self._states[e.bucket.index].adopt_weights(e, e.bucket.dtype) for e in edited)
        if changed:
            level, self._told_of_edits = (logging.DEBUG if self._told_of_edits else logging.WARNING), True
            logger.log(
                level,
                "%d elements of %s were changed outside the optimizer and have been taken into the masters",
                changed,
                some([entry.name for entry in edited]),
            )

    def refuse_edits(self, why: str) -> None:
        """Raise if there are edits that cannot be told from our own update now."""
        edited = self._edited()
        if edited:
            raise StepError(
                f"the weights of {edited[0].name!r} were edited while {why}: call optimizer.synchronize() before "
                f"editing weights"
            )

    def suspect_all(self) -> None:
        """Compare every weight with its master at the next opportunity."""
        for state in self._states:
            for entry in state.bucket.entries:
                entry.suspect()

    def _edited(self) -> list[Entry]:
        pending = self._pending.copy()
        return [
            entry
            for state in self._states
            for entry in state.bucket.entries
            if entry.weights_edited(in_flight=state.bucket.index in pending)
        ]


def finite(state: BucketState, present: np.ndarray) -> bool:
    """Whether every gradient that is present in a bucket is finite."""
    return bool(np.isfinite(state.squares[present]).all())
