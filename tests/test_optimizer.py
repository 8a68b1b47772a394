"""The optimizers' own face: what their constructors and calls refuse, in whole messages, and small promises."""

from __future__ import annotations

import copy
import os
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zoff_async as zoff
from tests.runtime.scenes import within


def weight(**options: Any) -> nn.Parameter:
    return nn.Parameter(torch.ones(2, 3, **options))


def _non_leaf() -> Tensor:
    return weight() * 2


def _retaining() -> Tensor:
    made = weight() * 2
    made.retain_grad()
    return made


TWICE = weight()
WHERE = "param_groups[0]['params'][0]"
BAD_PARAMS: list[tuple[Any, type[Exception], str]] = [
    ([], ValueError, "params is empty: pass model.parameters()"),
    (iter(()), ValueError, "params is empty: pass model.parameters()"),
    (
        weight(),
        TypeError,
        "params must be an iterable of parameters or groups, got a tensor of shape (2, 3)",
    ),
    ({"params": [weight()]}, TypeError, "params must be an iterable of parameters or groups, got dict"),
    (None, TypeError, "params must be an iterable of parameters or groups, got NoneType"),
    ([1.5], TypeError, f"{WHERE} must be a tensor, got float"),
    ([("w", 3)], TypeError, "'w' must be a tensor, got int"),
    (
        [TWICE, weight(), TWICE],
        ValueError,
        "param_groups[0]['params'][2] is the same tensor as entry 0 of its group: list it once",
    ),
    ([("a", TWICE), ("b", TWICE)], ValueError, "'b' is the same tensor as entry 0 of its group: list it once"),
    (
        [{"params": [TWICE]}, {"params": [TWICE]}],
        ValueError,
        "some parameters appear in more than one parameter group",
    ),
    (
        [_non_leaf()],
        ValueError,
        f"{WHERE} is not a leaf: an optimizer updates the original parameter, not a tensor made from it",
    ),
    (
        [("w", _retaining())],
        ValueError,
        "'w' is not a leaf: an optimizer updates the original parameter, not a tensor made from it",
    ),
    (
        [("w", weight(dtype=torch.float64))],
        TypeError,
        "'w' has dtype torch.float64: masters are fp32, so parameters must be one of torch.float32, torch.bfloat16, "
        "torch.float16",
    ),
    (
        [weight(dtype=torch.complex64)],
        TypeError,
        f"{WHERE} has dtype torch.complex64: masters are fp32, so parameters must be one of torch.float32, "
        "torch.bfloat16, torch.float16",
    ),
    (
        [weight(device="meta")],
        ValueError,
        f"{WHERE} is on the meta device and has no weights yet: materialise the model first",
    ),
    (
        [weight().requires_grad_(False)],
        ValueError,
        "params holds no parameter that requires a gradient: there is nothing to train",
    ),
]


@pytest.mark.parametrize(("params", "kind", "message"), BAD_PARAMS, ids=[message[:40] for *_, message in BAD_PARAMS])
def test_parameters_that_cannot_be_trained_are_refused_by_name(params, kind, message):
    with pytest.raises(kind) as caught:
        zoff.OffloadAdamW(params)

    assert str(caught.value) == message


def test_a_sparse_parameter_is_refused():
    sparse = nn.Parameter(torch.eye(3).to_sparse())
    with pytest.raises(TypeError) as caught:
        zoff.OffloadAdamW([("table", sparse)])

    assert str(caught.value) == "'table' has layout torch.sparse_coo: parameters must be dense"


def test_an_unordered_collection_is_refused_as_torch_refuses_it():
    """The order of parameters decides buckets and checkpoints, and a set has none."""
    for params in ([{"params": {weight(), weight()}}],):
        with pytest.raises(TypeError):
            torch.optim.AdamW(params)
        with pytest.raises(TypeError):
            zoff.OffloadAdamW(params)


