"""One loop, two optimizers: what a user's loop does with torch's AdamW must be what it does with ours.

A loop is a function ``loop(model, make)``: it calls ``make`` where a user writes ``AdamW(...)`` and returns its
optimizer, or the optimizer and a log of numbers. `same_with_torch` runs it with both and compares all that can be seen.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from zoff_async import OffloadAdamW, OffloadConfig
from zoff_async.device import EmulatedDevice, Faults
from zoff_async.intake import Source

#: Several buckets, several chunks a parameter and several parameters a bucket, in models of a hundred elements.
SMALL = OffloadConfig(bucket_bytes=200, chunk_numel=17, workers=2, cpu_affinity=())

#: Copies arrive late and out of order; what is read too early is NaN.
HOSTILE = Faults(late_s=2e-4, reordered=True, poison_slots=True, poison_weights=True, scribble_freed=True)


@dataclass(frozen=True)
class Setup:
    """One way to make our optimizer. ``gated``: with ``model=``, so that the update is in flight after step()."""

    name: str
    gated: bool = False
    hostile: bool = False
    policy: str = "overlap"
    config: dict[str, Any] = field(default_factory=dict)

    def make(self, params: Any, *, model: nn.Module, kind: type = OffloadAdamW, **hyper: Any) -> Any:
        config = replace(SMALL, **self.config)
        if self.hostile:
            config = replace(config, device=EmulatedDevice(faults=HOSTILE))
        hyper = {"policy": self.policy, "model": model if self.gated else None, "config": config, **hyper}
        return kind(params, **hyper)


PLAIN = Setup("plain")
GATED = Setup("gated", gated=True)
LATE = Setup("late", gated=True, hostile=True)
SERIAL = Setup("serial", policy="serial")
IN_BACKWARD = Setup("in_backward", policy="in_backward")
IN_BACKWARD_LATE = Setup("in_backward_late", policy="in_backward", gated=True, hostile=True)
ATOMIC = (SERIAL, PLAIN, GATED, LATE)  # the policies that clip, scale and accumulate without being told
EXACT = (*ATOMIC, IN_BACKWARD, IN_BACKWARD_LATE)
DELAYED = Setup("delayed", policy="delayed")


def mlp(dtype: torch.dtype = torch.float32) -> nn.Module:
    """Two linear layers and a norm; 135 elements, none of the sizes a multiple of a chunk."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 11), nn.GELU(), nn.LayerNorm(11), nn.Linear(11, 3)).to(dtype)


def batch(number: int, dtype: torch.dtype = torch.float32, features: int = 6) -> Tensor:
    """The inputs number ``number``: (5, features)."""
    return torch.randn(5, features, generator=torch.Generator().manual_seed(number)).to(dtype)


def loss_of(model: nn.Module, number: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """A scalar loss of one batch."""
    return model(batch(number, dtype)).float().square().mean()


Loop = Callable[[Any, Callable[..., Any]], Any]


def torch_adamw(params: Any, **hyper: Any) -> torch.optim.Optimizer:
    """The reference: the plain loop over parameters, as the formulas are written."""
    return torch.optim.AdamW(params, **{"foreach": False, "fused": False, **hyper})


def torch_adam(params: Any, **hyper: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, **{"foreach": False, "fused": False, **hyper})


def same_with_torch(
    loop: Loop,
    setup: Setup = PLAIN,
    make_model: Callable[[], nn.Module] = mlp,
    *,
    against: Callable[..., torch.optim.Optimizer] = torch_adamw,
    atol: float = 1e-6,
    log_rtol: float = 1e-5,
    **ours: Any,
) -> tuple[nn.Module, Any]:
    """Run a loop with torch's AdamW and with ours; assert that weights, state and log agree.

    Returns our model and our optimizer, closed by the caller's garbage collection.
    """
    reference = make_model()
    model = copy.deepcopy(reference)
    expected, expected_log = outcome(loop(reference, against))
    optimizer, log = outcome(loop(model, lambda params, **hyper: setup.make(params, model=model, **hyper, **ours)))
    optimizer.synchronize()
    assert_same_log(log, expected_log, rtol=log_rtol)
    assert_same_weights(model, reference, atol=atol)
    assert_same_state(optimizer, expected, atol=atol)
    return model, optimizer


def outcome(returned: Any) -> tuple[Any, Any]:
    return returned if isinstance(returned, tuple) else (returned, None)


def assert_same_weights(model: nn.Module, reference: nn.Module, *, atol: float = 1e-6) -> None:
    for (name, ours), (_, theirs) in zip(model.named_parameters(), reference.named_parameters(), strict=True):
        assert ours.dtype == theirs.dtype, name
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=atol, msg=lambda text, name=name: f"{name}: {text}")


def assert_same_state(optimizer: Any, reference: torch.optim.Optimizer, *, atol: float = 1e-6) -> None:
    """Step counts equal, moments close. Where torch has no state (never stepped) ours counts zero steps."""
    ours = optimizer.state_dict()["state"]
    theirs = reference.state_dict()["state"]
    for key in ours.keys() | theirs.keys():
        expected = theirs.get(key, {"step": 0.0})
        found = ours.get(key, {"step": 0.0})
        assert float(found["step"]) == float(expected["step"]), f"step count of parameter {key}"
        for moment in ("exp_avg", "exp_avg_sq"):
            if moment in expected:
                scale = float(expected[moment].abs().sum()) / max(expected[moment].numel(), 1)
                torch.testing.assert_close(
                    found[moment], expected[moment].float(), rtol=1e-4, atol=max(1e-5 * scale, atol * 1e-3)
                )


def assert_same_log(log: Any, expected: Any, where: str = "log", *, rtol: float = 1e-5) -> None:
    """Close numbers, and everything else equal, in the same places."""
    if isinstance(expected, dict):
        assert log.keys() == expected.keys(), where
        for key in expected:
            assert_same_log(log[key], expected[key], f"{where}[{key!r}]", rtol=rtol)
    elif isinstance(expected, list | tuple):
        assert len(log) == len(expected), where
        for number, (ours, theirs) in enumerate(zip(log, expected, strict=True)):
            assert_same_log(ours, theirs, f"{where}[{number}]", rtol=rtol)
    elif isinstance(expected, Tensor | float):
        if isinstance(expected, Tensor):
            assert log.dtype == expected.dtype, where
        torch.testing.assert_close(
            torch.as_tensor(log).detach(),
            torch.as_tensor(expected).detach(),
            rtol=rtol,
            atol=rtol * 1e-2,
            equal_nan=True,
            check_dtype=False,
            msg=lambda text: f"{where}: {text}",
        )
    else:
        assert log == expected, where


def weights(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def everything(model: nn.Module, optimizer: Any) -> list[Tensor]:
    """Copies of all weights, masters, moments and counts: what a skipped step must leave as it was."""
    state = optimizer.state_dict()["state"]
    return weights(model) + [state[key][name] for key in sorted(state) for name in sorted(state[key])]


def assert_equal(found: Iterable[Tensor], expected: Iterable[Tensor]) -> None:
    """Bit for bit."""
    for number, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs), f"tensor {number} differs"


@contextmanager
def values_stay_on_the_host() -> Iterator[None]:
    """Fail where something reads gradient values back, which norms and scalings must not."""
    with patch.object(Source, "read", side_effect=AssertionError("gradient values were read back")):
        yield
