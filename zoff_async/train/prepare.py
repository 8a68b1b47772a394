"""From what is asked for to a run that is ready to start: what is wrong with the input shows here."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR

from zoff_async import OffloadAdamW
from zoff_async.train.loop import BETAS, schedule_for
from zoff_async.train.model import GPT, build_model, parameter_groups
from zoff_async.train.saving import Checkpoint, checkpoint_path, load_checkpoint, resumed_settings
from zoff_async.train.settings import TrainSettings, settings_from
from zoff_async.train.text import Text, load_text

#: Bytes a parameter that every policy holds on the host: the fp32 master and two fp32 moments.
STATE_BYTES = 12


@dataclass(frozen=True)
class Request:
    """What the command line asks for.

    Attributes:
        options: The fields of TrainSettings that were given.
        checkpoint: Directory to save into, and to resume from.
        resume: Go on from the checkpoint.
        save_every: Save after every so many steps too; 0 saves at the end only.
        stop_after: Stop once the run has done so many steps, as if it had been interrupted there.
        compare: Run plain AdamW over the same steps afterwards.
        sample: Bytes of text to generate at the end.
        trace: Directory for a trace file of the last steps.
    """

    options: Mapping[str, Any]
    checkpoint: str | None = None
    resume: bool = False
    save_every: int = 0
    stop_after: int | None = None
    compare: bool = False
    sample: int = 200
    trace: str | None = None

    def __post_init__(self) -> None:
        if self.checkpoint is None and (self.resume or self.save_every):
            option = "--resume" if self.resume else "--save-every"
            raise ValueError(f"{option} needs a directory: add --checkpoint DIR")
        for option, value, least in (
            ("--save-every", self.save_every, 0),
            ("--stop-after", self.stop_after, 1),
            ("--sample", self.sample, 0),
        ):
            if value is not None and value < least:
                raise ValueError(f"{option} must be at least {least}, got {value}")


@dataclass(frozen=True)
class Prepared:
    """A run whose input has been looked at: from here on only the machine can fail it.

    Attributes:
        settings: What will be done.
        notes: Lines that the user should see before it starts.
        first, last: Steps done when it starts and when it stops.
        losses: Those of the steps done before.
    """

    request: Request
    settings: TrainSettings
    notes: list[str]
    text: Text
    first: int
    last: int
    losses: list[float]
    model: GPT
    optimizer: OffloadAdamW
    schedule: LambdaLR


def make_trace_folder(folder: str) -> None:
    """So that a run does not find out at its end that it has nowhere to write."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--trace {folder}: cannot be made a directory ({error}); name another one") from None


def prepare(request: Request) -> Prepared:
    """Read, build and restore everything that ``train`` needs.

    Raises:
        ValueError, TypeError, ZoffError: if the request cannot be met, naming the option, the value
            and the way out.
    """
    if request.trace is not None:
        make_trace_folder(request.trace)
    saved = load_checkpoint(request.checkpoint) if request.resume and request.checkpoint else None
    settings, notes = _settings(request, saved)
    text = load_text(settings.text)
    text.require(settings.context)
    if saved and saved.text_sha256 != text.sha256:
        notes.append(f"the checkpoint was trained on another text ({saved.text_name}) than {text.name} now")
    first = saved.step if saved else 0
    last = min(settings.steps, request.stop_after or settings.steps)
    if first >= last:
        raise ValueError(
            f"the run in {request.checkpoint!r} has done {first} steps of {last}: nothing is left to do; "
            "for more give a larger --steps or --stop-after"
        )
    _check_host_memory(settings)
    _claim_folder(request)
    model = new_model(settings)
    optimizer = OffloadAdamW(
        parameter_groups(model, settings.weight_decay),
        lr=settings.lr,
        betas=BETAS,
        model=model,
        max_norm=settings.max_norm,
        policy=settings.policy,
        config=settings.offload_config(),
    )
    try:
        schedule = schedule_for(optimizer, settings)
        if saved:
            _restore(saved, model, optimizer, schedule)
    except BaseException:
        optimizer.close()
        raise
    losses = list(saved.losses) if saved else []
    return Prepared(request, settings, notes, text, first, last, losses, model, optimizer, schedule)


def _settings(request: Request, saved: Checkpoint | None) -> tuple[TrainSettings, list[str]]:
    if saved is None:
        return settings_from(request.options), []
    return resumed_settings(saved.settings, request.options)


def new_model(settings: TrainSettings) -> GPT:
    """The model of a run, as it is before the first step."""
    return build_model(
        settings.model_config,
        seed=settings.seed,
        dtype=settings.torch_dtype,
        device=settings.torch_device(),
        recompute=settings.recompute,
    )


def _check_host_memory(settings: TrainSettings) -> None:
    """Refuse a model that this machine could not even hold, before the first byte of it is written."""
    if not hasattr(os, "sysconf"):
        return
    with torch.device("meta"):
        parameters = sum(p.numel() for p in GPT(settings.model_config).parameters())
    weights = settings.torch_dtype.itemsize if settings.torch_device().type == "cpu" else 0
    needed_bytes = parameters * (STATE_BYTES + weights)
    there_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed_bytes > there_bytes:
        raise ValueError(
            f"--size {settings.size} needs at least {needed_bytes / 1e9:,.0f} GB of host memory for masters, "
            f"moments{' and weights' if weights else ''}, this machine has {there_bytes / 1e9:,.0f} GB: "
            "choose a smaller --size"
        )


def _claim_folder(request: Request) -> None:
    """Make sure that the run can be saved at its end, and that this loses nobody's checkpoint."""
    if request.checkpoint is None:
        return
    folder = Path(request.checkpoint)
    if checkpoint_path(request.checkpoint).exists() and not request.resume:
        raise ValueError(
            f"--checkpoint {request.checkpoint!r} holds a run already: add --resume to go on with it, "
            "or name another directory"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"cannot make --checkpoint {request.checkpoint!r}: {error.strerror}; name another directory"
        ) from error


def _restore(saved: Checkpoint, model: GPT, optimizer: OffloadAdamW, schedule: LambdaLR) -> None:
    model.load_state_dict(saved.model)
    optimizer.load_state_dict(saved.optimizer)
    schedule.load_state_dict(saved.schedule)
    torch.set_rng_state(saved.rng["cpu"])
    if "cuda" in saved.rng and torch.cuda.is_available() and len(saved.rng["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(saved.rng["cuda"])
