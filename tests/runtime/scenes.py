"""What the runtime's tests train, how they run it, and what they compare.

`Stage` says how a run is set up (policy, sizes, device, ...), `play` runs it and gives an `Outcome`: every number an
optimizer keeps. Two outcomes are compared bit for bit.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

import zoff_async as zoff
from zoff_async.device import Device, EmulatedDevice, Faults

#: A wait that takes this long has failed, in seconds.
PATIENCE_S = 20.0

#: Within a device's rights, and fast enough for many runs: late and out of order, or over before anybody looks.
LATE = Faults(late_s=1e-3, reordered=True, poison_slots=True, poison_weights=True, scribble_freed=True)
EARLY = Faults(early=True, poison_slots=True, poison_weights=True, scribble_freed=True)


class Oddities(nn.Module):
    """Every kind of parameter that a bucket may meet: odd shapes, tied, frozen, scalar, empty, transposed, unused.

    ``left`` is used by even calls and ``right`` by odd ones; ``never`` is used by none.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.never = nn.Parameter(torch.randn(3))
        self.first = nn.Linear(5, 9)
        self.norm = nn.LayerNorm(9)
        self.empty = nn.Parameter(torch.zeros(0))
        self.left = nn.Linear(9, 5)
        self.right = nn.Linear(9, 5, bias=False)
        self.frozen = nn.Linear(5, 5)
        self.frozen.requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.turned = nn.Parameter(torch.randn(5, 4).t())
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, call: int) -> Tensor:
        hidden = self.norm(torch.tanh(self.first(self.embed(tokens))))
        side = self.left if call % 2 == 0 else self.right
        hidden = self.frozen(torch.tanh(side(hidden))) * self.scale + self.empty.sum()
        hidden = hidden + hidden @ self.turned.t() @ self.turned
        return self.head(hidden)


def odd_loss(model: nn.Module, call: int) -> Tensor:
    """Loss of the ``call``-th forward; the data are a function of the number."""
    generator = torch.Generator().manual_seed(1000 + call)
    tokens = torch.randint(0, 7, (2, 3), generator=generator)
    return model(tokens, call).float().square().mean()


@dataclass(frozen=True)
class Stage:
    """How a run is set up. The first block decides the numbers, the second may not change a bit of them."""

    dtype: torch.dtype = torch.float32
    steps: int = 20
    accumulate: int = 1
    max_norm: float | None = None
    groups: int = 1
    rule: type = zoff.OffloadAdamW
    warmup: int = 0

    policy: Any = "serial"
    bucket_bytes: int | None = None
    chunk_numel: int = 1 << 18
    workers: int = 1
    kernel: str = "numexpr"
    event_loop: str = "asyncio"
    gated: bool = False
    slots: int = 4
    faults: Faults | None = None

    def oracle(self) -> Stage:
        """The stage that decides the same numbers and is otherwise as plain as can be."""
        kept = ("dtype", "steps", "accumulate", "max_norm", "groups", "rule", "warmup")
        return Stage(**{name: getattr(self, name) for name in kept})

    def config(self, **more: Any) -> zoff.OffloadConfig:
        device: str | Device = "auto" if self.faults is None else EmulatedDevice(faults=self.faults)
        return zoff.OffloadConfig(
            **{
                "bucket_bytes": self.bucket_bytes,
                "chunk_numel": self.chunk_numel,
                "workers": self.workers,
                "kernel": self.kernel,
                "event_loop": self.event_loop,
                "slots": self.slots,
                "backwards_per_step": self.accumulate,
                "delay_warmup_steps": self.warmup,
                "device": device,
                **more,
            }
        )

    def model(self) -> Oddities:
        torch.manual_seed(7)
        return Oddities().to(self.dtype)

    def params(self, model: nn.Module) -> Any:
        if self.groups == 1:
            return model.named_parameters()
        named = list(model.named_parameters())
        return [
            {"params": named[0::2], "weight_decay": 0.0, "betas": (0.8, 0.95)},
            {"params": named[1::2], "weight_decay": 0.2, "lr": 5e-3},
        ]

    def optimizer(self, model: nn.Module, **config: Any) -> Any:
        return self.rule(
            self.params(model),
            lr=1e-2,
            weight_decay=0.1,
            model=model if self.gated else None,
            max_norm=self.max_norm,
            policy=self.policy,
            config=self.config(**config),
        )


@dataclass(frozen=True)
class Outcome:
    """Every number that a run leaves: weights, and masters, moments and counts by parameter name."""

    weights: dict[str, Tensor]
    masters: dict[str, Tensor]
    exp_avg: dict[str, Tensor]
    exp_avg_sq: dict[str, Tensor]
    counts: dict[str, float]
    norms: tuple[float | None, ...] = ()

    @classmethod
    def of(cls, model: nn.Module, optimizer: Any, norms: tuple[float | None, ...] = ()) -> Outcome:
        """What a model and its optimizer hold now; waits for the update in flight."""
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        state = optimizer.state
        kept = {name: {key: torch.as_tensor(state[p][key]).clone() for key in state[p]} for name, p in named.items()}
        return cls(
            weights={name: p.detach().clone() for name, p in named.items()},
            masters={name: values["master"] for name, values in kept.items()},
            exp_avg={name: values["exp_avg"] for name, values in kept.items()},
            exp_avg_sq={name: values["exp_avg_sq"] for name, values in kept.items()},
            counts={name: float(values["step"]) for name, values in kept.items()},
            norms=norms,
        )


