"""What one training run is asked to do: checked when it is said, kept with the checkpoint."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch

from zoff_async.config import OffloadConfig, check_choice, check_count
from zoff_async.device.choose import check_device_name
from zoff_async.scheduler import policy
from zoff_async.train.model import SIZES, GPTConfig, Size

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

#: Fields that OffloadConfig takes by the same name.
CONFIG_FIELDS = ("kernel", "workers", "chunk_numel", "bucket_bytes", "event_loop")

#: Spans of this many steps are kept: enough for medians, little enough for a long run.
TRACE_STEPS = 32


@dataclass(frozen=True)
class TrainSettings:
    """One run of ``zoff train``; every field is set, so a saved run needs no defaults to be read again.

    Raises:
        TypeError, ValueError: naming the option, the value and what is allowed.
    """

    size: str
    steps: int
    batch: int
    context: int
    lr: float
    warmup: int
    max_norm: float | None
    weight_decay: float
    dtype: str
    accumulate: int
    recompute: bool
    device: str
    policy: str
    seed: int
    text: str | None
    kernel: str
    event_loop: str
    workers: int | None
    chunk_numel: int | None
    bucket_bytes: int | None

    def __post_init__(self) -> None:
        check_size(self.size)
        _check_dtype(self.dtype)
        for name in ("steps", "batch", "context", "accumulate"):
            check_count(f"--{name}", getattr(self, name), least=1)
        for name in ("warmup", "seed"):
            check_count(f"--{name}", getattr(self, name), least=0)
        check_amount("--lr", self.lr)
        check_amount("--weight-decay", self.weight_decay)
        if self.max_norm is not None:
            check_amount("--max-norm", self.max_norm, positive=True)
        policy(self.policy)
        self.torch_device()
        self.offload_config()

    @property
    def model_config(self) -> GPTConfig:
        return SIZES[self.size].config(self.context)

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def tokens_per_step(self) -> int:
        return self.batch * self.context * self.accumulate

    def offload_config(self) -> OffloadConfig:
        """The optimizer's configuration; what was left open stays open."""
        chosen = {name: getattr(self, name) for name in CONFIG_FIELDS if getattr(self, name) is not None}
        return OffloadConfig(device=self.device, backwards_per_step=self.accumulate, trace_steps=TRACE_STEPS, **chosen)

    def torch_device(self) -> torch.device:
        """Where the model lives.

        Raises:
            ValueError: if the device is unknown or is not there.
        """
        check_device_name(self.device)
        if self.device == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if not self.device.startswith("cuda"):
            return torch.device("cpu")  # where an emulated device's parameters are, too
        if not torch.cuda.is_available():
            raise ValueError(f"--device {self.device}: torch sees no CUDA device here; use --device auto or cpu")
        return torch.device(self.device)

    def asdict(self) -> dict[str, Any]:
        return asdict(self)


def settings_from(options: Mapping[str, Any]) -> TrainSettings:
    """Fill what ``options`` leaves out: batch, context and learning rate from the size, the rest plain.

    Args:
        options: Field names of TrainSettings; absent ones take their default.
    """
    size = check_size(options.get("size", "tiny"))
    steps = options.get("steps", 200)
    defaults: dict[str, Any] = {
        "size": "tiny",
        "steps": steps,
        "batch": size.batch,
        "context": size.context,
        "lr": size.lr,
        "warmup": min(100, steps // 10) if isinstance(steps, int) else 0,
        "max_norm": None,
        "weight_decay": 0.1,
        "dtype": "fp32",
        "accumulate": 1,
        "recompute": False,
        "device": "auto",
        "policy": "overlap",
        "seed": 0,
        "text": None,
        "kernel": "auto",
        "event_loop": "auto",
        "workers": None,
        "chunk_numel": None,
        "bucket_bytes": None,
    }
    known = {field.name for field in fields(TrainSettings)}
    unknown = sorted(set(options) - known)
    if unknown:
        raise ValueError(f"unknown settings {', '.join(unknown)}: they are {', '.join(sorted(known))}")
    return TrainSettings(**{**defaults, **options})


def check_size(name: object) -> Size:
    """The size of that name."""
    check_choice("--size", name, tuple(SIZES))
    return SIZES[str(name)]


def _check_dtype(name: str) -> None:
    if name == "fp16":
        raise ValueError(
            "--dtype fp16 is not there: it needs a loss scale, which train does not apply; "
            "use --dtype bf16, which needs none and is as small"
        )
    check_choice("--dtype", name, tuple(DTYPES))


def check_amount(name: str, value: object, *, positive: bool = False) -> None:
    """Raise unless ``value`` is a finite number of at least 0, or above 0."""
    allowed = "above 0" if positive else "of at least 0"
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number {allowed}, got {value!r}")
    if not math.isfinite(value) or value < 0 or (positive and value == 0):
        raise ValueError(f"{name} must be a finite number {allowed}, got {value}")
