"""The few things asked of an accelerator's own library, and torch.cuda's answers (CUDA and ROCm alike).

What another accelerator would need stands here and nowhere else: an object with the methods of ``Surface``.
torch.xpu and torch.mps have streams and events of the same shape; what they lack today is pinning memory
that already exists (``pin`` may raise DeviceError: pageable memory is used then) and, on mps, timing across
streams.

Nothing in this module calls torch.cuda when it is imported: a CPU build of torch reads it without complaint.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from zoff_async.errors import DeviceError


class Event(Protocol):
    """A point in a stream."""

    def record(self, stream: Any) -> None:
        """The point is after everything that ``stream`` has been given so far."""

    def synchronize(self) -> None:
        """Sleep until the point is reached (GIL released)."""

    def query(self) -> bool:
        """Whether the point is reached."""

    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds from this point to ``end_event``; both must be reached."""


class Stream(Protocol):
    """A queue of work on the accelerator, run in order. Hashable; equal where the queue is the same."""

    def wait_event(self, event: Any) -> None:
        """What the stream is given from now on runs after ``event``."""


class Surface(Protocol):
    """One accelerator as its library shows it. All calls are asynchronous unless they say that they sleep."""

    torch_device: torch.device

    def enter_thread(self) -> None:
        """Bind the calling thread to this accelerator."""

    def make_stream(self) -> Stream:
        """A new stream; its small kernels go before those of ordinary streams."""

    def current_stream(self) -> Stream:
        """The stream that the calling thread's kernels go to."""

    def make_event(self, *, sleeping: bool = True) -> Event:
        """A timing event. ``synchronize`` sleeps, or spins for the tightest answer."""

    def on(self, stream: Stream) -> contextlib.AbstractContextManager[Any]:
        """Within it the calling thread's current stream is ``stream``."""

    def empty(self, nbytes: int) -> Tensor:
        """Device memory (uint8) that belongs to the calling thread's current stream."""

    def copy_(self, target: Tensor, source: Tensor) -> None:
        """Copy on the current stream; does not wait where the host's side is pinned."""

    def copy_many_(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        """Copy device to device, each source into its target, in one launch where the library can."""

    def pin(self, staging: Tensor) -> None:
        """Make the pages of a host tensor unmovable. Raises DeviceError with the reason."""

    def unpin(self, staging: Tensor) -> None:
        """Undo ``pin``. No copy may be under way."""


#: Memory that is registered must live as long as its registration, whoever forgets to close a device.
_REGISTERED: dict[int, Tensor] = {}


class TorchCuda:
    """``torch.cuda`` as a Surface. ``cuda`` is the module, or a stand-in for it in tests."""

    def __init__(self, torch_device: torch.device, cuda: Any = None) -> None:
        self._cuda = torch.cuda if cuda is None else cuda
        index = torch_device.index if torch_device.index is not None else self._cuda.current_device()
        self.torch_device = torch.device("cuda", index)

    def enter_thread(self) -> None:
        # A fresh thread is on device 0: without this, waiting for an event of another device would make a
        # context (hundreds of MB) there.
        self._cuda.set_device(self.torch_device)

    def make_stream(self) -> Any:
        return self._cuda.Stream(self.torch_device, priority=-1)

    def current_stream(self) -> Any:
        return self._cuda.current_stream(self.torch_device)

    def make_event(self, *, sleeping: bool = True) -> Any:
        return self._cuda.Event(enable_timing=True, blocking=sleeping)

    def on(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        context: contextlib.AbstractContextManager[Any] = self._cuda.stream(stream)
        return context

    def empty(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self.torch_device)

    def copy_(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def copy_many_(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        torch._foreach_copy_(list(targets), list(sources), non_blocking=True)

    def pin(self, staging: Tensor) -> None:
        self._call("cudaHostRegister", staging.data_ptr(), staging.nbytes, 1)  # 1: pinned for every context
        _REGISTERED[staging.data_ptr()] = staging

    def unpin(self, staging: Tensor) -> None:
        self._call("cudaHostUnregister", staging.data_ptr())
        _REGISTERED.pop(staging.data_ptr(), None)

    def _call(self, function: str, *arguments: int) -> None:
        """Call the runtime library in a thread of its own.

        A failure stays behind as the calling thread's "last error" (torch offers no way to clear it), and
        the next kernel launch of that thread would raise it under a wrong name. So the thread ends with its
        error.
        """
        code = 0
        raised: list[Exception] = []

        def call() -> None:
            nonlocal code
            try:
                with self._cuda.device(self.torch_device):
                    code = int(getattr(self._cuda.cudart(), function)(*arguments))
            except Exception as error:
                raised.append(error)

        thread = threading.Thread(target=call, name="zoff-pin")
        thread.start()
        thread.join()
        if raised or code != 0:
            raise DeviceError(
                f"{function} of {staging_text(arguments)} failed: {raised[0] if raised else f'error {code}'}"
            )


def staging_text(arguments: tuple[int, ...]) -> str:
    """What a call was about, for its error message: bytes where the call had a size."""
    return f"{arguments[1]} bytes" if len(arguments) > 1 else "a staging slab"