BAD_OPTIONS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"lr": -1e-3}, ValueError, "lr must be finite and not negative, got -0.001"),
    ({"lr": float("nan")}, ValueError, "lr must be finite and not negative, got nan"),
    ({"lr": "fast"}, TypeError, "lr must be a number, got 'fast'"),
    ({"lr": torch.ones(2)}, ValueError, "lr must be a number or a tensor of one element, got shape (2,)"),
    ({"eps": -1e-8}, ValueError, "eps must be finite and not negative, got -1e-08"),
    ({"weight_decay": -0.1}, ValueError, "weight_decay must be finite and not negative, got -0.1"),
    ({"betas": (0.9, 1.0)}, ValueError, "betas[1] must be in [0, 1), got 1.0"),
    ({"betas": (-0.1, 0.9)}, ValueError, "betas[0] must be in [0, 1), got -0.1"),
    ({"betas": 0.9}, TypeError, "betas must be two numbers, got 0.9"),
    ({"betas": (0.9,)}, TypeError, "betas must be two numbers, got (0.9,)"),
    ({"betas": (0.9, "b")}, TypeError, "betas[1] must be a number, got 'b'"),
    ({"max_norm": 0}, ValueError, "max_norm must be positive (or None for no clipping), got 0"),
    ({"max_norm": float("nan")}, ValueError, "max_norm must be positive (or None for no clipping), got nan"),
    ({"max_norm": "1"}, TypeError, "max_norm must be a positive number or None, got '1'"),
    ({"model": 3}, TypeError, "model must be a torch.nn.Module or None, got int"),
    ({"config": {"workers": 2}}, TypeError, "config must be an OffloadConfig, got {'workers': 2}"),
    (
        {"policy": "eager"},
        ValueError,
        "policy 'eager' is unknown; use one of serial, overlap, in_backward, delayed, or your own function",
    ),
    (
        {"policy": "speculative"},
        ValueError,
        "policy 'speculative' is not there yet; use one of serial, overlap, in_backward, delayed",
    ),
    ({"policy": 3}, TypeError, "policy is 3: expected a name or a function from a layout to a plan"),
    (
        {"policy": "in_backward", "max_norm": 1.0},
        zoff.PlanError,
        "policy 'in_backward' cannot clip: it updates the first buckets before the last gradients exist, and with them "
        "the global norm; use policy='overlap', or drop max_norm and the loss scaler",
    ),
    (
        {"config": zoff.OffloadConfig(device="tpu")},
        ValueError,
        "device must be one of auto, host, cpu, cuda, emulated:PRESET, got 'tpu'",
    ),
    (
        {"amsgrad": True},
        ValueError,
        "amsgrad=True is not honoured by this optimizer: leave it out, or use torch.optim.AdamW",
    ),
    (
        {"fused": True},
        ValueError,
        "fused=True is not honoured by this optimizer: leave it out, or use torch.optim.AdamW",
    ),
    (
        {"momentum": 0.9},
        TypeError,
        "unexpected argument 'momentum': see OffloadAdamW's documentation for what there is",
    ),
]


@pytest.mark.parametrize(
    ("options", "kind", "message"), BAD_OPTIONS, ids=[str(options)[:40] for options, *_ in BAD_OPTIONS]
)
def test_an_option_that_cannot_be_used_is_refused_by_name(options, kind, message):
    parameter = weight()
    with pytest.raises(kind) as caught:
        zoff.OffloadAdamW([parameter], **options)

    assert str(caught.value) == message
    assert not parameter._post_accumulate_grad_hooks


def test_options_that_mean_nothing_are_accepted():
    zoff.OffloadAdamW([weight()], amsgrad=False, maximize=False, foreach=None, fused=False, capturable=False).close()


def test_a_group_is_checked_like_the_whole_and_named():
    good = weight()
    with pytest.raises(ValueError) as caught:
        zoff.OffloadAdamW([{"params": [good]}, {"params": [weight()], "lr": -1.0}])
    assert str(caught.value) == "lr of param_groups[1] must be finite and not negative, got -1.0"

    optimizer = zoff.OffloadAdamW([good])
    for group, kind, message in (
        (
            {"params": [weight()], "betas": (0.9, 2)},
            ValueError,
            "betas[1] of param_groups[1] must be in [0, 1), got 2.0",
        ),
        ({"params": [good]}, ValueError, "some parameters appear in more than one parameter group"),
        ({"params": [weight()], "maximize": True}, ValueError, None),
        ([weight()], TypeError, "param_group must be a dict, got list"),
    ):
        with pytest.raises(kind) as caught:
            optimizer.add_param_group(group)
        if message is not None:
            assert str(caught.value) == message
    assert len(optimizer.param_groups) == 1
    optimizer.close()


def test_a_sparse_gradient_is_refused_by_name_at_the_first_backward():
    table = nn.Embedding(10, 4, sparse=True)
    optimizer = zoff.OffloadAdamW(table.named_parameters())
    with pytest.raises(zoff.GradientError) as caught:
        table(torch.tensor([1, 2])).sum().backward()

    assert str(caught.value) == (
        "'weight' has a sparse gradient (torch.sparse_coo): this optimizer updates dense parameters only; use "
        "sparse=False "
        "in the embedding, or leave the parameter to torch.optim.SparseAdam"
    )
    within(5, optimizer.close)


def test_a_frozen_parameter_that_cannot_be_trained_is_refused_when_it_is_unfrozen():
    frozen = nn.Parameter(torch.ones(2, dtype=torch.float64), requires_grad=False)
    trained = weight()
    optimizer = zoff.OffloadAdamW([("trained", trained), ("frozen", frozen)])
    frozen.requires_grad_(True)
    (trained.sum() + frozen.sum()).backward()
    with pytest.raises(TypeError) as caught:
        optimizer.step()

    assert str(caught.value) == (
        "'frozen' has dtype torch.float64: masters are fp32, so parameters must be one of torch.float32, "
        "torch.bfloat16, "
        "torch.float16"
    )
    within(5, optimizer.close)


