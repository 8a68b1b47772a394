"""State in and out: torch's own AdamW shape and the fp32 masters, exact over every way of saving and resuming."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch

from tests.contract.loops import (
    ATOMIC,
    DELAYED,
    EXACT,
    GATED,
    LATE,
    PLAIN,
    SMALL,
    assert_equal,
    everything,
    loss_of,
    mlp,
    weights,
)
from zoff_async import OffloadAdam, OffloadAdamW, OffloadConfig, StateError

every_setup = pytest.mark.parametrize("setup", [*EXACT, DELAYED], ids=lambda setup: setup.name)


def train(model, optimizer, steps, start=0, dtype=torch.float32):
    for step in range(start, start + steps):
        loss_of(model, step, dtype).backward()
        optimizer.step()
        optimizer.zero_grad()


def through_a_file(saved):
    """What ``torch.save`` and a ``weights_only`` load make of it."""
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def groups_of(model):
    return [
        {"params": model[0].parameters(), "lr": 3e-3, "weight_decay": 0.2},
        {"params": [*model[2].parameters(), *model[3].parameters()], "betas": (0.8, 0.9)},
    ]


@every_setup
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_resuming_equals_going_on_bit_for_bit(setup, dtype):
    """Saved in the middle, through a file, into fresh objects; the learning rate changes on the way.

    A delayed update is flushed by the save: the run beside it synchronizes there.
    """

    def run(resume):
        model = mlp(dtype)
        optimizer = setup.make(groups_of(model), model=model, lr=1e-2)
        train(model, optimizer, 5, dtype=dtype)
        optimizer.param_groups[0]["lr"] = 7e-3
        saved = through_a_file({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        if resume:
            optimizer.close()
            model = mlp(dtype)
            optimizer = setup.make(groups_of(model), model=model, lr=1.0)
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            assert optimizer.param_groups[0]["lr"] == 7e-3
            assert optimizer.param_groups[1]["betas"] == (0.8, 0.9)
        train(model, optimizer, 5, start=5, dtype=dtype)
        optimizer.synchronize()
        result = everything(model, optimizer)
        optimizer.close()
        return result

    assert_equal(run(resume=True), run(resume=False))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("order", ["model first", "optimizer first", "optimizer only"])
def test_the_models_state_may_be_loaded_before_or_after(order, dtype):
    """In bf16 the masters keep the digits that the weights lack, in either order."""
    model = mlp(dtype)
    with OffloadAdamW(model.parameters(), lr=1e-2, config=SMALL) as optimizer:
        train(model, optimizer, 4, dtype=dtype)
        saved = {"model": copy.deepcopy(model.state_dict()), "optimizer": optimizer.state_dict()}
        train(model, optimizer, 3, start=4, dtype=dtype)
        expected = everything(model, optimizer)

    again = mlp(dtype)
    with OffloadAdamW(again.parameters(), lr=1e-2, config=SMALL) as optimizer:
        loss_of(again, 99, dtype).backward()  # not quite fresh
        optimizer.step()
        optimizer.zero_grad()
        if order == "model first":
            again.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        if order == "optimizer first":
            again.load_state_dict(saved["model"])
        if order == "optimizer only":
            with torch.no_grad():
                for parameter, value in zip(again.parameters(), saved["model"].values(), strict=True):
                    parameter.copy_(value)
        train(again, optimizer, 3, start=4, dtype=dtype)
        assert_equal(everything(again, optimizer), expected)


def test_resuming_into_other_sizes_changes_no_bit():
    def run(first, second):
        model = mlp()
        with OffloadAdamW(model.parameters(), lr=1e-2, config=first) as optimizer:
            train(model, optimizer, 3)
            saved = optimizer.state_dict()
        again = mlp()
        again.load_state_dict(model.state_dict())
        with OffloadAdamW(again.parameters(), lr=1e-2, config=second) as optimizer:
            optimizer.load_state_dict(saved)
            train(again, optimizer, 3, start=3)
            return everything(again, optimizer)

    other = OffloadConfig(bucket_bytes=1, chunk_numel=5, workers=1)
    expected = run(SMALL, SMALL)
    assert_equal(run(SMALL, other), expected)
    assert_equal(run(other, SMALL), expected)


def test_the_shape_is_torchs_with_a_master_beside_it():
    model, reference = mlp(), mlp()
    expected = torch.optim.AdamW(reference.parameters(), lr=1e-2, foreach=False)
    with OffloadAdamW(model.parameters(), lr=1e-2, config=SMALL) as optimizer:
        train(model, optimizer, 2)
        train(reference, expected, 2)
        ours, theirs = optimizer.state_dict(), expected.state_dict()
        assert ours["state"].keys() == theirs["state"].keys()
        assert ours["param_groups"][0]["params"] == theirs["param_groups"][0]["params"]
        for key, values in theirs["state"].items():
            assert ours["state"][key].keys() == values.keys() | {"master"}
            for name, value in values.items():
                assert ours["state"][key][name].dtype == value.dtype == torch.float32
                assert ours["state"][key][name].shape == value.shape
            assert ours["state"][key]["master"].dtype == torch.float32
        for parameter in model.parameters():
            assert optimizer.state[parameter].keys() == {"step", "exp_avg", "exp_avg_sq", "master"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_fp32_state_of_a_low_precision_model_stays_fp32(dtype):
    """torch's own loading would cast it to the parameter's dtype."""
    model = mlp(dtype)
    with OffloadAdamW(model.parameters(), lr=1e-3, config=SMALL) as optimizer:
        train(model, optimizer, 3, dtype=dtype)
        before = everything(model, optimizer)
        optimizer.load_state_dict(through_a_file(optimizer.state_dict()))
        after = everything(model, optimizer)
        assert_equal(after, before)
        assert all(
            values[name].dtype == torch.float32
            for values in optimizer.state_dict()["state"].values()
            for name in values
        )


@pytest.mark.parametrize("setup", [PLAIN, GATED], ids=lambda setup: setup.name)
def test_torchs_adamw_takes_our_state_and_we_take_torchs(setup):
    """Three optimizers in turn on one model, against torch's all the way."""
    reference, model = mlp(), mlp()
    expected = torch.optim.AdamW(groups_of(reference), lr=1e-2, foreach=False)
    train(reference, expected, 9)

    first = torch.optim.AdamW(groups_of(model), lr=1e-2, foreach=False)
    train(model, first, 3)
    ours = setup.make(groups_of(model), model=model, lr=0.5)
    ours.load_state_dict(through_a_file(first.state_dict()))
    train(model, ours, 3, start=3)
    saved = through_a_file(ours.state_dict())
    ours.close()
    last = torch.optim.AdamW(groups_of(model), lr=0.5, foreach=False)
    last.load_state_dict(saved)
    train(model, last, 3, start=6)

    torch.testing.assert_close(weights(model), weights(reference), rtol=1e-5, atol=1e-6)
    assert last.param_groups[0]["lr"] == 3e-3
    assert last.param_groups[1]["betas"] == (0.8, 0.9)
    for parameter in model.parameters():
        assert float(last.state[parameter]["step"]) == 9.0


