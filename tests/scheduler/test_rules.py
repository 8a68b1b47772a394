"""Whatever the plan, the durations and the priorities: edges hold, numbers agree, bounds bound."""

from __future__ import annotations

import zlib
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.scheduler.fake_machine import FakeMachine, Race, by_hand
from zoff_async.scheduler import (
    POLICIES,
    Action,
    Edge,
    Kind,
    KindCost,
    Lane,
    Layout,
    StepPlan,
    overlap,
    simulate,
    validate,
)
from zoff_async.scheduler.simulate import run_plan

DURATIONS = (0.0, 0.25, 1.0, 1.0, 2.0, 3.5)


class DrawnCost:
    """A duration for every action, drawn from a seed; ``slow`` ones take long in the first backward."""

    def __init__(self, seed: int, slow: str = "") -> None:
        self.seed = seed
        self.slow = slow

    def seconds(self, action: Action) -> float:
        if self.slow and str(action).startswith(self.slow) and not action.backward:
            return 20.0
        return DURATIONS[zlib.crc32(f"{self.seed} {action}".encode()) % len(DURATIONS)]


# Random plans


@st.composite
def plans(draw):
    """Any sound plan: five kinds on three lanes in all parts, with edges of all sorts."""
    lanes = tuple(Lane(name, draw(st.integers(1, 3))) for name in ("a", "b", "c"))
    kinds = tuple(
        Kind(name, draw(st.sampled_from("abc")), draw(st.sampled_from(["open", "backward", "backward", "close"])))
        for name in ("k", "l", "m", "n", "o")
    )
    part = {kind.name: ("open", "backward", "close").index(kind.part) for kind in kinds}
    actions = [Action(kind.name, bucket) for kind in kinds for bucket in range(draw(st.integers(1, 3)))]
    # Edges go from left to right in an order that keeps the parts in theirs; priorities are another order.
    order = sorted(draw(st.permutations(actions)), key=lambda action: part[action.kind])
    pairs = st.tuples(st.integers(0, len(order) - 1), st.integers(0, len(order) - 1))
    edges = []
    for i, j in draw(st.lists(pairs, max_size=25)):
        if i < j:
            edges.append(Edge(order[i], order[j], "inside"))
    for i, j in draw(st.lists(pairs, max_size=8)):
        edges.append(Edge(order[i], order[j].later(lag=1), "next-step"))
        if part[order[i].kind] == part[order[j].kind] == 1:
            edges.append(Edge(order[j], order[i].later(backward=1), "next-backward"))
    return StepPlan("random", tuple(draw(st.permutations(actions))), tuple(edges), kinds, lanes)


def instances(plan, steps, waves):
    return sorted(
        (step, str(action.later(backward=wave)))
        for step in range(steps)
        for action in plan.actions
        for wave in range(waves if plan.parts[action.kind] == "backward" else 1)
    )


def broken_edges(plan, spans):
    """Pairs of spans that ran against an edge between them."""
    by_action = {}
    for span in spans:
        by_action.setdefault(span.action.template(), []).append(span)
    waved = {action: plan.parts[action.kind] == "backward" for action in plan.actions}
    wrong = []
    for edge in plan.edges:
        target = edge.after.template()
        for before in by_action[edge.before]:
            for after in by_action[target]:
                if after.step - before.step != edge.after.lag:
                    continue
                if edge.after.lag and after.action.backward:
                    continue  # into the first backward of the next step
                both = waved[edge.before] and waved[target] and not edge.after.lag
                if both and after.action.backward - before.action.backward != edge.after.backward:
                    continue
                if after.start_s < before.end_s:
                    wrong.append((edge, before, after))
    return wrong


def overfull(plan, spans):
    """Instants at which a lane ran more than it has room for."""
    wrong = []
    for lane in plan.lanes:
        mine = [span for span in spans if span.lane == lane.name and span.end_s > span.start_s]
        events = sorted([(s.start_s, 1) for s in mine] + [(s.end_s, -1) for s in mine], key=lambda e: (e[0], e[1]))
        running = 0
        for time_s, change in events:
            running += change
            if running > lane.capacity:
                wrong.append((lane.name, time_s))
    return wrong


@given(plans(), st.integers(0, 10**6), st.integers(1, 4), st.integers(1, 3))
@settings(max_examples=150)
def test_every_random_plan_runs_each_action_once_and_keeps_every_edge(plan, seed, steps, waves):
    validate(plan)
    cost = DrawnCost(seed)
    spans = run_plan(plan, cost, steps, waves)

    assert sorted((span.step, str(span.action)) for span in spans) == instances(plan, steps, waves)
    assert broken_edges(plan, spans) == []
    assert overfull(plan, spans) == []
    assert run_plan(plan, cost, steps, waves) == spans
    alone_s = sum(cost.seconds(span.action) for span in spans)
    assert max(span.end_s for span in spans) <= alone_s + 1e-9


