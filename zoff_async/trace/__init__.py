"""What happened, in the plan's words: spans kept for the last steps, what they say, and how to look at them."""

from __future__ import annotations

from zoff_async.trace.profiler import named, named_range
from zoff_async.trace.recorder import Recorder
from zoff_async.trace.timeline import Clock, Pieces, Timeline, Wait

__all__ = ["Clock", "Pieces", "Recorder", "Timeline", "Wait", "named", "named_range"]