def test_torchs_state_with_parameters_that_never_stepped():
    """torch has no entry for them: they start at zero here, and what we save of them torch takes."""
    reference, model = mlp(), mlp()
    first = torch.optim.AdamW(reference.parameters(), lr=1e-2, foreach=False)
    reference[0](torch.ones(2, 6)).sum().backward()
    first.step()
    model.load_state_dict(reference.state_dict())
    with OffloadAdamW(model.parameters(), lr=1e-2, config=SMALL) as optimizer:
        train(model, optimizer, 2, start=50)
        model.load_state_dict(reference.state_dict())
        optimizer.load_state_dict(first.state_dict())
        steps = [float(values["step"]) for values in optimizer.state_dict()["state"].values()]
        assert steps == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0]
        first.zero_grad()
        train(model, optimizer, 3)
        train(reference, first, 3)
        torch.testing.assert_close(weights(model), weights(reference), rtol=1e-5, atol=1e-6)
        first.load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize("setup", ATOMIC, ids=lambda setup: setup.name)
def test_a_snapshot_does_not_change_and_is_the_synchronous_one(setup):
    """Taken with the update in flight, right after ``step()``."""

    def run(setup):
        model = mlp()
        optimizer = setup.make(model.parameters(), model=model, lr=1e-2)
        saved = []
        for step in range(4):
            loss_of(model, step).backward()
            optimizer.step()
            snapshot = {"optimizer": optimizer.state_dict(), "model": copy.deepcopy(model.state_dict())}
            saved.append((snapshot, copy.deepcopy(snapshot)))
            optimizer.zero_grad()
        optimizer.synchronize()
        optimizer.close()
        return saved

    for (kept, at_once), (expected, _) in zip(run(setup), run(PLAIN), strict=True):
        for mine, other in ((kept, at_once), (kept, expected)):
            for key, values in other["optimizer"]["state"].items():
                assert_equal(mine["optimizer"]["state"][key].values(), values.values())
            assert_equal(mine["model"].values(), other["model"].values())


