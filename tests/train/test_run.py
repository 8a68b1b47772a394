"""Whole runs: resumed, compared, interrupted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from zoff_async.errors import ClosedError, NonFiniteGradientWarning, StateError
from zoff_async.train.outcome import Outcome
from zoff_async.train.prepare import Request, prepare
from zoff_async.train.progress import Silent
from zoff_async.train.run import train

SMALL = {"batch": 2, "context": 16, "lr": 1e-2}


@contextmanager
def unwatched(title: str, *, first: int, last: int) -> Iterator[Silent]:
    yield Silent()


def run(folder: Path | None = None, **options: Any) -> Outcome:
    around = {"sample": 0, "checkpoint": None if folder is None else str(folder)}
    for name in ("resume", "stop_after", "save_every", "compare", "sample"):
        if name in options:
            around[name] = options.pop(name)
    base = {} if around.get("resume") else SMALL
    return train(prepare(Request({**base, **options}, **around)), unwatched)


def saved(folder: Path) -> dict[str, Any]:
    return torch.load(folder / "checkpoint.pt", weights_only=True)


def assert_same(left: Any, right: Any, where: str = "checkpoint") -> None:
    """Equal, tensors bit for bit, however deep."""
    assert type(left) is type(right), where
    if isinstance(left, dict):
        assert left.keys() == right.keys(), where
        for key in left:
            assert_same(left[key], right[key], f"{where}.{key}")
    elif isinstance(left, list | tuple):
        assert len(left) == len(right), where
        for place, pair in enumerate(zip(left, right, strict=True)):
            assert_same(*pair, f"{where}[{place}]")
    elif isinstance(left, torch.Tensor):
        assert left.dtype == right.dtype, where
        assert torch.equal(left, right), where
    else:
        assert left == right, where


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dtype": "bf16"},
        {"dtype": "bf16", "accumulate": 2, "max_norm": 0.5},
        {"policy": "serial"},
        {"policy": "in_backward"},
    ],
    ids=str,
)
def test_a_stopped_and_resumed_run_equals_the_whole_run_bit_for_bit(tmp_path, options):
    """Weights, masters, moments, counts, schedule and losses; the pause leaves no trace."""
    whole = run(tmp_path / "whole", steps=6, **options)
    run(tmp_path / "parts", steps=6, stop_after=3, **options)
    resumed = run(tmp_path / "parts", resume=True)

    assert resumed.losses == whole.losses
    assert_same(saved(tmp_path / "parts"), saved(tmp_path / "whole"))


def test_saving_on_the_way_changes_no_bit(tmp_path):
    plain = run(tmp_path / "plain", steps=5)
    saving = run(tmp_path / "saving", steps=5, save_every=2)

    assert saving.losses == plain.losses
    assert_same(saved(tmp_path / "saving"), saved(tmp_path / "plain"))


def test_a_stopped_run_is_saved_where_it_stopped(tmp_path):
    outcome = run(tmp_path, steps=6, stop_after=2)

    assert len(outcome.losses) == 2
    assert saved(tmp_path)["step"] == 2
    assert outcome.checkpoint == str(tmp_path / "checkpoint.pt")


def test_without_a_directory_nothing_is_saved(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    outcome = run(steps=2)

    assert outcome.checkpoint is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("accumulate", [1, 2])
def test_an_fp32_run_has_the_losses_of_plain_adamw(accumulate):
    outcome = run(steps=30, accumulate=accumulate, max_norm=1.0, compare=True)

    assert outcome.losses[-1] < outcome.losses[0] - 1
    assert outcome.losses[0] == outcome.reference_losses[0]
    assert outcome.max_abs_loss_difference < 1e-4


def test_a_bf16_run_has_the_losses_of_mixed_precision_adamw():
    outcome = run(steps=30, dtype="bf16", lr=2e-3, compare=True)

    assert outcome.losses[-1] < outcome.losses[0] - 1
    assert outcome.max_abs_loss_difference < 1e-2


def test_a_resumed_run_is_compared_from_its_first_step(tmp_path):
    run(tmp_path, steps=4, stop_after=2)
    outcome = run(tmp_path, resume=True, compare=True)

    assert len(outcome.losses) == len(outcome.reference_losses) == 4
    assert outcome.max_abs_loss_difference < 1e-4


def test_the_outcome_says_what_the_run_was():
    outcome = run(steps=3, sample=5, policy="overlap", kernel="numexpr")

    assert (outcome.kernel, outcome.device, outcome.settings.policy) == ("numexpr", "cpu", "overlap")
    assert outcome.parameters > 800_000
    assert outcome.tokens_per_s > 0
    assert outcome.sample
    assert {"d2h", "cpu", "h2d"} <= outcome.lanes.keys()


def test_every_state_is_accounted_for():
    """Masters and two moments in fp32 are 12 bytes a parameter, whatever else is held."""
    outcome = run(steps=2, dtype="bf16")

    on_host = sum(held for (place, _), held in outcome.places.items() if place == "host")
    weights = sum(held for (_, purpose), held in outcome.places.items() if purpose.startswith("weights"))
    assert weights == 2 * outcome.parameters
    assert 12 <= on_host / outcome.parameters < 24


class Stops(Silent):
    """Raises what it was given when a step is done."""

    def __init__(self, step: int, error: BaseException) -> None:
        self._step = step
        self._error = error

    def wants_step(self, step: int) -> bool:
        if step == self._step:
            raise self._error
        return False


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("broken")])
def test_a_run_that_is_cut_short_closes_its_optimizer_and_keeps_its_checkpoint(tmp_path, error):
    @contextmanager
    def stopping(title: str, *, first: int, last: int) -> Iterator[Stops]:
        yield Stops(4, error)

    prepared = prepare(Request({**SMALL, "steps": 6}, checkpoint=str(tmp_path), save_every=2))
    with pytest.raises(type(error)):
        train(prepared, stopping)

    assert saved(tmp_path)["step"] == 2
    with pytest.raises(ClosedError):
        prepared.optimizer.step()
    assert len(run(tmp_path, resume=True).losses) == 6


def test_a_loss_that_is_no_number_stops_the_run():
    prepared = prepare(Request({**SMALL, "steps": 6}))
    with torch.no_grad():
        prepared.model.token.weight.fill_(float("nan"))

    with (
        pytest.warns(NonFiniteGradientWarning, match="token.weight"),
        pytest.raises(FloatingPointError, match="the loss is nan at step 1:"),
    ):
        train(prepared, unwatched)
    with pytest.raises(ClosedError):
        prepared.optimizer.step()


def test_a_run_goes_on_with_the_options_it_was_started_with(tmp_path):
    run(tmp_path, steps=4, stop_after=2, seed=5, max_norm=0.5)
    outcome = run(tmp_path, resume=True)

    assert outcome.settings == replace(outcome.settings, steps=4, seed=5, max_norm=0.5, **SMALL)


def test_another_text_is_told(tmp_path):
    run(tmp_path / "run", steps=4, stop_after=2)
    other = tmp_path / "other.txt"
    other.write_text("another text " * 10)
    request = Request({"text": str(other)}, checkpoint=str(tmp_path / "run"), resume=True)

    with (prepared := prepare(request)).optimizer:
        assert prepared.notes == [
            f"--text was None in the checkpoint, is {str(other)!r} from here on",
            f"the checkpoint was trained on another text (pydoc_data.topics) than {other} now",
        ]


def test_a_finished_run_has_nothing_to_resume(tmp_path):
    run(tmp_path, steps=2)
    with pytest.raises(ValueError) as caught:
        run(tmp_path, resume=True)

    assert str(caught.value) == (
        f"the run in {str(tmp_path)!r} has done 2 steps of 2: nothing is left to do; "
        "for more give a larger --steps or --stop-after"
    )


def test_a_finished_run_can_be_made_longer(tmp_path):
    run(tmp_path, steps=2)

    assert len(run(tmp_path, resume=True, steps=4).losses) == 4


def test_a_run_is_not_written_over_another(tmp_path):
    run(tmp_path, steps=1)
    with pytest.raises(ValueError) as caught:
        run(tmp_path, steps=1)

    assert str(caught.value) == (
        f"--checkpoint {str(tmp_path)!r} holds a run already: add --resume to go on with it, or name another directory"
    )
    assert saved(tmp_path)["step"] == 1


def test_a_file_is_no_directory_for_checkpoints(tmp_path):
    path = tmp_path / "file"
    path.touch()
    with pytest.raises(ValueError) as caught:
        run(path, steps=1)

    assert str(caught.value) == f"cannot make --checkpoint {str(path)!r}: File exists; name another directory"


def test_another_model_is_refused_by_name(tmp_path):
    run(tmp_path, steps=2, stop_after=1)
    with pytest.raises(StateError) as caught:
        run(tmp_path, resume=True, size="small")

    assert str(caught.value) == (
        "the checkpoint holds another model: --size was 'tiny' there and is 'small' now; "
        "leave --size out, or name another --checkpoint directory"
    )


@pytest.mark.parametrize(
    ("around", "message"),
    [
        ({"resume": True}, "--resume needs a directory: add --checkpoint DIR"),
        ({"save_every": 2}, "--save-every needs a directory: add --checkpoint DIR"),
        ({"stop_after": 0}, "--stop-after must be at least 1, got 0"),
        ({"sample": -1}, "--sample must be at least 0, got -1"),
        ({"save_every": -1, "checkpoint": "x"}, "--save-every must be at least 0, got -1"),
    ],
)
def test_a_request_that_makes_no_sense_is_refused(around, message):
    with pytest.raises(ValueError) as caught:
        Request({}, **around)

    assert str(caught.value) == message


def test_a_model_that_the_machine_cannot_hold_is_refused_before_it_is_built(monkeypatch):
    pages = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 6_000_000}
    monkeypatch.setattr("os.sysconf", pages.__getitem__)
    with pytest.raises(ValueError) as caught:
        prepare(Request({"size": "13b", "device": "cpu", "dtype": "bf16"}))

    assert str(caught.value) == (
        "--size 13b needs at least 176 GB of host memory for masters, moments and weights, "
        "this machine has 25 GB: choose a smaller --size"
    )
