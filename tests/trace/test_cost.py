"""Costs of measured steps, and layouts read back from plans."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.trace.hand import plan, span
from zoff_async.scheduler import POLICIES, Action, KindCost, Layout
from zoff_async.trace import Pieces
from zoff_async.trace.cost import Regrouped, Scaled, StepCost, layout_of


def test_a_step_costs_the_median_of_what_was_measured_and_nothing_for_what_was_not():
    cost = StepCost([span("d2h:0", "d2h", 0, length) for length in (1, 2, 9)])

    assert cost.seconds(Action.parse("d2h:0")) == 2
    assert cost.seconds(Action.parse("d2h:5")) == 2  # of its kind
    assert cost.seconds(Action.parse("fwd:0")) == 0


def test_scaled_costs_change_the_kinds_that_are_named():
    cost = Scaled(KindCost({"adam": 4.0, "d2h": 2.0}), {"adam": 0.5})

    assert [cost.seconds(Action.parse(text)) for text in ("adam:0.0", "d2h:0")] == [2.0, 2.0]


class Tenth:
    """A tenth of a second a parameter; bucket 1 three times as slow."""

    def __init__(self, pieces: Pieces) -> None:
        self.pieces = pieces

    def seconds(self, action: Action) -> float:
        return self.pieces.numel(action) * (0.3 if action.bucket == 1 else 0.1)


def test_a_bucket_of_two_costs_what_the_two_did_and_half_a_bucket_half():
    old = Pieces((10, 20), 5)
    merged = Regrouped(Tenth(old), old, Pieces((30,), 5))
    split = Regrouped(Tenth(old), old, Pieces((5, 5, 10, 10), 5))

    assert merged.seconds(Action.parse("d2h:0")) == pytest.approx(7.0)
    assert split.seconds(Action.parse("d2h:1")) == pytest.approx(0.5)
    assert split.seconds(Action.parse("d2h:3")) == pytest.approx(3.0)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=5), st.integers(1, 15), st.integers(1, 15))
def test_regrouping_keeps_the_total_of_every_kind(sizes, old_chunk, new_chunk):
    old, new = Pieces(tuple(sizes), old_chunk), Pieces((sum(sizes),), new_chunk)
    cost = Tenth(old)
    regrouped = Regrouped(cost, old, new)

    def chunks(pieces: Pieces) -> list[Action]:
        counts = [-(-numel // pieces.chunk_numel) for numel in pieces.bucket_numel]
        return [Action("adam", b, c) for b, count in enumerate(counts) for c in range(count)]

    assert sum(map(regrouped.seconds, chunks(new))) == pytest.approx(sum(map(cost.seconds, chunks(old))))


@pytest.mark.parametrize("policy", ["serial", "overlap", "in_backward"])
@pytest.mark.parametrize(
    "layout",
    [
        Layout(chunks=(2, 1, 3), slots=2, workers=3, backwards=2, bucket_bytes=(1, 2, 3)),
        Layout(chunks=(1, 1), slots=2, backwards=1, forward_order=(0, 1), backward_order=(1, 0)),
    ],
)
def test_a_plan_tells_the_layout_that_it_was_made_from(policy, layout):
    built = POLICIES[policy](layout)

    assert layout_of(built, layout.backwards) == layout


def test_an_edited_plan_still_tells_its_layout():
    edited = plan().add("ema", after="adam", lane="cpu").serialize("adam", "h2d")

    assert layout_of(edited, 1) == layout_of(plan(), 1)