def test_a_snapshot_shares_no_memory_with_the_optimizer():
    model = mlp()
    with OffloadAdamW(model.parameters(), config=SMALL) as optimizer:
        train(model, optimizer, 1)
        before = everything(model, optimizer)
        for values in optimizer.state_dict()["state"].values():
            for value in values.values():
                value.fill_(1e9)
        optimizer.param_groups[0]["lr"] = 1e-3
        optimizer.state_dict()["param_groups"][0]["lr"] = 5.0
        assert optimizer.param_groups[0]["lr"] == 1e-3
        assert_equal(everything(model, optimizer), before)


def test_a_snapshot_with_a_tensor_learning_rate_does_not_change():
    """Schedulers fill such a learning rate in place."""
    model = mlp()
    with OffloadAdamW(model.parameters(), lr=torch.tensor(1e-2), config=SMALL) as optimizer:
        saved = optimizer.state_dict()
        optimizer.param_groups[0]["lr"].fill_(5.0)
        assert float(saved["param_groups"][0]["lr"]) == pytest.approx(1e-2)
        optimizer.load_state_dict(saved)
        optimizer.param_groups[0]["lr"].fill_(7.0)
        assert float(saved["param_groups"][0]["lr"]) == pytest.approx(1e-2)


def test_loading_keeps_no_memory_of_what_is_loaded_and_copies_into_its_own():
    model = mlp()
    with OffloadAdamW(model.parameters(), config=SMALL) as optimizer:
        train(model, optimizer, 1)
        places = [
            value.data_ptr() for values in optimizer.state.values() for name, value in values.items() if name != "step"
        ]
        saved = optimizer.state_dict()
        optimizer.load_state_dict(saved)
        before = everything(model, optimizer)
        for values in saved["state"].values():
            for value in values.values():
                value.fill_(1e9)
        saved["param_groups"][0]["lr"] = 9.0
        assert_equal(everything(model, optimizer), before)
        assert optimizer.param_groups[0]["lr"] == 1e-3
        assert places == [
            value.data_ptr() for values in optimizer.state.values() for name, value in values.items() if name != "step"
        ]


def test_the_saved_state_is_plain():
    """Tensors, numbers, strings, lists and dicts only: it pickles, and loads with ``weights_only``."""
    model = mlp()
    with OffloadAdamW(model.named_parameters(), lr=torch.tensor(1e-3), config=SMALL) as optimizer:
        train(model, optimizer, 1)
        saved = optimizer.state_dict()
        again = through_a_file(saved)
        assert pickle.loads(pickle.dumps(saved)).keys() == saved.keys()
        optimizer.load_state_dict(again)
        for values in saved["state"].values():
            for value in values.values():
                assert type(value) is torch.Tensor
                assert value.device.type == "cpu"
                assert value.untyped_storage().nbytes() == value.nbytes  # no view of something larger