@given(plans())
@settings(max_examples=60)
def test_every_random_plan_reads_back(plan):
    assert StepPlan.parse(str(plan)) == plan
    assert plan.describe()
    assert plan.to_dot().count("->") == len(plan.edges)


# Policies

layouts = st.builds(
    lambda chunks, slots, workers, backwards, order: Layout(
        tuple(chunks), slots=slots, workers=workers, backwards=backwards, backward_order=tuple(order(len(chunks)))
    ),
    st.lists(st.integers(1, 3), min_size=1, max_size=5),
    st.integers(1, 6),
    st.integers(1, 3),
    st.integers(1, 3),
    st.sampled_from([range, lambda n: range(n - 1, -1, -1), lambda n: sorted(range(n), key=lambda i: (i % 2, i))]),
)


@pytest.mark.parametrize("name", POLICIES)
@given(layout=layouts, seed=st.integers(0, 10**6), shuffle=st.randoms(use_true_random=False))
@settings(max_examples=60)
def test_every_policy_gives_the_numbers_of_the_plain_loop(name, layout, seed, shuffle):
    """Whatever takes how long, and in whatever order of priorities."""
    plan = POLICIES[name](layout)
    mixed = list(plan.actions)
    shuffle.shuffle(mixed)
    waves = plan.backwards or layout.backwards
    expected = by_hand(layout, 4, waves, stale=plan.stale)

    for variant in (plan, replace(plan, actions=tuple(mixed))):
        assert FakeMachine(layout, variant, DrawnCost(seed).seconds).train(4, waves) == expected


@pytest.mark.parametrize(
    ("name", "rule", "slots", "slow"),
    [
        ("overlap", "gradient", 1, "bwd"),
        ("overlap", "accumulate-in-order", 2, "acc:0"),
        ("overlap", "slot-reuse", 1, "acc"),
        ("overlap", "update", 1, "adam"),
        ("overlap", "weights-before-forward", 1, "h2d"),
        ("in_backward", "gradient", 1, "d2h"),
        ("in_backward", "slot-reuse", 1, "adam"),
        ("delayed", "gradient-store", 1, "adam"),
        ("delayed", "weights-in-use", 1, "bwd"),
    ],
)
def test_the_machine_notices_a_missing_rule(name, rule, slots, slow):
    """So the numbers above agree because of the rules, not because the machine is blind."""
    backwards = None if name == "overlap" else 1
    layout = Layout((2, 1, 2), slots=slots, workers=3, backwards=backwards)
    plan = POLICIES[name](layout)
    plan = replace(plan, edges=tuple(edge for edge in plan.edges if edge.rule != rule))
    waves = backwards or 2
    expected = by_hand(layout, 4, waves, stale=plan.stale)

    def goes_wrong(seed):
        try:
            return FakeMachine(layout, plan, DrawnCost(seed, slow).seconds).train(4, waves) != expected
        except (Race, AssertionError, KeyError, TypeError):
            return True

    assert any(goes_wrong(seed) for seed in range(5))


@given(layout=layouts, seed=st.integers(0, 10**6), steps=st.integers(1, 5))
@settings(max_examples=60)
def test_no_policy_beats_the_resource_bound_or_is_slower_than_serial(layout, seed, steps):
    layout = replace(layout, backwards=1)
    cost = DrawnCost(seed)
    serial_s = simulate(POLICIES["serial"](layout), cost, steps=steps).total_s
    for policy in POLICIES.values():
        found = simulate(policy(layout), cost, steps=steps)
        assert found.total_s >= steps * found.resource_bound_s - 1e-9
        assert found.total_s <= serial_s + 1e-9
        for name, staging in {staging.name: staging for staging in found.plan.staging}.items():
            assert found.peak_slots[name] <= staging.slots


@given(layout=layouts, seed=st.integers(0, 10**6))
@settings(max_examples=30)
def test_every_policy_keeps_its_edges_and_lanes(layout, seed):
    for policy in POLICIES.values():
        plan = policy(layout)
        spans = run_plan(plan, DrawnCost(seed), 3, plan.backwards or layout.backwards)
        assert broken_edges(plan, spans) == []
        assert overfull(plan, spans) == []


def test_a_wrong_edge_would_be_noticed():
    """The checks above are not blind either."""
    plan = overlap(Layout((1, 1)))
    spans = run_plan(plan, KindCost({}, other_s=1.0), 2, 1)
    late = [span._replace(start_s=span.start_s - 0.5) if span.action.kind == "adam" else span for span in spans]

    assert broken_edges(plan, late)
    assert overfull(plan, [*spans, *(span._replace(step=9) for span in spans)])
