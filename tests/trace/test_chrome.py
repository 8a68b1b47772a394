"""Trace files: the golden file, what viewers need, and torch.profiler's clock."""

from __future__ import annotations

import gzip
import json
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from torch.profiler import ProfilerActivity, profile

from tests.trace.hand import PIECES, plan, recorded, span, timeline
from zoff_async.scheduler import Action, KindCost, Layout, Span, overlap, simulate
from zoff_async.trace import Clock, Recorder, Timeline, Wait, named
from zoff_async.trace.chrome import PROCESS, document, save

GOLDEN = Path(__file__).parent / "golden" / "two_buckets.json"


def example() -> Timeline:
    waits = (Wait("weights", 0, 14.0, 15.0), Wait("step", None, 22.0, 22.5))
    return replace(timeline(steps=2), waits=waits, clock=Clock(1_700_000_000_000_000_000, 0.0))


def events(found: Timeline, phase: str) -> list[dict]:
    return [event for event in document(found)["traceEvents"] if event["ph"] == phase]


def test_the_golden_file_is_what_is_written(tmp_path):
    """To renew it after a change that is meant: write example() over the golden file, and look at it in a viewer."""
    save(example(), tmp_path / "trace.json")

    assert json.loads((tmp_path / "trace.json").read_text()) == json.loads(GOLDEN.read_text())


def test_a_lane_is_a_named_thread_in_the_order_of_the_plan():
    names = [event["args"]["name"] for event in events(timeline(), "M") if event["name"] == "thread_name"]

    assert names == ["steps", "compute", "d2h", "cpu", "h2d"]


def test_slices_of_a_thread_never_overlap_and_have_a_length():
    two = Timeline.of(simulate(overlap(Layout(chunks=(3,) * 4, workers=2)), KindCost({}, 1.0), steps=3))
    by_thread: dict[int, list[dict]] = {}
    for event in events(two, "X"):
        by_thread.setdefault(event["tid"], []).append(event)

    for slices in by_thread.values():
        slices.sort(key=lambda event: event["ts"])
        assert all(event["dur"] > 0 and event["ts"] >= 0 for event in slices)
        assert all(a["ts"] + a["dur"] <= b["ts"] + 1e-6 for a, b in pairwise(slices))


def test_an_action_of_no_length_is_still_a_slice():
    (found,) = events(recorded(span("norm", "cpu", 1, 1)), "X")

    assert found["dur"] == 0.001


def test_arrows_tie_the_ends_of_plan_edges_together():
    found = timeline(steps=3)
    slices = [event for event in events(found, "X") if "ns" in event["args"]]
    starts = {event["id"]: event for event in events(found, "s")}
    ends = {event["id"]: event for event in events(found, "f")}

    def holder(arrow: dict) -> set[str]:
        return {
            f"{s['name']}@{s['args']['step']}"
            for s in slices
            if s["tid"] == arrow["tid"] and s["ts"] <= arrow["ts"] < s["ts"] + s["dur"]
        }

    assert starts.keys() == ends.keys()
    assert all(0 < number < 2**53 for number in starts)
    tied = {(min(holder(starts[n])), min(holder(ends[n])), starts[n]["name"]) for n in starts}
    assert ("h2d:0@0", "fwd:0@1", "weights-before-forward") in tied
    assert ("norm@1", "adam:1.0@1", "norm-barrier") in tied
    assert len(tied) == len(starts)


def test_counters_tell_slots_and_bytes():
    found = events(timeline(), "C")

    assert {event["name"] for event in found} == {
        "d2h slots in use",
        "d2h bytes in flight",
        "h2d slots in use",
        "h2d bytes in flight",
    }
    assert max(event["args"].get("bytes", 0) for event in found if event["name"].startswith("d2h")) == 800


def test_time_zero_of_the_file_is_the_first_span_in_unix_time():
    found = document(replace(timeline(), clock=Clock(5_000_000_000, -1.0)))

    assert found["baseTimeNanoseconds"] == 6_000_000_000
    assert min(event["ts"] for event in found["traceEvents"] if event["ph"] == "X") == 0
    assert document(timeline())["baseTimeNanoseconds"] == 0  # virtual seconds are no time of day


def test_thread_numbers_are_those_of_no_process_of_the_system():
    assert {event["pid"] for event in document(timeline())["traceEvents"]} == {PROCESS}
    assert PROCESS > 4194303  # the largest that Linux gives


def test_a_file_that_ends_in_gz_is_compressed_and_the_same_each_time(tmp_path):
    for name in ("one.json.gz", "two.json.gz"):
        save(example(), tmp_path / name)

    data = (tmp_path / "one.json.gz").read_bytes()
    assert json.loads(gzip.decompress(data)) == document(example())
    assert data == (tmp_path / "two.json.gz").read_bytes()


def test_a_file_that_cannot_be_written_leaves_the_old_one(tmp_path, monkeypatch):
    path = tmp_path / "trace.json"
    path.write_text("old")
    monkeypatch.setattr(Path, "replace", lambda self, target: (_ for _ in ()).throw(OSError("disk full")))

    with pytest.raises(OSError, match="disk full"):
        save(example(), path)

    assert path.read_text() == "old"
    assert [found.name for found in tmp_path.iterdir()] == ["trace.json"]


def test_a_torch_profiler_trace_of_the_same_run_lies_where_ours_does(tmp_path):
    """The same work, told by both: merged by baseTimeNanoseconds, the ranges agree."""
    recorder = Recorder(2)
    recorder.opened(0, plan(), PIECES)

    def job() -> None:
        start_s = time.perf_counter()
        total = sum(range(200_000))
        recorder(Span(Action("adam", 0, 0), "cpu", 0, start_s, time.perf_counter(), total * 0))

    with profile(activities=[ProfilerActivity.CPU]) as torchs:
        named("adam:0.0", job)()
    torchs.export_chrome_trace(str(tmp_path / "torch.json"))
    recorder.timeline().save(tmp_path / "ours.json")

    def unix_ns(path: Path) -> tuple[float, float]:
        found = json.loads(path.read_text())
        (event,) = [e for e in found["traceEvents"] if e.get("name") == "adam:0.0" and e["ph"] == "X"]
        start = found["baseTimeNanoseconds"] + event["ts"] * 1e3
        return start, start + event["dur"] * 1e3

    (ours_from, ours_to), (torch_from, torch_to) = unix_ns(tmp_path / "ours.json"), unix_ns(tmp_path / "torch.json")
    # Ours is inside theirs, to within what two clocks and a busy machine may differ by.
    assert torch_from - 2e6 < ours_from < ours_to < torch_to + 2e6
