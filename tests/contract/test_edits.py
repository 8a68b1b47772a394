"""Weights changed behind the optimizer's back are noticed before the next update, and nobody's digits are lost."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from torch import nn

from tests.contract.loops import (
    ATOMIC,
    GATED,
    LATE,
    PLAIN,
    SMALL,
    assert_equal,
    batch,
    loss_of,
    mlp,
    same_with_torch,
    weights,
)
from zoff_async import OffloadAdamW, OffloadConfig, StepError

every_setup = pytest.mark.parametrize("setup", ATOMIC, ids=lambda setup: setup.name)


def other_weights():
    torch.manual_seed(77)
    return {name: torch.randn_like(value) for name, value in mlp().state_dict().items()}


@torch.no_grad()
def clamp(model):
    model[0].weight.clamp_(-0.05, 0.05)


def clamp_data(model):
    model[0].weight.data.clamp_(-0.05, 0.05)


def load(model):
    model.load_state_dict(other_weights())


def assign(model):
    model.load_state_dict({name: value.clone() for name, value in other_weights().items()})


@torch.no_grad()
def copy_in_place(model):
    for name, parameter in model.named_parameters():
        parameter.copy_(other_weights()[name])


def replace_data(model):
    for name, parameter in model.named_parameters():
        parameter.data = other_weights()[name]


def one_element(model):
    model[3].weight.data[1, 2] = 5.0


def swap_rows(model):
    """A permutation: every sum and norm of the weights stays what it was."""
    data = model[0].weight.data
    data[[0, 1]] = data[[1, 0]]


def negate_two(model):
    """Two elements change by the same amount in opposite directions."""
    data = model[0].weight.data
    data[0, 0] += 0.25
    data[0, 1] -= 0.25


def reinitialise(model):
    nn.init.normal_(model[3].weight, std=0.5, generator=torch.Generator().manual_seed(1))


def through_numpy(model):
    model[3].bias.detach().numpy()[:] = 0.75


def vector_to_parameters(model):
    vector = nn.utils.parameters_to_vector(model.parameters()).detach()
    nn.utils.vector_to_parameters(vector * 0.5, model.parameters())


EDITS = (
    clamp,
    clamp_data,
    load,
    assign,
    copy_in_place,
    replace_data,
    one_element,
    swap_rows,
    negate_two,
    reinitialise,
    through_numpy,
    vector_to_parameters,
)


@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.__name__)
@pytest.mark.parametrize("when", ["before backward", "before step"])
def test_an_edit_of_the_weights_counts(edit, when):
    """After the step the weights are the edited ones minus the update, never the old ones minus the update."""

    def loop(model, make):
        optimizer = make(model.parameters(), lr=1e-2)
        for step in range(6):
            if step in (2, 4) and when == "before backward":
                edit(model)
            loss_of(model, step).backward()
            if step in (2, 4) and when == "before step":
                edit(model)
            optimizer.step()
            optimizer.zero_grad()
        return optimizer

    same_with_torch(loop)


@every_setup
@pytest.mark.parametrize("edit", [clamp, clamp_data, load, one_element], ids=lambda edit: edit.__name__)
def test_an_edit_right_after_step_counts_under_every_policy(setup, edit):
    """With the update in flight: the edit waits for it, as a read does."""

    def loop(model, make):
        optimizer = make(model.parameters(), lr=1e-2)
        for step in range(5):
            loss_of(model, step).backward()
            optimizer.step()
            edit(model)
            optimizer.zero_grad()
        return optimizer

    same_with_torch(loop, setup)


@every_setup
def test_averages_swapped_in_and_out(setup):
    """An EMA by hand: swapped in for an evaluation, swapped out again, by ``.data`` and by ``copy_``."""

    def loop(model, make):
        optimizer, losses = make(model.parameters(), lr=1e-2), []
        average = [parameter.detach().clone() for parameter in model.parameters()]
        for step in range(6):
            loss_of(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for mean, parameter in zip(average, model.parameters(), strict=True):
                    mean.lerp_(parameter, 0.1)
            kept = [parameter.detach().clone() for parameter in model.parameters()]
            with torch.no_grad():
                for mean, parameter in zip(average, model.parameters(), strict=True):
                    parameter.data.copy_(mean) if step % 2 else parameter.copy_(mean)
                losses.append(loss_of(model, 100).item())
                for back, parameter in zip(kept, model.parameters(), strict=True):
                    parameter.data.copy_(back) if step % 2 else parameter.copy_(back)
        return optimizer, losses

    same_with_torch(loop, setup)


def test_elements_that_nobody_touched_keep_their_fp32_digits():
    """bf16 weights: one element edited, the other masters bit for bit those of a run without the edit."""

    def run(edit):
        weight = nn.Parameter(torch.linspace(0.5, 1.5, 40).bfloat16())
        with OffloadAdamW([weight], lr=1e-3, config=SMALL) as optimizer:
            for step in range(6):
                if edit and step == 3:
                    with torch.no_grad():
                        weight[7] = 100.0
                weight.grad = torch.full((40,), 0.1 * (step + 1), dtype=torch.bfloat16)
                optimizer.step()
            return optimizer.master(weight)

    edited, untouched = run(True), run(False)
    keep = torch.arange(40) != 7
    assert torch.equal(edited[keep], untouched[keep])
    assert float(edited[7]) == pytest.approx(100.0, abs=0.1)
    assert not torch.equal(untouched, untouched.bfloat16().float())  # there are digits to lose


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_weights_written_back_unchanged_are_no_edit(dtype):
    """A state loaded into itself, or swapped out and in: every master keeps its digits, and nothing is logged."""

    def run(disturb):
        model = mlp(dtype)
        with OffloadAdamW(model.parameters(), lr=1e-3, config=SMALL) as optimizer:
            for step in range(4):
                if disturb:
                    model.load_state_dict(copy.deepcopy(model.state_dict()))
                loss_of(model, step, dtype).backward()
                optimizer.step()
                optimizer.zero_grad()
            return [optimizer.master(parameter) for parameter in model.parameters()]

    assert_equal(run(True), run(False))


def test_an_edit_is_logged_once_with_its_name(caplog):
    model = mlp()
    with (
        caplog.at_level(logging.WARNING, "zoff_async"),
        OffloadAdamW(model.named_parameters(), config=SMALL) as optimizer,
    ):
        for step in range(4):
            if step in (1, 2):
                with torch.no_grad():
                    model[3].bias[0] = 1.0 + step
            loss_of(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
    told = [record.getMessage() for record in caplog.records]
    assert told == ["1 elements of '3.bias' were changed outside the optimizer and have been taken into the masters"]


@pytest.mark.parametrize("setup", [PLAIN, GATED, LATE], ids=lambda setup: setup.name)
def test_refresh_takes_the_weights_at_once(setup):
    model = mlp()
    optimizer = setup.make(model.parameters(), model=model, lr=1e-2)
    loss_of(model).backward()
    optimizer.step()
    model[0].weight.data.fill_(0.25)
    optimizer.refresh()
    assert torch.equal(optimizer.master(model[0].weight), torch.full((11, 6), 0.25))
    saved = optimizer.state_dict()["state"][0]["master"]
    assert torch.equal(saved, torch.full((11, 6), 0.25))
    optimizer.close()


def test_a_saved_state_after_an_edit_holds_the_edited_weights():
    """``state_dict()`` between an edit and the next step: resuming from it must not bring the old weights back."""
    model = mlp()
    with OffloadAdamW(model.parameters(), lr=1e-2, config=SMALL) as optimizer:
        loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model[0].weight.fill_(0.25)
        saved = {"model": copy.deepcopy(model.state_dict()), "optimizer": optimizer.state_dict()}
        loss_of(model, 1).backward()
        optimizer.step()
        expected = weights(model)
    again = mlp()
    with OffloadAdamW(again.parameters(), lr=1e-2, config=SMALL) as optimizer:
        again.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        loss_of(again, 1).backward()
        optimizer.step()
        optimizer.synchronize()
        assert_equal(weights(again), expected)


def test_master_after_an_edit_is_told_as_it_will_be_used():
    model = mlp()
    with OffloadAdamW(model.parameters(), lr=1e-2, config=SMALL) as optimizer:
        loss_of(model).backward()
        optimizer.step()
        optimizer.synchronize()
        with torch.no_grad():
            model[3].bias.fill_(0.5)
        optimizer.refresh()
        assert torch.equal(optimizer.master(model[3].bias), torch.full((3,), 0.5))


def test_noticing_data_edits_can_be_switched_off():
    """``notice_edits=False``: edits through ``.data`` need ``refresh()``; all others are still noticed."""
    model = mlp()
    config = OffloadConfig(bucket_bytes=200, chunk_numel=17, workers=2, notice_edits=False)
    with OffloadAdamW(model.parameters(), lr=1e-2, config=config) as optimizer:
        model[0].weight.data.fill_(0.25)
        optimizer.refresh()
        with torch.no_grad():
            model[3].weight.fill_(0.125)
        loss_of(model).backward()
        optimizer.step()
        optimizer.synchronize()
        assert float((model[0].weight.detach() - 0.25).abs().max()) < 0.02
        assert float((model[3].weight.detach() - 0.125).abs().max()) < 0.02


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.embedding, self.head = nn.Linear(6, 8), nn.Linear(6, 8, bias=False)

    def forward(self, x):
        return self.embedding(x) + self.head(x)


@every_setup
def test_weights_tied_again_after_a_load(setup):
    """A load by hand breaks the tie; the loop ties it again, as ``tie_weights`` functions do."""

    def loop(model, make):
        model.head.weight = model.embedding.weight
        optimizer = make(model.parameters(), lr=1e-2)
        for step in range(5):
            loss_of(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 2:
                with torch.no_grad():
                    model.embedding.weight.mul_(0.5)
                model.head.weight = model.embedding.weight
        assert model.head.weight is model.embedding.weight
        return optimizer

    same_with_torch(loop, setup, Tied)


@every_setup
def test_weights_moved_to_another_place_in_memory(setup):
    """``p.data = p.data.clone()``, as flattening and offloading code does: no edit, and the new place is written to."""

    def loop(model, make):
        optimizer = make(model.parameters(), lr=1e-2)
        for step in range(4):
            loss_of(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
            for parameter in model.parameters():
                parameter.data = parameter.data.clone()
        return optimizer

    same_with_torch(loop, setup)


@pytest.mark.parametrize("setup", [PLAIN, GATED], ids=lambda setup: setup.name)
def test_low_precision_weights_equal_their_masters_after_an_edit(setup):
    model = mlp(torch.bfloat16)
    optimizer = setup.make(model.parameters(), model=model, lr=1e-2)
    for step in range(4):
        loss_of(model, step, torch.bfloat16).backward()
        if step == 2:
            model[0].weight.data.mul_(1.5)
        optimizer.step()
        optimizer.zero_grad()
    optimizer.synchronize()
    for parameter in model.parameters():
        assert torch.equal(parameter.detach(), optimizer.master(parameter).bfloat16())
    optimizer.close()


def test_nan_written_by_the_user_is_the_users():
    """An edit to NaN is taken over like any other: it is not mistaken for a weight that compares unequal to itself."""
    model = mlp()
    with OffloadAdamW(model.parameters(), lr=1e-2, config=SMALL) as optimizer:
        with torch.no_grad():
            model[3].bias[1] = torch.nan
        model[0](batch(0)).sum().backward()
        optimizer.step()
        optimizer.synchronize()
        assert model[3].bias.isnan().tolist() == [False, True, False]


def test_edits_while_a_delayed_update_is_pending_are_refused():
    model = mlp()
    with OffloadAdamW(model.named_parameters(), lr=1e-2, policy="delayed", config=SMALL) as optimizer:
        loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model[0].weight.fill_(0.5)
        with pytest.raises(StepError, match="synchronize"):
            loss_of(model, 1).backward()
            optimizer.step()
            optimizer.synchronize()
