"""Limits that no plan speaks of, as edges: room on the device, and a caller without gates."""

from __future__ import annotations

from tests.trace.hand import plan, recorded, span
from zoff_async.scheduler import KindCost, simulate
from zoff_async.trace.limits import limited, lived


def added(before, after) -> list[str]:
    return [f"{edge} {edge.rule}" for edge in after.edges if edge not in before.edges]


def test_without_facts_a_plan_has_no_further_limits():
    assert limited(plan(), {}) is plan() or limited(plan(), {}) == plan()


def test_backward_waits_until_an_earlier_bucket_has_left_the_device():
    four = plan(chunks=(1,) * 4, bucket_bytes=())

    assert added(four, limited(four, {"held_buckets": 2})) == ["d2h:0 -> bwd:3 room"]
    assert added(four, limited(four, {"held_buckets": 1})) == ["d2h:0 -> bwd:2 room", "d2h:1 -> bwd:3 room"]


def test_without_gates_the_next_forward_waits_for_every_upload():
    found = added(plan(), limited(plan(), {"gated": False}))

    # fwd:1 waits for h2d:1 in any case; the rule says why it waits for h2d:0.
    assert "h2d:0 -> fwd:1@+1 step-waits-for-uploads" in found


def test_limits_cost_what_they_should_in_a_simulation():
    cost = KindCost({"fwd": 1.0, "bwd": 1.0, "d2h": 5.0})
    four = plan(chunks=(1,) * 4, slots=4, bucket_bytes=())

    free = simulate(four, cost).spans
    held = simulate(limited(four, {"held_buckets": 1}), cost).spans

    def last_backward(spans) -> float:
        return max(s.end_s for s in spans if s.action.kind == "bwd" and s.step == 0)

    assert last_backward(free) == 8.0
    assert last_backward(held) == 16.0  # d2h:1, from 10 to 15, then bwd:3


def test_a_lived_timeline_has_the_limits_in_its_plans():
    whole = recorded(span("fwd:0", "compute", 0, 1), of=plan(), gated=False)

    assert lived(whole).plans[0] == limited(plan(), {"gated": False})
    assert lived(whole).spans == whole.spans
