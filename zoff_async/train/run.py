"""A prepared run, done: the steps, the checkpoint, the comparison and what came of it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import torch

from zoff_async.optimizer import OffloadStatistics
from zoff_async.trace import Timeline
from zoff_async.train.lanes import lane_times
from zoff_async.train.loop import BETAS, run_steps, schedule_for
from zoff_async.train.model import parameter_groups
from zoff_async.train.outcome import Outcome
from zoff_async.train.pace import Losses, Pace
from zoff_async.train.prepare import Prepared, new_model
from zoff_async.train.progress import Watch
from zoff_async.train.reference import ReferenceAdamW
from zoff_async.train.sampling import sample_text
from zoff_async.train.saving import Checkpoint, save_checkpoint
from zoff_async.train.settings import TrainSettings


class OpenWatch(Protocol):
    """Opens a watch over the steps ``first`` to ``last``."""

    def __call__(self, title: str, *, first: int, last: int) -> AbstractContextManager[Watch]: ...


def train(run: Prepared, open_watch: OpenWatch) -> Outcome:
    """Do the steps, save, and look at what came of it. Closes the optimizer, whatever happens."""
    with run.optimizer:
        losses, pace = _offloaded(run, open_watch)
        checkpoint = None if run.request.checkpoint is None else str(_save(run, losses.read()))
        held = run.optimizer.statistics()
        timeline = run.optimizer.timeline
        trace = None if run.request.trace is None else _save_trace(run, timeline)
        sample = None
        if run.request.sample:
            sample = sample_text(run.model, length=run.request.sample, seed=run.settings.seed)
    reference = _referenced(run, open_watch) if run.request.compare else None
    return Outcome(
        settings=run.settings,
        parameters=sum(p.numel() for p in run.model.parameters()),
        text_name=run.text.name,
        text_bytes=len(run.text.data),
        device=_device_name(run.settings),
        kernel=held.kernel,
        losses=losses.read(),
        reference_losses=reference[0].read() if reference else None,
        tokens_per_s=pace.tokens_per_s,
        reference_tokens_per_s=reference[1].tokens_per_s if reference else None,
        step_ms=pace.step_ms,
        lanes=lane_times(timeline.spans),
        hidden_share=_hidden_share(timeline),
        places=_places(run, held),
        skipped_steps=held.skipped_steps,
        sample=sample,
        checkpoint=checkpoint,
        trace=trace,
        gantt=None if trace is None else timeline.gantt(steps=2),
        verdict=_verdict(timeline),
    )


class _OffloadedUpdate:
    """The offloaded optimizer and its schedule, as the loop sees them."""

    def __init__(self, run: Prepared) -> None:
        self._optimizer = run.optimizer
        self._schedule = run.schedule

    def after_backward(self) -> None:
        pass  # the gradients are on their way already

    def step(self) -> None:
        self._optimizer.step()
        self._schedule.step()
        self._optimizer.zero_grad()


class _ReferenceUpdate:
    """The reference and its schedule, as the loop sees them."""

    def __init__(self, reference: ReferenceAdamW, settings: TrainSettings) -> None:
        self._reference = reference
        self._schedule = schedule_for(reference.optimizer, settings)

    def after_backward(self) -> None:
        self._reference.after_backward()

    def step(self) -> None:
        self._reference.step()
        self._schedule.step()


def _offloaded(run: Prepared, open_watch: OpenWatch) -> tuple[Losses, Pace]:
    losses, pace = Losses(run.losses), Pace(run.settings.tokens_per_step)
    steps = run_steps(run.model, _OffloadedUpdate(run), run.text, run.settings, first=run.first, last=run.last)
    save_every = run.request.save_every
    with open_watch("offloaded", first=run.first, last=run.last) as watch:
        for done, loss in enumerate(steps, start=run.first + 1):
            losses.add(loss)
            pace.tick()
            if watch.wants_step(done):
                timeline = run.optimizer.timeline
                loss_now = losses.read()[-1]
                watch.show(done, loss_now, pace.tokens_per_s, _hidden_share(timeline), timeline.last(3).utilisation())
            if save_every and done % save_every == 0 and done < run.last:
                _save(run, losses.read())
                pace.restart()
        run.optimizer.synchronize()
        losses.read()
    return losses, pace


def _referenced(run: Prepared, open_watch: OpenWatch) -> tuple[Losses, Pace]:
    """The same run from its first step, with plain AdamW; afterwards, so that neither slows the other."""
    settings = run.settings
    losses, pace = Losses(), Pace(settings.tokens_per_step)
    model = new_model(settings)
    reference = ReferenceAdamW(
        parameter_groups(model, settings.weight_decay),
        lr=settings.lr,
        betas=BETAS,
        max_norm=settings.max_norm,
    )
    steps = run_steps(model, _ReferenceUpdate(reference, settings), run.text, settings, first=0, last=run.last)
    with open_watch("reference", first=0, last=run.last) as watch:
        for done, loss in enumerate(steps, start=1):
            losses.add(loss)
            pace.tick()
            if watch.wants_step(done):
                watch.show(done, losses.read()[-1], pace.tokens_per_s, None)
        losses.read()
    return losses, pace


def _save(run: Prepared, losses: list[float]) -> Path:
    assert run.request.checkpoint is not None
    rng: dict[str, Any] = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        rng["cuda"] = torch.cuda.get_rng_state_all()
    checkpoint = Checkpoint(
        settings=run.settings,
        step=len(losses),
        losses=losses,
        text_name=run.text.name,
        text_sha256=run.text.sha256,
        # The optimizer first: its state is taken when every update is in the model.
        optimizer=run.optimizer.state_dict(),
        model=run.model.state_dict(),
        schedule=run.schedule.state_dict(),
        rng=rng,
    )
    return save_checkpoint(run.request.checkpoint, checkpoint)


def _save_trace(run: Prepared, timeline: Timeline) -> str:
    assert run.request.trace is not None
    file = Path(run.request.trace) / f"step-{run.last:06d}.json.gz"
    timeline.save(file)
    return str(file)


def _verdict(timeline: Timeline) -> str | None:
    """What limits the step and what would help; None where too few steps were recorded to say."""
    try:
        return timeline.report().verdict
    except ValueError:
        return None


def _device_name(settings: TrainSettings) -> str:
    if settings.device.startswith("emulated:"):
        return settings.device
    return settings.torch_device().type


def _places(run: Prepared, held: OffloadStatistics) -> dict[tuple[str, str], int]:
    """Bytes by (place, purpose): the weights, and what the optimizer says it holds."""
    weights = sum(p.numel() * p.element_size() for p in run.model.parameters())
    device = "device" if run.settings.torch_device().type != "cpu" else "host, as the device"
    states = held.master_bytes + held.moment_bytes + held.gradient_bytes
    places = {
        (device, f"weights, {run.settings.dtype}"): weights,
        ("host", "master weights, fp32"): held.master_bytes,
        ("host", "moments, fp32"): held.moment_bytes,
        ("host", "gradients"): held.gradient_bytes,
        ("host", "staging, pageable"): held.host_bytes - states,
        ("host", "staging, pinned"): held.pinned_bytes,
        (device, "staging"): held.device_bytes,
    }
    return {place: held_bytes for place, held_bytes in places.items() if held_bytes}


def _hidden_share(timeline: Timeline) -> float | None:
    """As the timeline says; None where it holds no compute to hide behind."""
    return timeline.hidden_share() if any(span.lane == "compute" for span in timeline.spans) else None