def test_a_core_that_the_process_may_not_use_is_refused_by_name():
    with pytest.raises(ValueError) as caught:
        zoff.OffloadAdamW([weight()], config=zoff.OffloadConfig(cpu_affinity=(9999,)))

    allowed = ", ".join(str(core) for core in sorted(os.sched_getaffinity(0)))
    assert str(caught.value) == (
        f"cpu_affinity names core 9999, and this process may use {allowed}: name some of those, () to pin to "
        f"none, or None"
    )


@pytest.mark.parametrize("policy", ["serial", "overlap", "in_backward", "delayed"])
def test_a_step_without_gradients_does_nothing_and_counts_nothing(policy):
    """As torch: also the first call of all, and with on_nonfinite="raise"."""
    parameter = weight()
    optimizer = zoff.OffloadAdamW([parameter], policy=policy, config=zoff.OffloadConfig(on_nonfinite="raise"))
    assert optimizer.step() is None
    optimizer.zero_grad()
    optimizer.step()

    assert torch.equal(parameter, torch.ones(2, 3))
    statistics = optimizer.statistics()
    assert (statistics.steps, statistics.skipped_steps, statistics.last_grad_norm) == (0, 0, None)
    assert (statistics.d2h_bytes, statistics.h2d_bytes) == (0, 0)
    optimizer.close()


def test_a_parameter_that_is_not_trained_here_is_refused():
    optimizer = zoff.OffloadAdamW([weight()])
    for call in (optimizer.grad, optimizer.master):
        with pytest.raises(ValueError) as caught:
            call(torch.ones(4))
        assert str(caught.value) == "the parameter of shape (4,) is not trained by this optimizer"
    optimizer.close()


def test_a_gradient_that_is_not_there_is_refused_by_name():
    parameter = weight()
    optimizer = zoff.OffloadAdamW([("w", parameter)])
    with pytest.raises(zoff.GradientError) as caught:
        optimizer.grad(parameter)

    assert str(caught.value) == "'w' has no gradient now: call backward first"
    optimizer.close()


def test_it_cannot_be_copied_or_pickled_and_says_so():
    optimizer = zoff.OffloadAdam([weight()])
    for call in (copy.deepcopy, copy.copy, pickle.dumps):
        with pytest.raises(TypeError) as caught:
            call(optimizer)
        assert str(caught.value) == (
            "OffloadAdam holds threads and cannot be pickled or copied: save optimizer.state_dict(), and build a new "
            "optimizer to load it into"
        )
    optimizer.close()


def test_statistics_count_what_moves_and_what_is_held():
    """A bf16 model of 20 elements: masters 4, moments 8 and gradients 2 bytes an element; 2 bytes each way and step."""
    model = nn.Linear(4, 4).bfloat16()
    optimizer = zoff.OffloadAdamW(model.parameters(), config=zoff.OffloadConfig(workers=2, kernel="numexpr"))
    assert optimizer.statistics().gradient_bytes == 0
    for _ in range(3):
        model(torch.ones(2, 4, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.synchronize()

    statistics = optimizer.statistics()
    assert (statistics.steps, statistics.skipped_steps) == (3, 0)
    assert (statistics.d2h_bytes, statistics.h2d_bytes) == (3 * 40, 3 * 40)
    assert (statistics.parameters, statistics.master_bytes, statistics.moment_bytes) == (20, 80, 160)
    assert statistics.gradient_bytes == 40
    assert (statistics.kernel, statistics.workers, statistics.policy, statistics.device) == (
        "numexpr",
        2,
        "overlap",
        "host",
    )
    optimizer.close()


def test_adam_in_backward_keeps_no_gradients_on_the_host():
    model = nn.Linear(4, 4)
    optimizer = zoff.OffloadAdamW(model.parameters(), policy="in_backward")
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()

    assert optimizer.statistics().gradient_bytes == 0
    optimizer.close()


def test_the_plan_can_be_read():
    optimizer = zoff.OffloadAdamW([weight()])
    assert optimizer.plan.name == "overlap"
    assert zoff.StepPlan.parse(str(optimizer.plan)).actions == optimizer.plan.actions
    optimizer.close()


def test_learning_rate_schedulers_take_it_for_an_optimizer():
    parameter = weight()
    optimizer = zoff.OffloadAdamW([parameter], lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for _ in range(2):
        parameter.grad = torch.ones(2, 3)
        optimizer.step()
        scheduler.step()

    assert optimizer.param_groups[0]["lr"] == 0.25
    assert isinstance(optimizer, torch.optim.Optimizer)
    optimizer.close()
