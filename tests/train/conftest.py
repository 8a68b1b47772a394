"""Training tests run small models, all of them on one torch thread."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _on_one_torch_thread(one_torch_thread: None) -> None:
    pass
