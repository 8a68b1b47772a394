"""The training loop, one for the offloaded run and for the reference it is compared with."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from zoff_async.train.model import GPT
from zoff_async.train.settings import TrainSettings
from zoff_async.train.text import Text

BETAS = (0.9, 0.95)
#: The learning rate ends at this share of its peak.
FINAL_LR_SHARE = 0.1


class Update(Protocol):
    """What the loop asks of an optimizer."""

    def after_backward(self) -> None:
        """One backward is done; more of the same step may follow."""

    def step(self) -> None:
        """The step's gradients are complete: use and forget them."""


def run_steps(
    model: GPT, update: Update, text: Text, settings: TrainSettings, *, first: int, last: int
) -> Iterator[Tensor]:
    """Steps ``first`` (included) to ``last`` (excluded) of the run that ``settings`` describe.

    Yields each step's loss, 0-d on the model's device, when its update has been handed over.
    """
    device = model.token.weight.device
    for step in range(first, last):
        total = torch.zeros((), device=device)
        for part in range(settings.accumulate):
            tokens, targets = text.batch(
                batch=settings.batch, context=settings.context, seed=settings.seed, step=step, part=part
            )
            loss = model.loss(tokens.to(device), targets.to(device)) / settings.accumulate
            loss.backward()  # type: ignore[no-untyped-call]
            update.after_backward()
            total += loss.detach()
        update.step()
        yield total


def warmup_then_cosine(steps: int, warmup: int) -> Callable[[int], float]:
    """The learning rate's factor at each step: up in a line, down along half a cosine.

    Args:
        steps: Length of the whole run, of which a resumed part is a part.
        warmup: Steps until the peak.
    """

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / (warmup + 1)
        done = min(1.0, (step - warmup) / max(1, steps - warmup))
        return FINAL_LR_SHARE + (1.0 - FINAL_LR_SHARE) * 0.5 * (1.0 + math.cos(math.pi * done))

    return factor


def schedule_for(optimizer: Optimizer, settings: TrainSettings) -> LambdaLR:
    """The run's schedule on ``optimizer``, at step 0."""
    return LambdaLR(optimizer, warmup_then_cosine(settings.steps, settings.warmup))
