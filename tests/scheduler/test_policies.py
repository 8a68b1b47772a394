"""Policies: what each allows, as orders in virtual time, and what each refuses."""

from __future__ import annotations

import pytest

from tests.scheduler.virtual_log import edges, timed
from zoff_async.errors import PlanError
from zoff_async.scheduler import (
    POLICIES,
    Layout,
    Staging,
    delayed,
    delayed_flush,
    in_backward,
    overlap,
    policy,
    serial,
    validate,
)

THREE = Layout(chunks=(1, 1, 1), slots=2)
#: Forward takes no time, so that a step begins with its gradients.
SECONDS = {"bwd": 1, "d2h": 1, "adam": 3, "h2d": 1}


def test_serial_does_one_thing_at_a_time():
    assert timed(serial(THREE), SECONDS) == [
        ("bwd:0", 0, 1),
        ("bwd:1", 1, 2),
        ("bwd:2", 2, 3),
        ("d2h:0", 3, 4),
        ("d2h:1", 4, 5),
        ("d2h:2", 5, 6),
        ("adam:2.0", 6, 9),
        ("h2d:2", 9, 10),
        ("adam:1.0", 10, 13),
        ("h2d:1", 13, 14),
        ("adam:0.0", 14, 17),
        ("h2d:0", 17, 18),
    ]


def test_overlap_copies_during_backward_and_uploads_behind_the_update():
    assert timed(overlap(THREE), SECONDS) == [
        ("bwd:0", 0, 1),
        ("bwd:1", 1, 2),
        ("d2h:0", 1, 2),
        ("bwd:2", 2, 3),
        ("d2h:1", 2, 3),
        ("d2h:2", 3, 4),
        ("adam:2.0", 4, 7),
        ("h2d:2", 7, 8),
        ("adam:1.0", 7, 10),
        ("h2d:1", 10, 11),
        ("adam:0.0", 10, 13),
        ("h2d:0", 13, 14),
    ]


def test_overlap_lets_the_next_forward_begin_before_the_update_has_ended():
    log = timed(overlap(THREE), {"fwd": 1, **SECONDS}, steps=2)

    assert [line for line in log if line[0].startswith(("h2d", "fwd")) and line[1] >= 8] == [
        ("h2d:2", 10, 11),
        ("fwd:2@1", 11, 12),
        ("h2d:1", 13, 14),
        ("fwd:1@1", 14, 15),
        ("h2d:0", 16, 17),
        ("fwd:0@1", 17, 18),
        ("h2d:2@1", 25, 26),
        ("h2d:1@1", 28, 29),
        ("h2d:0@1", 31, 32),
    ]


def test_in_backward_updates_before_backward_has_ended():
    assert timed(in_backward(THREE), SECONDS) == [
        ("bwd:0", 0, 1),
        ("bwd:1", 1, 2),
        ("d2h:0", 1, 2),
        ("bwd:2", 2, 3),
        ("d2h:1", 2, 3),
        ("adam:0.0", 2, 5),
        ("d2h:2", 5, 6),  # two slots: the first is free when Adam has read it
        ("h2d:0", 5, 6),
        ("adam:1.0", 5, 8),
        ("h2d:1", 8, 9),
        ("adam:2.0", 8, 11),
        ("h2d:2", 11, 12),
    ]


def test_in_backward_waits_for_the_last_of_two_backwards():
    log = timed(in_backward(Layout(chunks=(1, 1), backwards=2)), {"bwd": 1, "d2h": 1, "adam": 1, "h2d": 1})

    assert log == [
        ("bwd:0", 0, 1),
        ("bwd:1", 1, 2),
        ("d2h:0", 1, 2),
        ("bwd:0#1", 2, 3),
        ("d2h:1", 2, 3),
        ("bwd:1#1", 3, 4),
        ("d2h:0#1", 3, 4),
        ("adam:0.0", 4, 5),
        ("d2h:1#1", 4, 5),
        ("adam:1.0", 5, 6),
        ("h2d:0", 5, 6),
        ("h2d:1", 6, 7),
    ]


def test_delayed_updates_beside_the_next_forward_and_backward():
    seconds = {"fwd": 1, "bwd": 1, "d2h": 1, "adam": 2, "h2d": 1}
    log = timed(delayed(Layout(chunks=(1, 1), slots=2, backwards=1)), seconds, steps=3)

    assert [line for line in log if line[0].endswith("@1")] == [
        ("fwd:1@1", 5, 6),
        ("adam:0.0@1", 5, 7),  # applies what the step before has left, complete at 5
        ("fwd:0@1", 6, 7),
        ("bwd:0@1", 7, 8),
        ("adam:1.0@1", 7, 9),
        ("bwd:1@1", 8, 9),
        ("d2h:0@1", 8, 9),
        ("h2d:0@1", 8, 9),  # backward has finished with bucket 0's old weights
        ("d2h:1@1", 9, 10),
        ("h2d:1@1", 9, 10),
    ]


