"""What every test runs under: no tuned profile, the same random examples each time."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

os.environ["ZOFF_PROFILE"] = "off"  # a machine's own tuned sizes must not decide what is tested

settings.register_profile("deterministic", derandomize=True, deadline=None)
settings.load_profile("deterministic")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that need a CUDA device are skipped, with the reason, where there is none."""
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="torch sees no CUDA device here")
    for item in items:
        if item.get_closest_marker("cuda"):
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Each test draws the same random numbers, whichever tests ran before it."""
    torch.manual_seed(0)


@pytest.fixture
def one_torch_thread() -> Iterator[None]:
    """Small models on one thread: two would spend their time waiting for each other on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
