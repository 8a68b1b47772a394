"""Every rule of a plan, and the whole message that a broken one gives."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from zoff_async.errors import PlanError
from zoff_async.scheduler import (
    POLICIES,
    Action,
    Edge,
    Kind,
    Lane,
    Layout,
    StepPlan,
    delayed,
    in_backward,
    overlap,
    serial,
    validate,
)

LAYOUT = Layout(chunks=(1, 1), slots=1)
PLAN = overlap(LAYOUT)


def refused(plan):
    with pytest.raises(PlanError) as caught:
        validate(plan)
    return str(caught.value)


def cut(plan, *dropped):
    """The plan without the edges of that text (and all of those rules)."""
    kept = tuple(edge for edge in plan.edges if str(edge) not in dropped and edge.rule not in dropped)
    assert len(kept) < len(plan.edges)
    return replace(plan, edges=kept)


def linked(plan, text, rule="mine"):
    before, after = (Action.parse(word) for word in text.split(" -> "))
    return replace(plan, edges=(*plan.edges, Edge(before, after, rule)))


# The data


def test_adam_before_its_gradient_is_rejected():
    assert refused(cut(in_backward(LAYOUT), "acc:1 -> adam:1.0")) == (
        "adam:1.0 may start before acc:1 is done: it would apply a gradient that is not complete yet\n"
        "  ... bwd:1 d2h:0 d2h:1 acc:0 acc:1 adam:0.0 >>adam:1.0<< h2d:0 h2d:1 norm"
    )


def test_adam_before_the_clip_factor_is_rejected():
    plan = replace(in_backward(LAYOUT), clip=True)

    assert refused(plan) == (
        "adam:0.0 may start before norm is done: it would apply a gradient before its clip factor is known\n"
        "  ... bwd:0 bwd:1 d2h:0 d2h:1 acc:0 acc:1 >>adam:0.0<< adam:1.0 h2d:0 h2d:1 norm"
    )


def test_a_delayed_adam_needs_the_norm_of_the_step_before():
    plan = cut(delayed(replace(LAYOUT, clip=True)), "norm -> adam:1.0@+1")
    plan = linked(plan, "acc:1 -> adam:1.0@+1")

    assert refused(plan) == (
        "adam:1.0 may start before norm of the step before is done: "
        "it would apply a gradient before its clip factor is known\n"
        "  ... d2h:0 d2h:1 acc:0 acc:1 norm adam:0.0 >>adam:1.0<< h2d:1 h2d:0"
    )


def test_an_upload_before_its_update_is_rejected():
    assert refused(cut(PLAN, "adam:0.0 -> h2d:0")) == (
        "h2d:0 may start before adam:0.0 is done: it would upload weights that are not updated yet\n"
        "  ... acc:0 acc:1 norm adam:1.0 adam:0.0 h2d:1 >>h2d:0<<"
    )


def test_an_upload_while_backward_reads_the_weights_is_rejected():
    assert refused(cut(delayed(LAYOUT), "weights-in-use")) == (
        "h2d:1 may start before bwd:1 is done: it would overwrite weights that backward still reads\n"
        "  ... d2h:1 acc:0 acc:1 norm adam:0.0 adam:1.0 >>h2d:1<< h2d:0"
    )


def test_a_copy_before_its_backward_is_rejected():
    assert refused(cut(PLAN, "bwd:0 -> d2h:0")) == (
        "d2h:0 may start before bwd:0 is done: it would copy a gradient that does not exist yet\n"
        "  fwd:1 fwd:0 bwd:0 bwd:1 >>d2h:0<< d2h:1 acc:0 acc:1 norm adam:1.0 adam:0.0 ..."
    )


def test_a_sum_before_its_copy_is_rejected():
    assert refused(cut(PLAN, "d2h:1 -> acc:1")) == (
        "acc:1 may start before d2h:1 is done: it would add a gradient that has not arrived yet\n"
        "  ... fwd:0 bwd:0 bwd:1 d2h:0 d2h:1 acc:0 >>acc:1<< norm adam:1.0 adam:0.0 h2d:1 h2d:0"
    )


def test_a_norm_that_misses_a_bucket_is_rejected():
    plan = cut(in_backward(Layout(chunks=(1, 1))), "acc:0 -> norm")

    assert refused(plan) == (
        "norm may start before acc:0 is done: the norm would miss its squares\n"
        "  ... acc:0 acc:1 adam:1.0 adam:0.0 h2d:1 h2d:0 >>norm<<"
    )


def test_a_forward_that_does_not_wait_for_its_weights_is_rejected():
    assert refused(cut(PLAN, "h2d:0 -> fwd:0@+1")) == (
        "fwd:0 may start before h2d:0 of the step before is done: it would read weights that are still on their way\n"
        "  fwd:1 >>fwd:0<< bwd:0 bwd:1 d2h:0 d2h:1 acc:0 acc:1 ..."
    )


def test_two_updates_of_one_chunk_at_once_are_rejected():
    plan = cut(delayed(LAYOUT), "state-order", "slot-reuse")
    plan = cut(plan, "norm -> adam:1.0@+1")

    assert refused(plan).startswith("adam:1.0 may start before acc:1 of the step before is done")
    lone = StepPlan.parse(
        "plan lone\nbackwards 1\nlane cpu 1\nkind fwd cpu backward\nkind adam cpu close\nactions fwd:0 adam:0.0\n"
        "rule state-order\n  adam:0.0 -> adam:0.0@+1\n"
    )
    assert refused(cut(lone, "state-order")) == (
        "adam:0.0 may start before adam:0.0 of the step before is done: two updates would write the same moments\n"
        "  fwd:0 >>adam:0.0<<"
    )


def test_a_gradient_that_adam_still_reads_may_not_be_overwritten():
    assert refused(cut(delayed(LAYOUT), "adam:0.0 -> acc:0")) == (
        "acc:0 may start before adam:0.0 is done: it would overwrite a gradient that Adam still reads\n"
        "  fwd:1 fwd:0 bwd:0 bwd:1 d2h:0 d2h:1 >>acc:0<< acc:1 norm adam:0.0 adam:1.0 h2d:1 h2d:0"
    )


def test_two_backwards_may_not_add_at_once():
    plan = overlap(Layout(chunks=(1, 1), slots=2))

    assert refused(cut(plan, "accumulate-in-order", "slot-reuse")) == (
        "acc:0 may start before acc:0 of the backward before is done: "
        "two backwards would add to the same gradient at once\n"
        "  fwd:1 fwd:0 bwd:0 bwd:1 d2h:0 d2h:1 >>acc:0<< acc:1 norm adam:1.0 adam:0.0 h2d:1 h2d:0"
    )


def test_a_copy_slot_that_is_still_read_is_not_taken():
    assert refused(cut(PLAN, "acc:0 -> d2h:1")) == (
        "d2h:1 may overwrite a d2h slot that acc:0 still reads: there are 1 slots, filled by d2h and freed by acc; "
        "keep the edges of rule slot-reuse\n"
        "  fwd:1 fwd:0 bwd:0 bwd:1 d2h:0 >>d2h:1<< acc:0 acc:1 norm adam:1.0 adam:0.0 h2d:1 ..."
    )


def test_a_copy_slot_is_not_taken_from_the_backward_or_step_before():
    assert refused(cut(PLAN, "acc:1 -> d2h:0#1")) == (
        "d2h:0 may overwrite a d2h slot that acc:1 of the backward before still reads: there are 1 slots, "
        "filled by d2h and freed by acc; keep the edges of rule slot-reuse\n"
        "  fwd:1 fwd:0 bwd:0 bwd:1 >>d2h:0<< d2h:1 acc:0 acc:1 norm adam:1.0 adam:0.0 ..."
    )
    plan = delayed(LAYOUT)
    assert refused(cut(plan, "acc:1 -> d2h:0@+1")) == (
        "d2h:0 may overwrite a d2h slot that acc:1 of the step before still reads: there are 1 slots, "
        "filled by d2h and freed by acc; keep the edges of rule slot-reuse\n"
        "  fwd:1 fwd:0 bwd:0 bwd:1 >>d2h:0<< d2h:1 acc:0 acc:1 norm adam:0.0 adam:1.0 ..."
    )


def test_an_upload_slot_is_not_written_while_a_copy_reads_it():
    assert refused(cut(PLAN, "h2d:1 -> adam:0.0")) == (
        "adam:0.0 may overwrite a h2d slot that h2d:1 still reads: there are 1 slots, filled by adam and freed by h2d; "
        "keep the edges of rule slot-reuse\n"
        "  ... d2h:0 d2h:1 acc:0 acc:1 norm adam:1.0 >>adam:0.0<< h2d:1 h2d:0"
    )


def test_a_rule_that_other_edges_enforce_may_go():
    """Uploads before forward, forward before backward: Adam has long read what the next step overwrites."""
    validate(cut(PLAN, "gradient-store"))
    validate(cut(PLAN, "state-order"))
    validate(cut(serial(LAYOUT), "norm-barrier", "update", "gradient-store"))


def test_a_bucket_without_its_gradient_is_named():
    plan = replace(PLAN, actions=(*PLAN.actions, Action("adam", 5, 0)))

    assert refused(plan) == (
        "adam:5.0 needs acc:5, which is not in the plan: it would apply a gradient that is not complete yet\n"
        "  ... acc:1 norm adam:1.0 adam:0.0 h2d:1 h2d:0 >>adam:5.0<<"
    )


# The form


def test_a_cycle_is_named():
    assert refused(linked(PLAN, "h2d:0 -> norm")) == (
        "these actions wait for each other: norm -> adam:0.0 -> h2d:0 -> norm "
        "(rules norm-barrier, update, mine); take one of the edges away\n"
        "  ... bwd:0 bwd:1 d2h:0 d2h:1 acc:0 acc:1 >>norm<< adam:1.0 adam:0.0 h2d:1 h2d:0"
    )


def test_an_action_that_waits_for_itself_is_a_cycle():
    assert refused(linked(PLAN, "norm -> norm")).startswith(
        "these actions wait for each other: norm -> norm (rules mine)"
    )


def test_an_unknown_lane_is_rejected():
    plan = replace(PLAN, kinds=(*PLAN.kinds, Kind("ema", "gpu", "close")))

    assert refused(plan) == (
        "kind 'ema' runs on lane 'gpu', which plan 'overlap' does not have; its lanes are compute, d2h, cpu, h2d, net"
    )


def test_an_unknown_part_is_rejected():
    plan = replace(PLAN, kinds=(*PLAN.kinds, Kind("ema", "cpu", "late")))

    assert refused(plan) == "kind 'ema' is in part 'late'; parts are open, backward, close"


def test_an_action_without_a_lane_is_rejected():
    plan = replace(PLAN, actions=(*PLAN.actions, Action("ema")))

    assert refused(plan) == (
        "ema is of kind 'ema', which has no lane; add a Kind with its lane and part\n"
        "  ... acc:1 norm adam:1.0 adam:0.0 h2d:1 h2d:0 >>ema<<"
    )


def test_an_action_is_listed_without_backward_and_step():
    plan = replace(PLAN, actions=(*PLAN.actions, Action("norm", lag=1)))

    assert refused(plan) == (
        "norm@+1 is listed with a backward or a step of its own: a plan is a template, so list norm and put the "
        "rest on edges\n  ... acc:1 norm adam:1.0 adam:0.0 h2d:1 h2d:0 >>norm@+1<<"
    )


def test_an_action_is_listed_once():
    plan = replace(PLAN, actions=(*PLAN.actions, Action("norm")))

    assert refused(plan) == (
        "norm is listed twice\n"
        "  ... bwd:0 bwd:1 d2h:0 d2h:1 acc:0 acc:1 >>norm<< adam:1.0 adam:0.0 h2d:1 h2d:0 >>norm<<"
    )


def test_an_edge_to_an_action_that_does_not_exist_is_rejected():
    assert refused(linked(PLAN, "ema -> h2d:0")) == (
        "edge ema -> h2d:0 (rule mine) names ema, which is not in plan 'overlap'; add the action, or drop the edge\n"
        "its kinds are fwd, bwd, d2h, acc, norm, adam, h2d"
    )
    assert refused(linked(PLAN, "norm -> adam:7.0")) == (
        "edge norm -> adam:7.0 (rule mine) names adam:7.0, which is not in plan 'overlap'; "
        "add the action, or drop the edge\nits adam actions are adam:1.0 adam:0.0"
    )


@pytest.mark.parametrize("edge", ["acc:0 -> bwd:1", "acc:0 -> fwd:0#1", "h2d:0 -> bwd:0@+1"])
def test_autograd_is_not_made_to_wait(edge):
    found = refused(linked(PLAN, edge))

    assert found.splitlines()[0] == (
        f"edge {edge} (rule mine) would hold back autograd, which runs fwd and bwd by itself; "
        "only fwd of the next step (fwd:...@+1) can be held"
    )
    assert f">>{Action.parse(edge.split(' -> ')[1]).template()}<<" in found.splitlines()[1]


def test_the_next_forward_may_be_made_to_wait():
    validate(linked(PLAN, "h2d:0 -> fwd:1@+1"))


def test_a_part_does_not_wait_for_one_that_comes_to_life_after_it():
    assert refused(linked(PLAN, "h2d:0 -> d2h:1")).splitlines()[0] == (
        "edge h2d:0 -> d2h:1 (rule mine) waits for the close part, which comes to life after it"
    )
    assert refused(linked(delayed(LAYOUT), "acc:0 -> adam:1.0")).splitlines()[0] == (
        "edge acc:0 -> adam:1.0 (rule mine) waits for the backward part, which comes to life after it"
    )


def test_where_the_step_closes_inside_backward_its_copies_may_wait_for_adam():
    plan = in_backward(LAYOUT)

    assert "adam:0.0 -> d2h:1" in [str(edge) for edge in plan.edges]
    validate(plan)


def test_an_edge_reaches_one_backward_or_one_step_ahead():
    assert refused(linked(PLAN, "acc:0 -> acc:0#2")).splitlines()[0] == (
        "edge acc:0 -> acc:0#2 (rule mine) reaches further than the next backward or the next step"
    )
    assert refused(linked(PLAN, "norm -> acc:0#1")).splitlines()[0] == (
        "edge norm -> acc:0#1 (rule mine) goes into the next backward, but not between two of its actions"
    )


def test_a_step_closes_at_a_time_that_exists():
    assert refused(replace(PLAN, closes="noon")) == (
        "closes is 'noon'; a step closes at 'step' or at the 'last_backward'"
    )
    assert refused(replace(PLAN, closes="last_backward")) == (
        "closes is 'last_backward', but backwards is None: declare how many backwards a step has"
    )


def test_a_plan_of_other_kinds_only_needs_a_sound_form():
    """Rules about data speak of kinds: a plan without them is free."""
    a, b = Action("a"), Action("b")
    kinds = (Kind("a", "cpu", "open"), Kind("b", "cpu", "close"))

    validate(StepPlan("other", (a, b), (Edge(a, b, "mine"),), kinds, (Lane("cpu"),)))


@pytest.mark.parametrize("name", POLICIES)
def test_a_plan_of_a_large_model_is_checked_quickly(name):
    plan = POLICIES[name](Layout(chunks=(16,) * 400, workers=8))
    samples = []
    for _ in range(3):
        fresh = replace(plan)  # nothing is cached on it yet
        start_s = time.process_time()
        validate(fresh)
        samples.append(time.process_time() - start_s)

    assert min(samples) < 1.0  # about 0.1 s on an idle core
