"""Each lowering pass alone: plan in, plan out."""

from __future__ import annotations

import pytest

from zoff_async.scheduler import Kind, Lane, Layout, Staging, passes

LAYOUT = Layout(chunks=(1, 2), slots=1, workers=2)
ONCE = Layout(chunks=(1, 2), slots=1, backwards=1)


def grown(before, after):
    """What a pass has added: actions, kinds, and edges with their rules."""
    assert after.actions[: len(before.actions)] == before.actions
    assert after.edges[: len(before.edges)] == before.edges
    assert after.kinds[: len(before.kinds)] == before.kinds
    return (
        " ".join(map(str, after.actions[len(before.actions) :])),
        after.kinds[len(before.kinds) :],
        [f"{edge} ({edge.rule})" for edge in after.edges[len(before.edges) :]],
    )


def upto(*names, layout=LAYOUT):
    """The plan after some passes of the usual order."""
    plan = passes.compute(layout, "built")
    for name in names:
        plan = {
            "copies": lambda plan: passes.gradient_copies(plan, layout),
            "sums": lambda plan: passes.accumulation(plan, layout),
            "norm": lambda plan: passes.norm(plan, layout, "norm-barrier"),
            "update": lambda plan: passes.update(plan, layout, layout.forward_order),
            "uploads": lambda plan: passes.uploads(plan, layout.forward_order),
        }[name](plan)
    return plan


def test_compute_is_forward_and_backward_in_program_order():
    plan = passes.compute(LAYOUT, "mine")

    assert plan.name == "mine"
    assert " ".join(map(str, plan.actions)) == "fwd:1 fwd:0 bwd:0 bwd:1"
    assert [f"{edge} ({edge.rule})" for edge in plan.edges] == [
        "fwd:1 -> fwd:0 (program-order)",
        "fwd:0 -> bwd:0 (program-order)",
        "bwd:0 -> bwd:1 (program-order)",
        "bwd:1 -> fwd:1#1 (program-order)",
        "bwd:1 -> fwd:1@+1 (program-order)",
    ]
    assert plan.kinds == (Kind("fwd", "compute", "backward"), Kind("bwd", "compute", "backward"))
    assert plan.lanes == (Lane("compute"), Lane("d2h"), Lane("cpu", 2), Lane("h2d"), Lane("net"))


def test_compute_of_a_single_backward_has_no_edge_into_another():
    assert [str(edge) for edge in passes.compute(ONCE, "mine").edges if edge.after.backward] == []


def test_gradient_copies_follow_backward():
    before = upto()

    assert grown(before, passes.gradient_copies(before, LAYOUT)) == (
        "d2h:0 d2h:1",
        (Kind("d2h", "d2h", "backward"),),
        ["bwd:0 -> d2h:0 (gradient)", "bwd:1 -> d2h:1 (gradient)"],
    )


def test_sums_follow_copies_and_one_another():
    before = upto("copies")

    assert grown(before, passes.accumulation(before, LAYOUT)) == (
        "acc:0 acc:1",
        (Kind("acc", "cpu", "backward"),),
        [
            "d2h:0 -> acc:0 (gradient)",
            "d2h:1 -> acc:1 (gradient)",
            "acc:0 -> acc:0#1 (accumulate-in-order)",
            "acc:1 -> acc:1#1 (accumulate-in-order)",
        ],
    )


def test_the_norm_follows_every_sum():
    before = upto("copies", "sums")

    assert grown(before, passes.norm(before, LAYOUT, "norm-report")) == (
        "norm",
        (Kind("norm", "cpu", "close"),),
        ["acc:0 -> norm (norm-report)", "acc:1 -> norm (norm-report)"],
    )


@pytest.mark.parametrize("part", ["open", "close"])
def test_the_update_is_a_chunk_at_a_time_in_the_given_order(part):
    before = upto("copies", "sums", "norm")

    assert grown(before, passes.update(before, LAYOUT, (1, 0), part)) == (
        "adam:1.0 adam:1.1 adam:0.0",
        (Kind("adam", "cpu", part),),
        [
            "adam:1.0 -> adam:1.0@+1 (state-order)",
            "adam:1.1 -> adam:1.1@+1 (state-order)",
            "adam:0.0 -> adam:0.0@+1 (state-order)",
        ],
    )


@pytest.mark.parametrize(("lag", "suffix"), [(0, ""), (1, "@+1")])
def test_the_norm_barrier_holds_every_chunk(lag, suffix):
    before = upto("copies", "sums", "norm", "update")

    assert grown(before, passes.norm_barrier(before, lag=lag)) == (
        "",
        (),
        [f"norm -> adam:{place}{suffix} (norm-barrier)" for place in ("1.0", "1.1", "0.0")],
    )


def test_an_update_without_barrier_follows_its_own_gradient():
    before = upto("copies", "sums", "update")

    assert grown(before, passes.update_after_gradient(before)) == (
        "",
        (),
        ["acc:1 -> adam:1.0 (gradient)", "acc:1 -> adam:1.1 (gradient)", "acc:0 -> adam:0.0 (gradient)"],
    )