@pytest.mark.parametrize("setup", [PLAIN, LATE], ids=lambda setup: setup.name)
def test_gradients_survive_a_save_and_a_load(setup):
    """Saved or loaded between backward and step, as Trainer-like loops do: the gradient still counts."""

    def run(save):
        model = mlp()
        optimizer = setup.make(model.parameters(), model=model, lr=1e-2)
        train(model, optimizer, 2)
        loss_of(model, 2).backward()
        if save:
            optimizer.load_state_dict(optimizer.state_dict())
            assert all(parameter.grad is not None for parameter in model.parameters())
        loss_of(model, 3).backward()
        optimizer.step()
        return everything(model, optimizer)

    assert_equal(run(save=True), run(save=False))


def test_an_untrained_optimizer_has_a_whole_state():
    """Filled at construction: code that calls ``step()`` to fill an empty state must not be tempted."""
    model = mlp()
    with OffloadAdamW(model.parameters(), lr=1e-2, config=SMALL) as optimizer:
        assert len(optimizer.state) == 6
        saved = optimizer.state_dict()
        assert [float(values["step"]) for values in saved["state"].values()] == [0.0] * 6
        train(model, optimizer, 2)
        expected = everything(model, optimizer)
    again = mlp()
    with OffloadAdamW(again.parameters(), lr=1e-2, config=SMALL) as optimizer:
        optimizer.load_state_dict(through_a_file(saved))
        train(again, optimizer, 2)
        assert_equal(everything(again, optimizer), expected)


def test_frozen_parameters_have_no_state_and_keep_their_place():
    """As in torch: their numbers are in ``param_groups``, nothing in ``state``; loading pairs by place."""
    model, reference = mlp(), mlp()
    for each in (model, reference):
        each[2].requires_grad_(False)
    expected = torch.optim.AdamW(reference.parameters(), lr=1e-2, foreach=False)
    train(reference, expected, 2)
    with OffloadAdamW(model.parameters(), lr=1e-2, config=SMALL) as optimizer:
        train(model, optimizer, 2)
        saved = optimizer.state_dict()
        assert saved["state"].keys() == expected.state_dict()["state"].keys() == {0, 1, 4, 5}
        assert saved["param_groups"][0]["params"] == list(range(6))
        optimizer.load_state_dict(expected.state_dict())
        train(model, optimizer, 2, start=5)
        train(reference, expected, 2, start=5)
        torch.testing.assert_close(weights(model), weights(reference), rtol=1e-5, atol=1e-6)


