"""The contract, on every device there is: see contract.py for what is promised."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from tests.device.contract import CONTRACT, Bench
from tests.device.fake_cuda import FakeCuda
from zoff_async.device import HOSTILE_EARLY, HOSTILE_LATE, EmulatedDevice, HostDevice, open_device
from zoff_async.device.cuda import CudaDevice
from zoff_async.errors import PinnedMemoryWarning


def _fake(fake: FakeCuda, **sizes: int) -> Bench:
    return Bench(CudaDevice(fake, **sizes), read=fake.read)


def _cuda() -> Bench:
    return Bench(open_device("cuda", torch.device("cuda", torch.cuda.current_device())))


BENCHES: dict[str, Callable[[], Bench]] = {
    "host": lambda: Bench(HostDevice()),
    "emulated": lambda: Bench(EmulatedDevice("v100-32g-dgx2")),
    "emulated-slow": lambda: Bench(EmulatedDevice("v100-32g-dgx2", scale=0.02)),
    "emulated-late": lambda: Bench(EmulatedDevice(faults=HOSTILE_LATE), keeps_order=False),
    "emulated-early": lambda: Bench(EmulatedDevice(faults=HOSTILE_EARLY)),
    "fake-lazy": lambda: _fake(FakeCuda()),
    "fake-eager": lambda: _fake(FakeCuda(eager_lanes=True)),
    "fake-tiny-staging": lambda: _fake(FakeCuda(), straight_bytes=64, staging_bytes=128),
    "fake-pageable": lambda: _fake(FakeCuda(pinned_limit_bytes=0)),
    "cuda": _cuda,
}


@pytest.fixture(params=[pytest.param(name, marks=pytest.mark.cuda if name == "cuda" else ()) for name in BENCHES])
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    bench = BENCHES[request.param]()
    yield bench
    bench.device.close()


@pytest.mark.filterwarnings(f"ignore::{PinnedMemoryWarning.__module__}.{PinnedMemoryWarning.__name__}")
@pytest.mark.parametrize("promise", CONTRACT, ids=lambda promise: promise.__name__)
def test_every_device_keeps_the_contract(bench: Bench, promise: Callable[[Bench], None]) -> None:
    promise(bench)
