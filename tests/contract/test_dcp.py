"""torch.distributed.checkpoint and process groups: saved, resharded keys and loaded, without a step on the way."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful

from tests.contract.loops import GATED, LATE, PLAIN, SMALL, assert_equal, everything, loss_of, mlp, weights
from zoff_async import OffloadAdamW, OffloadConfig, ZoffError

gated_setups = pytest.mark.parametrize("setup", [PLAIN, GATED, LATE], ids=lambda setup: setup.name)


@pytest.fixture
def one_rank() -> Iterator[None]:
    """A gloo group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def train(model, optimizer, steps, start=0):
    for step in range(start, start + steps):
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()


class App(Stateful):
    """The application state of torch's own tutorial."""

    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer

    def state_dict(self):
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, saved):
        set_state_dict(self.model, self.optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"])


@gated_setups
@pytest.mark.parametrize("saving", ["save", "async_save"])
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning:torch.distributed")
def test_a_run_saved_and_resumed_is_the_same_run(one_rank, setup, saving, tmp_path):
    """``async_save`` writes while training goes on: what it holds is the state when it was called."""
    model = mlp()
    optimizer = setup.make(model.parameters(), model=model, lr=1e-2)
    train(model, optimizer, 3)
    app = App(model, optimizer)
    if saving == "save":
        dcp.save({"app": app}, checkpoint_id=tmp_path)
        train(model, optimizer, 3, start=3)
    else:
        written = dcp.async_save({"app": app}, checkpoint_id=tmp_path)
        train(model, optimizer, 3, start=3)
        written.result()
    optimizer.synchronize()
    expected = everything(model, optimizer)
    assert optimizer.statistics().steps == 6
    optimizer.close()

    again = mlp()
    optimizer = setup.make(again.parameters(), model=again, lr=0.5)
    dcp.load({"app": App(again, optimizer)}, checkpoint_id=tmp_path)
    assert optimizer.statistics().steps == 0
    assert optimizer.param_groups[0]["lr"] == 1e-2
    train(again, optimizer, 3, start=3)
    optimizer.synchronize()
    assert_equal(everything(again, optimizer), expected)
    optimizer.close()


@gated_setups
@pytest.mark.parametrize("flat", [False, True])
def test_getting_and_setting_state_takes_no_step(setup, flat):
    """torch fills the state of an optimizer that has none by a step with zero gradients: ours is never empty."""
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    model = mlp()
    optimizer = setup.make(model.parameters(), model=model, lr=1e-2, weight_decay=0.5)
    before = weights(model)
    saved = get_optimizer_state_dict(model, optimizer, options=options)
    set_optimizer_state_dict(model, optimizer, copy.deepcopy(saved), options=options)
    assert_equal(weights(model), before)
    assert optimizer.statistics().steps == 0
    assert all(parameter.grad is None for parameter in model.parameters())

    train(model, optimizer, 2)
    expected = everything(model, optimizer)
    saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=options))
    train(model, optimizer, 2)
    model.load_state_dict(dict(zip(model.state_dict(), expected[:6], strict=True)))
    set_optimizer_state_dict(model, optimizer, saved, options=options)
    assert_equal(everything(model, optimizer), expected)
    optimizer.close()


def test_keys_are_the_models_names_and_masters_travel_with_them():
    model = mlp()
    with OffloadAdamW(model.parameters(), config=SMALL) as optimizer:
        train(model, optimizer, 1)
        saved = get_optimizer_state_dict(model, optimizer)
        assert saved["state"].keys() == {name for name, _ in model.named_parameters()}
        assert saved["state"]["0.weight"].keys() == {"step", "exp_avg", "exp_avg_sq", "master"}
        assert torch.equal(saved["state"]["3.bias"]["master"], optimizer.master(model[3].bias))


def test_groups_and_frozen_parameters_find_their_place():
    def groups(model):
        model[2].requires_grad_(False)
        return [
            {"params": [model[3].weight, model[3].bias], "lr": 1e-3},
            {"params": list(model[0].parameters()), "weight_decay": 0.3},
        ]

    model = mlp()
    with OffloadAdamW(groups(model), lr=1e-2, config=SMALL) as optimizer:
        train(model, optimizer, 3)
        saved = [copy.deepcopy(get_model_state_dict(model)), copy.deepcopy(get_optimizer_state_dict(model, optimizer))]
        expected = everything(model, optimizer)
    again = mlp()
    with OffloadAdamW(groups(again), lr=0.7, config=SMALL) as optimizer:
        set_state_dict(again, optimizer, model_state_dict=saved[0], optim_state_dict=saved[1])
        assert_equal(everything(again, optimizer), expected)
        assert [group["lr"] for group in optimizer.param_groups] == [1e-3, 1e-2]


def test_between_backward_and_step_torch_refuses_and_gradients_stay():
    """``get_state_dict`` insists that gradients were cleared; nothing here is lost by asking."""
    model = mlp()
    with OffloadAdamW(model.parameters(), lr=1e-2, config=SMALL) as optimizer:
        train(model, optimizer, 1)
        loss_of(model, 1).backward()
        before = [optimizer.grad(parameter) for parameter in model.parameters()]
        with contextlib.suppress(RuntimeError):  # torch may refuse: that is its own business
            get_optimizer_state_dict(model, optimizer)
        assert_equal([optimizer.grad(parameter) for parameter in model.parameters()], before)
        optimizer.step()
        assert optimizer.statistics().steps == 2


# --- plain parameters in a process group ------------------------------------------------------------------------------


@pytest.fixture
def two_ranks() -> Iterator[None]:
    """A group of two ranks of which only this one exists; nothing may communicate."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("policy", ["serial", "overlap", "in_backward"])
def test_plain_parameters_in_a_group_of_several_ranks_are_refused_at_the_first_backward(two_ranks, policy):
    """``DistributedDataParallel`` reduces after our hooks have run: every rank would train on its own gradients."""
    model = mlp()
    with OffloadAdamW(model.parameters(), policy=policy, config=SMALL) as optimizer:
        before = weights(model)
        with pytest.raises(ZoffError, match=r"data_parallel=False") as caught:
            loss_of(model).backward()
            optimizer.step()
        assert "fully_shard" in str(caught.value) or "FSDP2" in str(caught.value)
        assert "2 ranks" in str(caught.value)
        assert_equal(weights(model), before)


def test_ranks_that_train_apart_on_purpose_say_so(two_ranks):
    model = mlp()
    config = OffloadConfig(bucket_bytes=200, chunk_numel=17, workers=2, data_parallel=False)
    with OffloadAdamW(model.parameters(), config=config) as optimizer:
        train(model, optimizer, 2)
        assert optimizer.statistics().steps == 2


def test_a_group_of_one_rank_is_no_group(one_rank):
    model = mlp()
    with OffloadAdamW(model.parameters(), config=SMALL) as optimizer:
        train(model, optimizer, 2)
        assert optimizer.statistics().steps == 2
