"""WHEN: steps as plans, policies that build them, and one executor that runs them anywhere.

Standard library only. ``simulate`` runs the same executor under a virtual clock.
"""

from zoff_async.scheduler.action import Action, Edge, Kind, Lane, Span, Staging
from zoff_async.scheduler.cost import CostModel, HardwareCost, KindCost, MeasuredCost
from zoff_async.scheduler.executor import Executor, ExecutorStatistics
from zoff_async.scheduler.layout import Layout
from zoff_async.scheduler.live import LiveStep
from zoff_async.scheduler.plan import StepPlan
from zoff_async.scheduler.policies import (
    POLICIES,
    Policy,
    delayed,
    delayed_flush,
    in_backward,
    overlap,
    policy,
    serial,
)
from zoff_async.scheduler.program import Handler
from zoff_async.scheduler.simulate import Simulation, simulate
from zoff_async.scheduler.validate import validate
from zoff_async.scheduler.virtual import VirtualClockLoop, run_virtual

__all__ = [
    "POLICIES",
    "Action",
    "CostModel",
    "Edge",
    "Executor",
    "ExecutorStatistics",
    "Handler",
    "HardwareCost",
    "Kind",
    "KindCost",
    "Lane",
    "Layout",
    "LiveStep",
    "MeasuredCost",
    "Policy",
    "Simulation",
    "Span",
    "Staging",
    "StepPlan",
    "VirtualClockLoop",
    "delayed",
    "delayed_flush",
    "in_backward",
    "overlap",
    "policy",
    "run_virtual",
    "serial",
    "simulate",
    "validate",
]
