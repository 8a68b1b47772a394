"""Checkpoints of a training run: one file, written whole or not at all.

The file holds plain dicts, tensors, numbers and strings, so ``torch.load`` reads it with
``weights_only=True``. It is written beside its final name, flushed to the disk and renamed: a
crash, a full disk or Ctrl-C leaves the checkpoint that was there before.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from zoff_async.errors import StateError
from zoff_async.train.settings import TrainSettings, settings_from

FILE_NAME = "checkpoint.pt"
FORMAT = "zoff train checkpoint"
VERSION = 1

#: What may not change when a run goes on: without these the weights do not fit.
MODEL_OPTIONS = ("size", "context", "dtype")


@dataclass(frozen=True)
class Checkpoint:
    """A run at the end of a step.

    Attributes:
        settings: What the run was asked to do.
        step: Steps done; with the seed this is also the position in the data.
        losses: The loss of each step done.
        text_name, text_sha256: The text it read.
        model, optimizer, schedule: State dicts.
        rng: States of torch's generators: ``cpu``, and ``cuda`` where there is one.
    """

    settings: TrainSettings
    step: int
    losses: list[float]
    text_name: str
    text_sha256: str
    model: dict[str, Any]
    optimizer: dict[str, Any]
    schedule: dict[str, Any]
    rng: dict[str, Any]


def checkpoint_path(folder: str) -> Path:
    return Path(folder) / FILE_NAME


def save_checkpoint(folder: str, checkpoint: Checkpoint) -> Path:
    """Write ``checkpoint`` into ``folder`` (made if absent); returns the file.

    Raises:
        OSError: if the disk refuses; what was in the folder before is still there.
    """
    path = checkpoint_path(folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "format": FORMAT,
        "version": VERSION,
        "settings": checkpoint.settings.asdict(),
        "model_config": asdict(checkpoint.settings.model_config),
        "text": {"name": checkpoint.text_name, "sha256": checkpoint.text_sha256},
        **{name: getattr(checkpoint, name) for name in _STATE_FIELDS},
    }
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.unfinished")
    try:
        with open(unfinished, "wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
    _flush_folder(path.parent)
    return path


_STATE_FIELDS = ("step", "losses", "model", "optimizer", "schedule", "rng")


def load_checkpoint(folder: str) -> Checkpoint:
    """Read the checkpoint in ``folder`` onto the CPU.

    Raises:
        StateError: if there is none, it cannot be read, or it is not one of ours or of a newer version.
    """
    path = checkpoint_path(folder)
    if not path.is_file():
        raise StateError(f"no checkpoint in {folder!r} (looked for {FILE_NAME}): leave --resume out or name its place")
    try:
        # Mapped, not read: the tensors are copied once, into the model and the optimizer.
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # torch raises whatever its readers raise: zip, pickle, plain RuntimeError
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise StateError(
            f"cannot read checkpoint {str(path)!r} ({reason}): it is damaged or not a checkpoint"
        ) from error
    _check_format(path, content)
    try:
        settings = settings_from(content["settings"])
        fields = {name: content[name] for name in _STATE_FIELDS}
        checkpoint = Checkpoint(
            settings=settings,
            text_name=content["text"]["name"],
            text_sha256=content["text"]["sha256"],
            **fields,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise StateError(f"checkpoint {str(path)!r} is not whole: {error}") from error
    _check_model(path, content, settings)
    return checkpoint


def resumed_settings(saved: TrainSettings, given: Mapping[str, Any]) -> tuple[TrainSettings, list[str]]:
    """The settings of a run that goes on: the saved ones, changed by the options given now.

    Returns:
        The settings, and a line for each option that now differs from the saved run.

    Raises:
        StateError: if an option asks for another model.
    """
    saved_values = saved.asdict()
    changes = []
    for name, value in given.items():
        if value == saved_values[name]:
            continue
        option = "--" + name.replace("_", "-")
        if name in MODEL_OPTIONS:
            raise StateError(
                f"the checkpoint holds another model: {option} was {saved_values[name]!r} there and is "
                f"{value!r} now; leave {option} out, or name another --checkpoint directory"
            )
        changes.append(f"{option} was {saved_values[name]!r} in the checkpoint, is {value!r} from here on")
    return settings_from({**saved_values, **given}), changes


def _check_format(path: Path, content: object) -> None:
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise StateError(f"{str(path)!r} is no checkpoint of zoff train: name another --checkpoint DIR")
    version = content.get("version")
    if version != VERSION:
        raise StateError(
            f"checkpoint {str(path)!r} has version {version!r}, this zoff_async reads {VERSION}: "
            "use the version that wrote it"
        )


def _check_model(path: Path, content: dict[str, Any], settings: TrainSettings) -> None:
    here = asdict(settings.model_config)
    if content.get("model_config") != here:
        raise StateError(
            f"checkpoint {str(path)!r} holds another model: {content.get('model_config')} there, "
            f"{here} for --size {settings.size} here"
        )


def _flush_folder(folder: Path) -> None:
    """Make the rename itself survive a power cut, where the system can."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
