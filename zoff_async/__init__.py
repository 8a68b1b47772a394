"""zoff_async: train with AdamW whose masters, moments and arithmetic live on the host."""

from zoff_async.checkpoint import export_safetensors
from zoff_async.config import OffloadConfig
from zoff_async.engine import Engine
from zoff_async.errors import (
    ClosedError,
    DeadlockError,
    DeviceError,
    GradientError,
    NonFiniteGradientError,
    NonFiniteGradientWarning,
    PinnedMemoryWarning,
    PlanError,
    ScheduleError,
    StateError,
    StepError,
    TornStateError,
    TraceError,
    ZoffError,
)
from zoff_async.optimizer import OffloadAdam, OffloadAdamW, OffloadStatistics
from zoff_async.scheduler import (
    Action,
    Edge,
    HardwareCost,
    KindCost,
    Lane,
    Layout,
    MeasuredCost,
    Simulation,
    Span,
    StepPlan,
    delayed,
    in_backward,
    overlap,
    serial,
    simulate,
)
from zoff_async.trace import Timeline

__version__ = "0.1.0"

__all__ = [
    "Action",
    "ClosedError",
    "DeadlockError",
    "DeviceError",
    "Edge",
    "Engine",
    "GradientError",
    "HardwareCost",
    "KindCost",
    "Lane",
    "Layout",
    "MeasuredCost",
    "NonFiniteGradientError",
    "NonFiniteGradientWarning",
    "OffloadAdam",
    "OffloadAdamW",
    "OffloadConfig",
    "OffloadStatistics",
    "PinnedMemoryWarning",
    "PlanError",
    "ScheduleError",
    "Simulation",
    "Span",
    "StateError",
    "StepError",
    "StepPlan",
    "Timeline",
    "TornStateError",
    "TraceError",
    "ZoffError",
    "delayed",
    "export_safetensors",
    "in_backward",
    "overlap",
    "serial",
    "simulate",
    "__version__",
]
