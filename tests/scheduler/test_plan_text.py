"""Plans as text: golden files, and reading back what was written."""

from __future__ import annotations

from pathlib import Path

import pytest

from zoff_async.errors import PlanError
from zoff_async.scheduler import POLICIES, Layout, StepPlan, delayed_flush, in_backward, overlap

GOLDEN = Path(__file__).parent / "golden"
LAYOUT = Layout(chunks=(2, 1, 3), slots=2, workers=2, bucket_bytes=(800, 400, 1200))
PLANS = {
    **{name: policy(LAYOUT) for name, policy in POLICIES.items()},
    "in_backward_of_two": in_backward(Layout(chunks=(2, 1, 3), slots=2, backwards=2)),
    "delayed_flush": delayed_flush(LAYOUT),
    "overlap_serialized": overlap(LAYOUT).serialize("adam", "h2d"),
    "overlap_with_ema": overlap(LAYOUT).add("ema", after="adam", before="fwd@+1"),
}


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_is_written_as_in_its_golden_file(name):
    assert str(PLANS[name]) == (GOLDEN / f"{name}.plan").read_text()


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_reads_back_from_its_golden_file(name):
    assert StepPlan.parse((GOLDEN / f"{name}.plan").read_text()) == PLANS[name]


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_is_described_as_in_its_golden_file(name):
    assert PLANS[name].describe() == (GOLDEN / f"{name}.txt").read_text()


def test_a_plan_is_drawn_as_in_its_golden_file():
    assert overlap(Layout(chunks=(1,))).to_dot() == (GOLDEN / "overlap.dot").read_text()


def test_a_large_plan_is_described_in_few_lines():
    text = overlap(Layout(chunks=(16,) * 400)).describe()

    assert len(text.splitlines()) < 40
    assert max(map(len, text.splitlines())) < 400


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("lane d2h", "cannot read line 3 of the plan, 'lane d2h': expected NAME CAPACITY"),
        (
            "lane d2h one",
            "cannot read line 3 of the plan, 'lane d2h one': invalid literal for int() with base 10: 'one'",
        ),
        ("color red", "cannot read line 3 of the plan, 'color red': 'color' is not a word of a plan"),
        (
            "  d2h:0 -> acc:0",
            "cannot read line 3 of the plan, 'd2h:0 -> acc:0': "
            "expected 'rule NAME' and below it lines of 'ACTION... -> ACTION...'",
        ),
        (
            "actions d2h:O",
            "cannot read line 3 of the plan, 'actions d2h:O': cannot read action 'd2h:O': expected "
            "KIND[:BUCKET[.CHUNK]][#BACKWARD][@+LAG], for example 'norm', 'd2h:3', 'adam:3.7#1' or 'fwd:0@+1', "
            "with KIND a lower-case word",
        ),
    ],
)
def test_a_line_that_cannot_be_read_is_named(line, message):
    with pytest.raises(PlanError) as caught:
        StepPlan.parse(f"plan mine\nlane cpu 1\n{line}\n")

    assert str(caught.value) == message


def test_a_plan_that_is_read_is_checked():
    text = str(overlap(LAYOUT)).replace("lane d2h 1\n", "")

    with pytest.raises(PlanError) as caught:
        StepPlan.parse(text)
    assert str(caught.value) == (
        "kind 'd2h' runs on lane 'd2h', which plan 'overlap' does not have; its lanes are compute, cpu, h2d, net"
    )


def test_a_users_coroutine_is_not_written():
    async def run(action, step): ...

    plan = overlap(LAYOUT).add("ema", after="adam", run=run)
    read = StepPlan.parse(str(plan))

    assert plan.runs == {plan.actions[-1]: run}
    assert read.runs == {}
    assert read != plan
