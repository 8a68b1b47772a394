"""torch.cuda's answers: what is asked of the module, with a stand-in that has nothing else."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from zoff_async.device import surface
from zoff_async.device.surface import TorchCuda
from zoff_async.errors import DeviceError


class StubCuda:
    """Only the names TorchCuda may use: a device-wide synchronize would be an AttributeError."""

    def __init__(self, code: int = 0) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.code = code

    def current_device(self) -> int:
        return 3

    def set_device(self, device: torch.device) -> None:
        self.calls.append(("set_device", device))

    def Stream(self, device: torch.device, priority: int) -> str:
        self.calls.append(("Stream", device, priority))
        return "stream"

    def Event(self, *, enable_timing: bool, blocking: bool) -> tuple[bool, bool]:
        return enable_timing, blocking

    def current_stream(self, device: torch.device) -> tuple[str, torch.device]:
        return "current", device

    @contextlib.contextmanager
    def stream(self, stream: object) -> Iterator[None]:
        self.calls.append(("enter", stream))
        yield

    @contextlib.contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        self.calls.append(("device", device, threading.current_thread().name))
        yield

    def cudart(self) -> StubCuda:
        return self

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.calls.append(("register", address, nbytes, flags, threading.current_thread().name))
        return self.code

    def cudaHostUnregister(self, address: int) -> int:
        self.calls.append(("unregister", address))
        return self.code


CUDA1 = torch.device("cuda", 1)


def test_events_are_timed_and_sleep_unless_asked_to_spin() -> None:
    """A waiter that spins would take a core from Adam."""
    cuda = TorchCuda(CUDA1, StubCuda())
    assert cuda.make_event() == (True, True)
    assert cuda.make_event(sleeping=False) == (True, False)


def test_everything_is_asked_of_the_parameters_device() -> None:
    """Streams, the current stream, threads: all of cuda:1, whatever device the caller's thread is on."""
    stub = StubCuda()
    cuda = TorchCuda(CUDA1, stub)
    assert cuda.make_stream() == "stream"
    assert cuda.current_stream() == ("current", CUDA1)
    cuda.enter_thread()
    with cuda.on("stream"):
        pass
    assert stub.calls == [("Stream", CUDA1, -1), ("set_device", CUDA1), ("enter", "stream")]


def test_a_device_without_a_number_is_the_current_one() -> None:
    assert TorchCuda(torch.device("cuda"), StubCuda()).torch_device == torch.device("cuda", 3)


def test_memory_is_registered_portably_in_a_thread_of_its_own() -> None:
    """A failed call leaves an error behind in its thread, which must not be the one that launches kernels."""
    stub = StubCuda()
    cuda = TorchCuda(CUDA1, stub)
    staging = torch.zeros(4096, dtype=torch.uint8)
    cuda.pin(staging)
    assert staging.data_ptr() in surface._REGISTERED
    cuda.unpin(staging)
    assert staging.data_ptr() not in surface._REGISTERED
    assert stub.calls == [
        ("device", CUDA1, "zoff-pin"),
        ("register", staging.data_ptr(), 4096, 1, "zoff-pin"),
        ("device", CUDA1, "zoff-pin"),
        ("unregister", staging.data_ptr()),
    ]


def test_a_refused_registration_says_how_much_and_why() -> None:
    cuda = TorchCuda(CUDA1, StubCuda(code=2))
    with pytest.raises(DeviceError) as caught:
        cuda.pin(torch.zeros(4096, dtype=torch.uint8))
    assert str(caught.value) == "cudaHostRegister of 4096 bytes failed: error 2"
    assert surface._REGISTERED == {}


def test_copies_do_not_wait_and_count_versions() -> None:
    """copy_ and _foreach_copy_ under no_grad, as on the accelerator."""
    cuda = TorchCuda(CUDA1, StubCuda())
    weights = [torch.nn.Parameter(torch.zeros(3)) for _ in range(2)]
    with torch.no_grad():
        cuda.copy_(weights[0], torch.ones(3))
        cuda.copy_many_(weights, [torch.full((3,), 2.0)] * 2)
    assert [weight._version for weight in weights] == [2, 1]
    assert all(bool((weight == 2).all()) for weight in weights)


def test_importing_the_cuda_modules_asks_torch_cuda_nothing() -> None:
    """They are read on CPU builds too: importing them must not initialise CUDA."""
    import zoff_async.device.cuda  # noqa: F401

    if not torch.cuda.is_available():
        assert not torch.cuda.is_initialized()
