"""What the runtime asks of an accelerator: copies in both directions, events, and memory for them.

The runtime knows nothing else about a device. Four rules hold for every implementation:

- ``mark`` is called from whatever thread runs the model (autograd's threads too) and never blocks.
- ``copy_to_host`` and ``copy_to_device`` are called from the loop's thread, enqueue and return at once.
  Copies of one direction run in the order in which they were enqueued. ``done(error, start_s, end_s)`` is
  called once for each, from a thread of the device, with ``time.perf_counter`` times; after it the device
  holds no reference to the tensors. It may come before the call that enqueued has returned.
- a ``Transfer`` keeps its tensors alive until then, so that no allocator hands their memory out while it is
  copied.
- a copy writes its views or targets and nothing else: elements of ``flat`` between two views keep their
  values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

#: Told once a copy, from a thread of the device: ``(error or None, start_s, end_s)``.
Done = Callable[[BaseException | None, float, float], None]


class Marker(Protocol):
    """A point that the compute stream will reach: what was enqueued before it is visible after it."""

    def wait(self) -> None:
        """Block the calling thread until compute has reached the point (GIL released)."""

    def reached_s(self) -> float | None:
        """When compute reached the point, as a ``time.perf_counter`` time; None while it has not."""


class Transfer(Protocol):
    """One enqueued copy."""

    def make_current_stream_wait(self) -> None:
        """Let what this thread enqueues from now on see the copy.

        On a device with streams the stream waits and the thread does not; elsewhere the thread waits.
        Raises what the copy raised.
        """


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes a device holds for copies: pinned and pageable on the host, staging on the accelerator."""

    pinned_bytes: int
    pageable_bytes: int
    staging_bytes: int


@runtime_checkable
class Device(Protocol):
    """An accelerator as the runtime sees it. See the module's text for the four rules."""

    name: str
    #: "host" | "emulated" | "cuda": printed beside every figure.
    kind: str
    #: Where the parameters must be.
    torch_device: torch.device

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A zeroed 1-D host tensor for staging: pinned where possible, else pageable with one warning."""

    def free(self, staging: Tensor) -> None:
        """Give a tensor of ``allocate`` back; its copies must be done."""

    def mark(self, streams: Sequence[object] = ()) -> Marker:
        """What the calling thread's current stream (and ``streams``) has been given so far."""

    def current_stream(self) -> object:
        """A hashable name of the calling thread's current compute stream."""

    def copy_to_host(
        self,
        sources: Sequence[Tensor],  # on the device, any shape
        views: Sequence[Tensor],  # pieces of flat shaped like the sources, same dtype
        flat: Tensor,  # the contiguous host range that covers all views, in order
        after: Marker,
        done: Done,
    ) -> Transfer:
        """Enqueue a copy of the sources into their views, once compute has reached ``after``.

        Raises ClosedError after ``close``; whatever else goes wrong reaches ``done``.
        """

    def copy_to_device(
        self,
        flat: Tensor,  # the contiguous host range that covers all views, in order
        views: Sequence[Tensor],  # pieces of flat shaped like the targets, same dtype
        targets: Sequence[Tensor],  # on the device; written by copy_ under no_grad, so versions count
        after: Marker,
        done: Done,
        then: Callable[[], None] | None = None,  # called where the copy runs, behind it and before anyone may see it
    ) -> Transfer:
        """Enqueue a copy of the views into the targets, once compute has reached ``after``.

        Raises ClosedError after ``close``; whatever else goes wrong reaches ``done``.
        """

    def release(self, flat: Tensor) -> None:
        """The runtime is finished with this range: with what a D2H brought, or with what an H2D read.

        Called once the copy is done and its values are used up, from any thread. Costs nothing on real
        devices; an emulated one may fill the range with NaN, so that a later read shows.
        """

    def memory(self) -> DeviceMemory:
        """What is held now."""

    def close(self) -> None:
        """Finish every copy that has begun, end the threads, give the memory back. Idempotent.

        Every copy is told: one that had not begun gets ClosedError.
        """
