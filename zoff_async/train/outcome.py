"""What a run came to: the figures that the report shows and that ``--json`` prints."""

from __future__ import annotations

import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from zoff_async.train.lanes import LaneTime
from zoff_async.train.settings import TrainSettings


@dataclass(frozen=True)
class Outcome:
    """A finished (or stopped) run.

    Attributes:
        settings: What was asked for.
        parameters: Trainable numbers in the model.
        text_name, text_bytes: The text it read.
        device, kernel: What the open choices became.
        losses: Loss of each step of the run so far, in nats a byte, those before a resume included.
        reference_losses: The same of plain AdamW, or None if it was not asked for.
        tokens_per_s, reference_tokens_per_s: Over this process's steps without the first one.
        step_ms: Median wall time of a step.
        lanes: Busy time of each lane, a step.
        hidden_share: Share of host work and copies that compute covered; None without any span.
        places: Bytes held, by (place, purpose).
        skipped_steps: Updates left out because a gradient was not finite.
        sample: Text that the model wrote at the end; None if none was asked for.
        checkpoint: The file that was saved, or None.
        trace: The trace file that was written, or None.
        gantt: The last steps as text, where a trace was asked for.
        verdict: What limits the step and what would help, as far as enough steps were recorded.
    """

    settings: TrainSettings
    parameters: int
    text_name: str
    text_bytes: int
    device: str
    kernel: str
    losses: Sequence[float]
    reference_losses: Sequence[float] | None
    tokens_per_s: float
    reference_tokens_per_s: float | None
    step_ms: float
    lanes: Mapping[str, LaneTime]
    hidden_share: float | None
    places: Mapping[tuple[str, str], int]
    skipped_steps: int
    sample: str | None
    checkpoint: str | None
    trace: str | None = None
    gantt: str | None = None
    verdict: str | None = None

    @property
    def max_abs_loss_difference(self) -> float | None:
        """The largest distance between the two loss curves, at any step."""
        if self.reference_losses is None:
            return None
        return max(abs(a - b) for a, b in zip(self.losses, self.reference_losses, strict=True))

    def as_json(self) -> dict[str, Any]:
        """Plain values for ``json.dumps``; a number that JSON has no sign for becomes None."""
        settings, reference = self.settings, self.reference_losses
        return {
            "size": settings.size,
            "parameters": self.parameters,
            "device": self.device,
            "dtype": settings.dtype,
            "policy": settings.policy,
            "kernel": self.kernel,
            "steps": len(self.losses),
            "batch": settings.batch,
            "context": settings.context,
            "accumulate": settings.accumulate,
            "lr": settings.lr,
            "warmup": settings.warmup,
            "max_norm": settings.max_norm,
            "seed": settings.seed,
            "text": self.text_name,
            "text_bytes": self.text_bytes,
            "loss_first": finite(self.losses[0]),
            "loss_last": finite(self.losses[-1]),
            "reference_loss_last": finite(reference[-1]) if reference else None,
            "max_abs_loss_difference": finite(self.max_abs_loss_difference),
            "tokens_per_s": finite(self.tokens_per_s),
            "reference_tokens_per_s": finite(self.reference_tokens_per_s),
            "step_ms": finite(self.step_ms),
            "hidden_share": finite(self.hidden_share),
            "lanes": {name: asdict(time) for name, time in self.lanes.items()},
            "bytes": [
                {"place": place, "purpose": purpose, "bytes": held, "per_parameter": held / self.parameters}
                for (place, purpose), held in self.places.items()
            ],
            "skipped_steps": self.skipped_steps,
            "losses": [finite(loss) for loss in self.losses],
            "reference_losses": [finite(loss) for loss in reference] if reference else None,
            "sample": self.sample,
            "checkpoint": self.checkpoint,
            "trace": self.trace,
            "verdict": self.verdict,
            "torch": torch.__version__,
            "python": platform.python_version(),
        }


def finite(value: float | None) -> float | None:
    """The value, or None where it is no number."""
    return value if value is not None and math.isfinite(value) else None
