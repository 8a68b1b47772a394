"""Timelines of real training: they keep their plans, stay bounded, and survive a file."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import zoff_async as zoff
from zoff_async.trace.chrome import document


def train(
    steps: int,
    *,
    policy: str = "overlap",
    gated: bool = True,
    backwards: int = 1,
    trace_steps: int = 6,
    device: str = "host",
) -> zoff.Timeline:
    """A small model for so many steps; the timeline of the last ones."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 40), nn.GELU(), nn.Linear(40, 40), nn.GELU(), nn.Linear(40, 16))
    config = zoff.OffloadConfig(
        device=device,
        bucket_bytes=4000,
        chunk_numel=500,
        workers=2,
        trace_steps=trace_steps,
        backwards_per_step=backwards if policy == "in_backward" else None,
    )
    x = torch.randn(8, 16)
    owner = model if gated else None
    with zoff.OffloadAdamW(model.parameters(), lr=1e-3, model=owner, policy=policy, config=config) as optimizer:
        for _ in range(steps):
            for _ in range(backwards):
                model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.synchronize()
        return optimizer.timeline


@pytest.mark.parametrize(
    ("policy", "gated", "backwards"),
    [
        ("serial", True, 1),
        ("overlap", True, 2),
        ("overlap", False, 1),
        ("in_backward", True, 2),
        ("in_backward", False, 1),
        ("delayed", True, 1),
        ("delayed", False, 2),
    ],
)
def test_a_real_run_keeps_its_plan_and_has_every_action_once(policy, gated, backwards):
    found = train(6, policy=policy, gated=gated, backwards=backwards)
    whole = [step for step in found.steps if step in (2, 3, 4)]

    assert found.check() == []
    assert whole == [2, 3, 4]
    for step in whole:
        plan = found.plans[step]
        wanted = {
            action.later(backward=number)
            for action in plan.actions
            for number in range(backwards if plan.parts[action.kind] == "backward" else 1)
        }
        assert {span.action for span in found.step(step).spans} == wanted


@pytest.mark.parametrize("policy", ["overlap", "in_backward", "delayed"])
def test_a_real_run_has_a_report_a_file_and_a_drawing(policy, tmp_path):
    found = train(6, policy=policy)
    found.save(tmp_path / "trace.json.gz")
    back = zoff.Timeline.load(tmp_path / "trace.json.gz")
    report = back.report()

    assert report.facts["policy"] == policy
    assert report.facts["device_kind"] == "host"
    assert report.step_s > 0
    assert report.over_bound >= 0.5  # medians of actions against the median of steps
    assert sum(item.end_s - item.start_s + item.gap_s for item in report.critical_path) > 0
    assert {lane.lane for lane in report.lanes} == {"compute", "d2h", "cpu", "h2d"}
    assert back.plans == found.plans
    assert "fwd" in back.gantt()


def test_the_ring_is_bounded_and_its_file_valid_after_many_steps():
    found = train(40, trace_steps=5)
    actions = len(found.plans[found.steps[-1]].actions)
    events = document(found)["traceEvents"]

    assert len(found.steps) <= 6
    assert len(found.spans) <= 6 * actions
    assert len(found.waits) <= 6 * actions
    slices = [event for event in events if event["ph"] == "X"]
    assert all(event["ts"] >= 0 and event["dur"] > 0 for event in slices)
    json.dumps(events, allow_nan=False)


def test_bytes_and_parameters_add_up_to_the_models():
    found = train(5)
    (step,) = [step for step in found.steps if step == 3]
    spans = found.step(step).spans
    numel = sum(found.pieces.bucket_numel) if found.pieces else 0

    assert numel == sum(p.numel() for p in nn.Linear(16, 40).parameters()) + 40 * 40 + 40 + 40 * 16 + 16
    assert sum(span.bytes for span in spans if span.action.kind == "d2h") == 4 * numel
    assert sum(span.bytes for span in spans if span.action.kind == "h2d") == 4 * numel
    assert sum(found.numel(span.action) for span in spans if span.action.kind == "adam") == numel


def test_with_tracing_off_there_is_nothing():
    found = train(3, trace_steps=0)

    assert found == zoff.Timeline(())


def test_compute_comes_before_what_it_releases():
    found = train(5)
    ends = {(s.step, str(s.action)): s.end_s for s in found.spans if s.action.kind == "bwd"}
    copies = [s for s in found.spans if s.action.kind == "d2h" and (s.step, f"bwd:{s.action.bucket}") in ends]

    assert copies
    assert all(ends[s.step, f"bwd:{s.action.bucket}"] <= s.start_s for s in copies)
