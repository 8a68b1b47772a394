"""Ranges for torch's profiler: there when one runs, nothing otherwise."""

from __future__ import annotations

from torch.profiler import ProfilerActivity, profile

from zoff_async.trace import named, named_range
from zoff_async.trace.profiler import is_profiling


def test_without_a_profiler_the_job_itself_comes_back():
    def job() -> None:
        """Nothing."""

    assert named("adam:0.0", job) is job
    assert named_range("d2h:0") is named_range("d2h:1")
    with named_range("d2h:0"):
        assert not is_profiling()


def test_with_a_profiler_the_job_runs_in_a_range_named_like_its_action():
    done = []
    with profile(activities=[ProfilerActivity.CPU]) as found:
        named("adam:0.0", lambda: done.append(is_profiling()))()
        with named_range("d2h:3"):
            pass

    assert done == [True]
    assert {"adam:0.0", "d2h:3"} <= {event.name for event in found.events()}
