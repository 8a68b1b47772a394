"""Checkpoints: whole or not at all, and ours or refused."""

from __future__ import annotations

import os

import pytest
import torch

from zoff_async.errors import StateError
from zoff_async.train.saving import Checkpoint, load_checkpoint, resumed_settings, save_checkpoint
from zoff_async.train.settings import settings_from


def checkpoint(step: int = 2, **options: object) -> Checkpoint:
    return Checkpoint(
        settings=settings_from({"steps": 9, **options}),
        step=step,
        losses=[3.0] * step,
        text_name="book",
        text_sha256="ab",
        model={"weight": torch.arange(3.0)},
        optimizer={"state": {0: {"step": 2, "exp_avg": torch.ones(3)}}},
        schedule={"last_epoch": 2},
        rng={"cpu": torch.get_rng_state()},
    )


def rewrite(folder, **changes: object) -> None:
    path = folder / "checkpoint.pt"
    content = torch.load(path, weights_only=True)
    torch.save({**content, **changes}, path)


def test_a_checkpoint_comes_back_as_it_was(tmp_path):
    saved = checkpoint()
    save_checkpoint(str(tmp_path / "new" / "folder"), saved)
    loaded = load_checkpoint(str(tmp_path / "new" / "folder"))

    assert loaded.settings == saved.settings
    assert (loaded.step, loaded.losses, loaded.text_name) == (2, [3.0, 3.0], "book")
    assert torch.equal(loaded.model["weight"], saved.model["weight"])
    assert torch.equal(loaded.optimizer["state"][0]["exp_avg"], torch.ones(3))
    assert torch.equal(loaded.rng["cpu"], saved.rng["cpu"])


@pytest.mark.parametrize("failing", ["torch.save", "os.fsync", "os.replace"])
@pytest.mark.parametrize("fault", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_save_that_fails_leaves_the_checkpoint_before(tmp_path, monkeypatch, failing, fault):
    folder = str(tmp_path)
    save_checkpoint(folder, checkpoint(step=2))

    def fail(*_: object) -> None:
        raise fault

    with monkeypatch.context() as patch:
        patch.setattr(failing, fail)
        with pytest.raises(type(fault)):
            save_checkpoint(folder, checkpoint(step=3))

    assert load_checkpoint(folder).step == 2
    assert os.listdir(folder) == ["checkpoint.pt"]


def test_a_checkpoint_is_replaced_in_one_move(tmp_path, monkeypatch):
    """Until the rename, the old file is whole under its own name."""
    folder = str(tmp_path)
    save_checkpoint(folder, checkpoint(step=2))
    seen = []
    replace = os.replace

    def look_then_replace(source, target) -> None:
        seen.append(load_checkpoint(folder).step)
        replace(source, target)

    monkeypatch.setattr(os, "replace", look_then_replace)
    save_checkpoint(folder, checkpoint(step=3))

    assert seen == [2]
    assert load_checkpoint(folder).step == 3


def test_an_empty_directory_has_nothing_to_resume(tmp_path):
    with pytest.raises(StateError) as caught:
        load_checkpoint(str(tmp_path))

    assert str(caught.value) == (
        f"no checkpoint in {str(tmp_path)!r} (looked for checkpoint.pt): leave --resume out or name its place"
    )


@pytest.mark.parametrize("content", [b"", b"not a zip", b"PK\x03\x04 cut short"])
def test_a_damaged_file_is_refused(tmp_path, content):
    (tmp_path / "checkpoint.pt").write_bytes(content)
    with pytest.raises(StateError) as caught:
        load_checkpoint(str(tmp_path))

    message = str(caught.value)
    assert message.startswith(f"cannot read checkpoint {str(tmp_path / 'checkpoint.pt')!r} (")
    assert message.endswith("): it is damaged or not a checkpoint")
    assert "\n" not in message


def test_a_truncated_file_is_refused(tmp_path):
    save_checkpoint(str(tmp_path), checkpoint())
    path = tmp_path / "checkpoint.pt"
    path.write_bytes(path.read_bytes()[:-200])

    with pytest.raises(StateError):
        load_checkpoint(str(tmp_path))


def test_a_file_of_another_program_is_refused(tmp_path):
    torch.save({"weight": torch.ones(2)}, tmp_path / "checkpoint.pt")
    with pytest.raises(StateError) as caught:
        load_checkpoint(str(tmp_path))

    assert str(caught.value) == (
        f"{str(tmp_path / 'checkpoint.pt')!r} is no checkpoint of zoff train: name another --checkpoint DIR"
    )


def test_a_file_that_runs_code_is_not_loaded(tmp_path):
    """Only plain values are read: a pickled class is refused, not run."""
    torch.save({"format": Checkpoint}, tmp_path / "checkpoint.pt")
    with pytest.raises(StateError):
        load_checkpoint(str(tmp_path))


def test_a_newer_checkpoint_is_refused(tmp_path):
    save_checkpoint(str(tmp_path), checkpoint())
    rewrite(tmp_path, version=2)
    with pytest.raises(StateError) as caught:
        load_checkpoint(str(tmp_path))

    assert str(caught.value) == (
        f"checkpoint {str(tmp_path / 'checkpoint.pt')!r} has version 2, this zoff_async reads 1: "
        "use the version that wrote it"
    )


def test_a_checkpoint_with_a_missing_part_is_refused(tmp_path):
    save_checkpoint(str(tmp_path), checkpoint())
    rewrite(tmp_path, settings={"size": "tiny", "colour": 1})
    with pytest.raises(StateError) as caught:
        load_checkpoint(str(tmp_path))

    assert str(caught.value).startswith(
        f"checkpoint {str(tmp_path / 'checkpoint.pt')!r} is not whole: unknown settings"
    )


def test_a_size_that_has_changed_its_shape_is_refused(tmp_path):
    save_checkpoint(str(tmp_path), checkpoint())
    shape = {"layers": 5, "heads": 4, "width": 128, "context": 64}
    rewrite(tmp_path, model_config=shape)
    with pytest.raises(StateError) as caught:
        load_checkpoint(str(tmp_path))

    assert str(caught.value) == (
        f"checkpoint {str(tmp_path / 'checkpoint.pt')!r} holds another model: {shape} there, "
        f"{dict(shape, layers=4)} for --size tiny here"
    )


def test_a_resumed_run_keeps_what_is_not_said_again():
    saved = settings_from({"steps": 9, "lr": 0.5, "seed": 3})

    assert resumed_settings(saved, {}) == (saved, [])
    assert resumed_settings(saved, {"seed": 3}) == (saved, [])


def test_a_changed_option_is_taken_and_told():
    settings, notes = resumed_settings(settings_from({"steps": 9, "lr": 0.5}), {"lr": 0.25})

    assert (settings.lr, settings.steps) == (0.25, 9)
    assert notes == ["--lr was 0.5 in the checkpoint, is 0.25 from here on"]


@pytest.mark.parametrize(
    ("name", "was", "now"), [("size", "tiny", "small"), ("context", 64, 32), ("dtype", "fp32", "bf16")]
)
def test_an_option_that_asks_for_another_model_is_refused(name, was, now):
    with pytest.raises(StateError) as caught:
        resumed_settings(settings_from({}), {name: now})

    assert str(caught.value) == (
        f"the checkpoint holds another model: --{name} was {was!r} there and is {now!r} now; "
        f"leave --{name} out, or name another --checkpoint directory"
    )