def test_uploads_follow_their_chunks_and_hold_the_next_forward():
    before = upto("copies", "sums", "norm", "update")

    assert grown(before, passes.uploads(before, (1, 0))) == (
        "h2d:1 h2d:0",
        (Kind("h2d", "h2d", "close"),),
        [
            "adam:1.0 -> h2d:1 (update)",
            "adam:1.1 -> h2d:1 (update)",
            "adam:0.0 -> h2d:0 (update)",
            "h2d:1 -> fwd:1@+1 (weights-before-forward)",
            "h2d:0 -> fwd:0@+1 (weights-before-forward)",
        ],
    )


def test_uploads_wait_until_backward_has_finished_with_the_weights():
    before = upto("copies", "sums", "norm", "update", "uploads")

    assert grown(before, passes.uploads_after_backward(before, (1, 0))) == (
        "",
        (),
        ["bwd:1 -> h2d:1 (weights-in-use)", "bwd:0 -> h2d:0 (weights-in-use)"],
    )


@pytest.mark.parametrize(("lag", "suffix"), [(0, ""), (1, "@+1")])
def test_a_stored_gradient_is_read_before_it_is_overwritten(lag, suffix):
    before = upto("copies", "sums", "norm", "update")

    assert grown(before, passes.gradient_store(before, lag=lag)) == (
        "",
        (),
        [f"adam:{place} -> acc:{place[0]}{suffix} (gradient-store)" for place in ("1.0", "1.1", "0.0")],
    )


@pytest.mark.parametrize(
    ("slots", "backwards", "expected"),
    [
        (
            1,
            None,
            [
                "acc:2 -> d2h:0#1",
                "acc:2 -> d2h:0@+1",
                "acc:0 -> d2h:1",
                "acc:1 -> d2h:2",
            ],
        ),
        (2, 1, ["acc:1 -> d2h:0@+1", "acc:2 -> d2h:1@+1", "acc:0 -> d2h:2"]),
        (3, 1, ["acc:0 -> d2h:0@+1", "acc:1 -> d2h:1@+1", "acc:2 -> d2h:2@+1"]),
        (9, 1, ["acc:0 -> d2h:0@+1", "acc:1 -> d2h:1@+1", "acc:2 -> d2h:2@+1"]),
    ],
)
def test_a_copy_slot_is_taken_again_when_its_last_reader_is_done(slots, backwards, expected):
    layout = Layout(chunks=(1, 1, 1), slots=slots, backwards=backwards)
    before = upto("copies", "sums", layout=layout)
    after = passes.copy_slots(before, layout, freed_by="acc")

    assert grown(before, after) == ("", (), [f"{edge} (slot-reuse)" for edge in expected])
    assert after.staging == (Staging("d2h", min(slots, 3), "d2h", "acc"),)


def test_a_copy_slot_that_adam_reads_waits_for_all_its_chunks():
    before = upto("copies", "sums", "update", layout=ONCE)

    assert grown(before, passes.copy_slots(before, ONCE, freed_by="adam")) == (
        "",
        (),
        [
            "adam:1.0 -> d2h:0@+1 (slot-reuse)",
            "adam:1.1 -> d2h:0@+1 (slot-reuse)",
            "adam:0.0 -> d2h:1 (slot-reuse)",
        ],
    )


def test_an_upload_slot_is_written_when_the_copy_before_has_left_it():
    before = upto("copies", "sums", "norm", "update", "uploads")
    after = passes.upload_slots(before, LAYOUT, LAYOUT.forward_order)

    assert grown(before, after) == (
        "",
        (),
        [
            "h2d:0 -> adam:1.0@+1 (slot-reuse)",
            "h2d:0 -> adam:1.1@+1 (slot-reuse)",
            "h2d:1 -> adam:0.0 (slot-reuse)",
        ],
    )
    assert after.staging == (Staging("h2d", 1, "adam", "h2d"),)


def test_the_serial_order_is_one_line():
    before = upto("copies", "sums", "norm", "update", "uploads")

    assert grown(before, passes.one_after_another(before, LAYOUT)) == (
        "",
        (),
        [
            f"{edge} (serial)"
            for edge in (
                "bwd:0 -> d2h:0",
                "bwd:1 -> d2h:0",
                "d2h:0 -> acc:0",
                "acc:0 -> d2h:1",
                "d2h:1 -> acc:1",
                "acc:1 -> norm",
                "norm -> adam:1.0",
                "adam:1.0 -> adam:1.1",
                "adam:1.1 -> h2d:1",
                "h2d:1 -> adam:0.0",
                "adam:0.0 -> h2d:0",
                "acc:1 -> d2h:0#1",
                "h2d:0 -> fwd:1@+1",
                "h2d:0 -> fwd:0@+1",
            )
        ],
    )
