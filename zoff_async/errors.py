"""Every exception of zoff_async, in one tree.

ZoffError                     anything this package raises on purpose, besides ValueError and TypeError
  PlanError                   a step plan breaks a rule (also a ValueError)
  ScheduleError               the executor was asked for something its state does not allow
    DeadlockError             every action waits and nothing can wake them
  StepError                   an action of a step failed; __cause__ is what it raised
    TornStateError            ... after Adam had begun: some parameters have moved, others have not
  NonFiniteGradientError      a gradient holds inf or NaN and on_nonfinite="raise", or Adam had begun
  GradientError               a gradient cannot be used as it is (sparse, read by address, consumed)
  StateError                  a state_dict is foreign, newer, or of another model (also a ValueError)
  TraceError                  a trace file is empty, cut off, foreign or newer (also a ValueError)
  ClosedError                 the optimizer (or pool, portal, device) has been closed
    PoolClosedError           a job was dropped because its pool was closed
  DeviceError                 the accelerator or the memory behind it refused
NonFiniteGradientWarning      told once an optimizer: a step was skipped
PinnedMemoryWarning           told once a device: pageable memory is used instead of pinned
"""

from __future__ import annotations


class ZoffError(Exception):
    """Base of the package's own exceptions."""


class PlanError(ZoffError, ValueError):
    """A step plan breaks a rule; the message shows the plan and marks the place."""


class ScheduleError(ZoffError, RuntimeError):
    """The executor was asked for something its present state does not allow."""


class DeadlockError(ScheduleError):
    """Every action waits for another one and no timer is armed; the message names who waits for what."""


class StepError(ZoffError, RuntimeError):
    """An action of a step failed. The exception it raised is the ``__cause__``."""


class TornStateError(StepError):
    """A step failed after its first Adam: the message says which parameters have moved."""


class NonFiniteGradientError(ZoffError, ArithmeticError):
    """A gradient holds inf or NaN and the step may not, or can no longer, be skipped."""


class GradientError(ZoffError, RuntimeError):
    """A gradient cannot be used as it is; the message names the parameter and the way out."""


class StateError(ZoffError, ValueError):
    """A saved state is foreign, newer than this version, or belongs to another model."""


class TraceError(ZoffError, ValueError):
    """A trace file is empty, cut off, of another program, or newer than this version."""


class ClosedError(ZoffError, RuntimeError):
    """The object has been closed and takes no more work."""


class PoolClosedError(ClosedError):
    """A job was dropped because its pool was closed before the job started."""


class DeviceError(ZoffError, RuntimeError):
    """The accelerator, or the memory behind it, refused a request."""


class NonFiniteGradientWarning(UserWarning):
    """A step was skipped because a gradient holds inf or NaN (told once an optimizer)."""


class PinnedMemoryWarning(UserWarning):
    """Pageable host memory is used because pinning failed (told once a device)."""