def test_state_of_a_parameter_that_is_still_frozen_here_waits_for_it():
    """Saved with everything trainable, resumed with a layer frozen, thawed later: it goes on from what was saved."""
    model = mlp()
    with OffloadAdamW(model.parameters(), lr=1e-2, config=SMALL) as optimizer:
        train(model, optimizer, 3)
        saved, state = optimizer.state_dict(), copy.deepcopy(model.state_dict())
    ours, theirs = mlp(), mlp()
    for each in (ours, theirs):
        each.load_state_dict(state)
        each[2].requires_grad_(False)
    reference = torch.optim.AdamW(theirs.parameters(), lr=1e-2, foreach=False)
    reference.load_state_dict(saved)
    with OffloadAdamW(ours.parameters(), lr=1e-2, config=SMALL) as optimizer:
        optimizer.load_state_dict(saved)
        for each, chosen in ((ours, optimizer), (theirs, reference)):
            train(each, chosen, 2)
            each[2].requires_grad_(True)
            train(each, chosen, 2, start=7)
        torch.testing.assert_close(weights(ours), weights(theirs), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", [OffloadAdamW, OffloadAdam])
def test_a_state_saved_by_a_pickled_trainer_state_of_numbers_loads(kind):
    """``step`` as a plain number, as older checkpoints have it."""
    model = mlp()
    with kind(model.parameters(), lr=1e-2, config=SMALL) as optimizer:
        train(model, optimizer, 2)
        saved = optimizer.state_dict()
        before = everything(model, optimizer)
        for values in saved["state"].values():
            values["step"] = int(values["step"])
        optimizer.load_state_dict(saved)
        assert_equal(everything(model, optimizer), before)


# --- what is refused --------------------------------------------------------------------------------------------------


def without(name):
    def change(saved):
        for values in saved["state"].values():
            del values[name]
        return saved

    return change


def reshaped(saved):
    saved["state"][4]["exp_avg"] = saved["state"][4]["exp_avg"].flatten()
    return saved


def reshaped_master(saved):
    saved["state"][5]["master"] = torch.zeros(2, 3)
    return saved


def with_group(**values):
    def change(saved):
        saved["param_groups"][0].update(values)
        return saved

    return change


FOREIGN = {
    "not a dict": (
        lambda saved: [1, 2],
        "state_dict has no 'state' and 'param_groups': it is not an optimizer's state",
    ),
    "a model's state": (
        lambda saved: mlp().state_dict(),
        "state_dict has no 'state' and 'param_groups': it is not an optimizer's state",
    ),
    "of a newer version": (
        lambda saved: {**saved, "zoff_async": {"version": 99, "rule": "adamw"}},
        "state_dict has version 99, this zoff_async reads up to 1: upgrade it",
    ),
    "of Adam": (
        lambda saved: {**saved, "zoff_async": {"version": 1, "rule": "adam"}},
        "state_dict is of 'adam', this optimizer is 'adamw'",
    ),
    "of SGD": (
        without("exp_avg_sq"),
        "state_dict has no 'exp_avg_sq' for '0.weight': it is the state of another optimizer",
    ),
    "of another model": (
        reshaped,
        "exp_avg of '3.weight' has shape (33,) in the state_dict, the parameter has (3, 11): "
        "it is the state of another model",
    ),
    "of another model's masters": (
        reshaped_master,
        "master of '3.bias' has shape (2, 3) in the state_dict, the parameter has (3,): "
        "it is the state of another model",
    ),
    "with more groups": (
        lambda saved: {**saved, "param_groups": saved["param_groups"] * 2},
        "state_dict has 2 param groups, this optimizer has 1",
    ),
    "with fewer parameters": (
        with_group(params=[0, 1, 2]),
        "param group 0 has 3 parameters in the state_dict and 6 here",
    ),
    "of AMSGrad": (
        with_group(amsgrad=True),
        "amsgrad=True of param_groups[0] in the state_dict is not honoured by this optimizer: "
        "leave it out, or use torch.optim.AdamW",
    ),
    "of a maximizing run": (
        with_group(maximize=True),
        "maximize=True of param_groups[0] in the state_dict is not honoured by this optimizer: "
        "leave it out, or use torch.optim.AdamW",
    ),
    "with a broken learning rate": (
        with_group(lr=-1.0),
        "lr of param_groups[0] in the state_dict must be finite and not negative, got -1.0",
    ),
}


@pytest.mark.parametrize("case", FOREIGN)
def test_a_foreign_state_is_refused_by_name_and_changes_nothing(case):
    change, message = FOREIGN[case]
    model = mlp()
    with OffloadAdamW(model.named_parameters(), lr=1e-2, config=SMALL) as optimizer:
        train(model, optimizer, 2)
        loss_of(model, 7).backward()
        before = everything(model, optimizer)
        groups = copy.deepcopy([{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups])
        foreign = change(optimizer.state_dict())
        with pytest.raises(StateError) as caught:
            optimizer.load_state_dict(foreign)
        assert str(caught.value) == message
        assert_equal(everything(model, optimizer), before)
        assert groups == [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
        optimizer.step()
        assert optimizer.statistics().steps == 3


def test_a_state_without_all_of_its_parameters_is_refused_half_way_with_nothing_changed():
    """The last parameter's state is broken: the first ones must not have been taken."""
    model = mlp()
    with OffloadAdamW(model.parameters(), lr=1e-2, config=SMALL) as optimizer:
        train(model, optimizer, 2)
        before = everything(model, optimizer)
        saved = optimizer.state_dict()
        for values in saved["state"].values():
            values["exp_avg"].fill_(3.0)
        saved["state"][5]["exp_avg_sq"] = "not a tensor"
        with pytest.raises(StateError, match="exp_avg_sq"):
            optimizer.load_state_dict(saved)
        assert_equal(everything(model, optimizer), before)
