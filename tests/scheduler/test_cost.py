"""What actions cost: numbers a kind, measurements, figures of a machine."""

from __future__ import annotations

import pytest

from zoff_async.scheduler import Action, HardwareCost, KindCost, MeasuredCost, Span


def span(text, lasts_s, step=0):
    return Span(Action.parse(text), "cpu", step, 10.0, 10.0 + lasts_s, 0)


def test_a_kind_costs_its_number():
    cost = KindCost({"adam": 3}, other_s=0.5)

    assert cost.seconds(Action("adam", 3, 7)) == 3
    assert cost.seconds(Action("ema")) == 0.5
    assert KindCost({}).seconds(Action("adam", 3, 7)) == 0


def test_negative_seconds_are_refused():
    with pytest.raises(ValueError, match=r"^cost of adam is -1: seconds cannot be negative$"):
        KindCost({"adam": -1})
    with pytest.raises(ValueError, match=r"^cost of other_s is nan: seconds cannot be negative$"):
        KindCost({}, other_s=float("nan"))


def test_a_measured_action_costs_its_median():
    cost = MeasuredCost([span("d2h:0", 1), span("d2h:0#1", 2), span("d2h:0", 9, step=1), span("d2h:1", 4)])

    assert cost.seconds(Action("d2h", 0)) == 2
    assert cost.seconds(Action("d2h", 0, backward=2)) == 2
    assert cost.seconds(Action("d2h", 1)) == 4


def test_an_action_that_was_not_measured_costs_the_median_of_its_kind():
    assert MeasuredCost([span("adam:0.0", 1), span("adam:0.1", 3)]).seconds(Action("adam", 9, 9)) == 2


def test_what_was_never_measured_is_refused():
    with pytest.raises(ValueError, match=r"^spans is empty: run a step with tracing on first$"):
        MeasuredCost([])
    with pytest.raises(ValueError, match=r"^no span of kind 'norm' was measured; kinds are adam$"):
        MeasuredCost([span("adam:0.0", 1)]).seconds(Action("norm"))


MACHINE = {
    "bucket_numel": (1000, 250),
    "chunk_numel": 400,
    "tokens": 10,
    "flops_per_s": 1e6,
    "d2h_bytes_per_s": 1e4,
    "h2d_bytes_per_s": 2e4,
    "adam_s_per_element": 1e-3,
}


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("fwd:0", 2 * 1000 * 10 / 1e6),
        ("bwd:0", 4 * 1000 * 10 / 1e6),
        ("d2h:0", 2 * 1000 / 1e4),
        ("h2d:1", 2 * 250 / 2e4),
        ("acc:0", 0.0),
        ("adam:0.0", 0.4),
        ("adam:0.2", 0.2),
        ("adam:1.0", 0.25),
        ("norm", 0.0),
        ("ema:0", 0.0),
        ("d2h:7", 0.0),
    ],
)
def test_the_figures_of_a_machine_give_seconds(text, seconds):
    assert HardwareCost(**MACHINE).seconds(Action.parse(text)) == pytest.approx(seconds)


def test_recomputing_starting_and_summing_cost_extra():
    cost = HardwareCost(**MACHINE, recompute=True, start_s=1.0, acc_s_per_element=1e-3)

    assert cost.seconds(Action("bwd", 0)) == pytest.approx(1 + 0.06)
    assert cost.seconds(Action("acc", 0)) == pytest.approx(1 + 1)
    assert cost.seconds(Action("norm")) == 1


def test_it_knows_the_chunks_of_its_layout():
    assert HardwareCost(**MACHINE).chunks == (3, 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"flops_per_s": 0}, "flops_per_s is 0: it must be above 0"),
        ({"tokens": -1}, "tokens is -1: it must be above 0"),
        ({"chunk_numel": 0}, "bucket_numel is (1000, 250), chunk_numel 0: sizes are at least 1"),
        ({"bucket_numel": ()}, "bucket_numel is (), chunk_numel 400: sizes are at least 1"),
    ],
)
def test_figures_that_make_no_sense_are_refused(change, message):
    with pytest.raises(ValueError) as caught:
        HardwareCost(**{**MACHINE, **change})

    assert str(caught.value) == message