def test_delayed_uploads_after_the_backward_when_their_number_is_not_declared():
    seconds = {"fwd": 1, "bwd": 1, "d2h": 1, "adam": 2, "h2d": 1}
    log = timed(delayed(Layout(chunks=(1, 1), slots=2)), seconds, steps=2)

    assert [line for line in log if line[0] in ("bwd:1@1", "h2d:1@1", "h2d:0@1")] == [
        ("bwd:1@1", 8, 9),
        ("h2d:1@1", 9, 10),
        ("h2d:0@1", 10, 11),
    ]


def test_a_flush_applies_and_uploads_without_a_backward():
    log = timed(delayed_flush(Layout(chunks=(1, 2), workers=2)), {"adam": 2, "h2d": 1})

    assert log == [
        ("adam:1.0", 0, 2),
        ("adam:1.1", 0, 2),
        ("h2d:1", 2, 3),
        ("adam:0.0", 2, 4),
        ("h2d:0", 4, 5),
    ]


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("chunks", [(1,), (3,), (1, 1), (2, 1, 3), (1,) * 7])
@pytest.mark.parametrize("slots", [1, 2, 3, 8])
@pytest.mark.parametrize("backwards", [None, 1, 2, 3])
def test_every_plan_of_every_policy_keeps_the_rules(name, chunks, slots, backwards):
    layout = Layout(chunks, slots=slots, backwards=backwards, backward_order=tuple(range(len(chunks)))[::-1])

    validate(POLICIES[name](layout))


def test_exact_policies_say_so_and_delayed_says_that_it_is_stale():
    assert [policy(THREE).stale for policy in POLICIES.values()] == [0, 0, 0, 1]
    assert [policy(THREE).exact for policy in POLICIES.values()] == [True, True, True, False]


def test_only_what_may_begin_inside_backward_closes_there():
    one, many = Layout(chunks=(1,), backwards=1), Layout(chunks=(1,))

    assert [policy(many).closes for policy in POLICIES.values()] == ["step", "step", "last_backward", "step"]
    assert [policy(one).closes for policy in POLICIES.values()] == ["step", "step", "last_backward", "last_backward"]


def test_serial_and_overlap_take_any_number_of_backwards_whatever_is_declared():
    layout = Layout(chunks=(1, 1), backwards=1)

    assert (serial(layout).backwards, overlap(layout).backwards) == (None, None)
    assert edges(overlap(layout), "accumulate-in-order") == ["acc:0 -> acc:0#1", "acc:1 -> acc:1#1"]


def test_in_backward_lets_adam_read_the_slot_when_nothing_accumulates():
    single, several = in_backward(THREE), in_backward(Layout(chunks=(1, 1, 1), slots=2, backwards=2))

    assert single.staging[0] == Staging("d2h", 2, "d2h", "adam")
    assert edges(single, "gradient-store") == []
    assert several.staging[0] == Staging("d2h", 2, "d2h", "acc")
    assert edges(several, "gradient-store") == [f"adam:{b}.0 -> acc:{b}@+1" for b in (0, 1, 2)]


def test_in_backward_updates_in_forward_order_where_every_bucket_has_a_slot():
    def order(slots):
        plan = in_backward(Layout(chunks=(1, 1, 1), slots=slots))
        return [action.bucket for action in plan.actions if action.kind == "adam"]

    assert order(2) == [0, 1, 2]
    assert order(3) == [2, 1, 0]


def test_in_backward_refuses_to_clip_and_says_why():
    with pytest.raises(PlanError) as caught:
        in_backward(Layout(chunks=(1,), clip=True))

    assert str(caught.value) == (
        "policy 'in_backward' cannot clip: it updates the first buckets before the last gradients exist, and with "
        "them the global norm; use policy='overlap', or drop max_norm and the loss scaler"
    )


def test_a_policy_is_found_by_name_or_taken_as_it_is():
    assert policy("overlap") is overlap
    assert policy(in_backward) is in_backward


@pytest.mark.parametrize(
    ("asked", "error", "message"),
    [
        (
            "overlapped",
            ValueError,
            "policy 'overlapped' is unknown; use one of serial, overlap, in_backward, delayed, or your own function",
        ),
        (
            "speculative",
            ValueError,
            "policy 'speculative' is not there yet; use one of serial, overlap, in_backward, delayed",
        ),
        (3, TypeError, "policy is 3: expected a name or a function from a layout to a plan"),
    ],
)
def test_a_policy_that_is_not_there_is_refused_by_name(asked, error, message):
    with pytest.raises(error) as caught:
        policy(asked)

    assert str(caught.value) == message
