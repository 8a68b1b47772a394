"""examples/tensorboard_metrics.py runs and writes what it says."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "tensorboard_metrics.py"


@pytest.mark.integrations
@pytest.mark.filterwarnings("ignore")  # tensorboard's own
def test_every_step_is_in_the_log_once(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    runpy.run_path(str(EXAMPLE))["main"](steps=16, folder=str(tmp_path))
    log = EventAccumulator(str(tmp_path))
    log.Reload()

    assert [event.step for event in log.Scalars("step_s")] == list(range(15))
    assert {"busy/cpu", "exposed_s/adam", "hidden_s/d2h", "parameters_per_s/adam"} <= set(log.Tags()["scalars"])