def assert_same_bits(got: Outcome, wanted: Outcome) -> None:
    """Every number of both is the same, bit for bit; a difference is told with its place."""
    assert got.counts == wanted.counts
    for what in ("masters", "exp_avg", "exp_avg_sq", "weights"):
        ours, theirs = getattr(got, what), getattr(wanted, what)
        assert ours.keys() == theirs.keys()
        wrong = {name: _difference(ours[name], theirs[name]) for name in ours if _differ(ours[name], theirs[name])}
        assert not wrong, f"{what} differ: {wrong}"
    if got.norms and wanted.norms:
        assert got.norms == wanted.norms


def _differ(a: Tensor, b: Tensor) -> bool:
    return a.dtype != b.dtype or a.shape != b.shape or not torch.equal(a.isnan(), b.isnan()) or not same_bits(a, b)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one dtype hold the same values, NaN and the sign of zero included."""
    width = {2: torch.int16, 4: torch.int32}[a.element_size()]
    return torch.equal(a.contiguous().view(width), b.contiguous().view(width))


def _difference(a: Tensor, b: Tensor) -> str:
    count = int((a != b).sum()) if a.shape == b.shape else -1
    return f"{count} of {a.numel()} elements, most {(a.float() - b.float()).abs().max().item():.3g}"


def play(stage: Stage, *, loss: Callable[[nn.Module, int], Tensor] = odd_loss) -> Outcome:
    """Run a stage and give what it leaves; the optimizer is closed."""
    model = stage.model()
    optimizer = stage.optimizer(model)
    try:
        norms = train(model, optimizer, range(stage.steps), stage, loss=loss)
        optimizer.synchronize()
        return Outcome.of(model, optimizer, norms)
    finally:
        optimizer.close()


def train(
    model: nn.Module,
    optimizer: Any,
    steps: range,
    stage: Stage,
    *,
    loss: Callable[[nn.Module, int], Tensor] = odd_loss,
) -> tuple[float | None, ...]:
    """Train with these step numbers; a learning rate of its own each. Gives the norms."""
    norms = []
    for step in steps:
        set_lr(optimizer, step)
        for micro in range(stage.accumulate):
            loss(model, step * stage.accumulate + micro).backward()
        optimizer.step()
        norms.append(optimizer.statistics().last_grad_norm)
        optimizer.zero_grad()
    return tuple(norms)


def set_lr(optimizer: Any, step: int) -> None:
    """The schedule of every run: falling, another value each step, a group's own scale kept."""
    for group in optimizer.param_groups:
        first = group.setdefault("first_lr", group["lr"])
        group["lr"] = first / (1 + 0.1 * step)


def at_stage(stage: Stage, **changes: Any) -> Stage:
    """The same stage with some things changed."""
    return replace(stage, **changes)


class Noted(EmulatedDevice):
    """An emulated device that counts what has been enqueued, whether it is held back or not."""

    enqueued_d2h = 0
    enqueued_h2d = 0

    def copy_to_host(self, *args: Any) -> Any:
        transfer = super().copy_to_host(*args)
        self.enqueued_d2h += 1
        return transfer

    def copy_to_device(self, *args: Any) -> Any:
        transfer = super().copy_to_device(*args)
        self.enqueued_h2d += 1
        return transfer


# --- waiting, without clocks ------------------------------------------------------------------------------------------


class Beside:
    """A call in a thread of its own; ``result()`` gives what it returned or raises what it raised."""

    def __init__(self, call: Callable[[], Any], name: str = "beside") -> None:
        self._call = call
        self._value: Any = None
        self._error: BaseException | None = None
        self.over = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._value = self._call()
        except BaseException as error:
            self._error = error
        finally:
            self.over.set()

    def result(self, patience_s: float = PATIENCE_S) -> Any:
        assert self.over.wait(patience_s), f"no end within {patience_s} s"
        if self._error is not None:
            raise self._error
        return self._value


def within(seconds: float, call: Callable[[], Any]) -> Any:
    """What ``call()`` returns or raises; a failure if it takes longer."""
    return Beside(call).result(seconds)


def wait_until(condition: Callable[[], bool], patience_s: float = PATIENCE_S) -> None:
    """Return once a condition of another thread holds; a failure if it never does."""
    pause = threading.Event()
    for _ in range(int(patience_s / 1e-3)):
        if condition():
            return
        pause.wait(1e-3)
    raise AssertionError(f"not within {patience_s} s: {condition}")


@contextmanager
def closing(*optimizers: Any) -> Iterator[None]:
    """Close optimizers at the end, and let nothing that is held back keep them from it."""
    try:
        yield
    finally:
        for optimizer in optimizers:
            device = optimizer._runtime.config.device
            if isinstance(device, EmulatedDevice) and not device.faults.early:
                device.let("d2h")
                device.let("h2d")
            within(PATIENCE_S, optimizer.close)
