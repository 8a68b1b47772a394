"""OffloadAdamW and OffloadAdam: torch optimizers whose masters, moments and arithmetic are on the host."""

from __future__ import annotations

import atexit
import contextlib
import copy
import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from zoff_async.bucket import DTYPES, Entry
from zoff_async.checkpoint import VERSION, load_state, read_state
from zoff_async.config import OffloadConfig
from zoff_async.cpu_ops import ADAM, ADAMW, UpdateRule
from zoff_async.device import check_device_name
from zoff_async.errors import StepError
from zoff_async.runtime import Runtime
from zoff_async.scheduler import Policy, StepPlan
from zoff_async.scheduler import policy as find_policy
from zoff_async.step import Hyper
from zoff_async.trace import Timeline

#: Options of torch's Adam and AdamW that this optimizer does not honour, and the value that means "not asked for".
NOT_HONOURED: Mapping[str, tuple[object, ...]] = {
    "amsgrad": (False,),
    "maximize": (False,),
    "differentiable": (False,),
    "foreach": (None, False),
    "fused": (None, False),
    "capturable": (False,),
}

_EDITED_GROUPS = (
    "{name!r} {what} by hand: its state would not follow. Add parameters with add_param_group, and build a new "
    "optimizer "
    "to take some out or to group them anew"
)

_OPEN: weakref.WeakSet[Runtime] = weakref.WeakSet()


@dataclass(frozen=True)
class OffloadStatistics:
    """What an optimizer has done and holds. Bytes are counted as allocated, in total over all steps where they move."""

    steps: int  # updates applied
    skipped_steps: int  # because of a non-finite gradient
    last_grad_norm: float | None  # of the last step, over all gradients, before clipping
    kernel: str
    workers: int
    policy: str
    device: str
    d2h_bytes: int  # moved so far
    h2d_bytes: int
    parameters: int  # elements that are trained here
    master_bytes: int
    moment_bytes: int
    gradient_bytes: int
    host_bytes: int  # the three above, and pageable staging
    pinned_bytes: int
    device_bytes: int  # staging on the accelerator, beyond the model's own weights
    slot_waits: int  # how often backward waited for a copy


class _OffloadOptimizer(torch.optim.Optimizer):
    """What both optimizers share; see `OffloadAdamW`."""

    _rule: ClassVar[UpdateRule]
    _default_weight_decay: ClassVar[float]
    #: torch.amp.GradScaler hands its inverse scale and what it found to ``step`` instead of skipping it.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float | None = None,
        *,
        model: nn.Module | None = None,
        max_norm: float | None = None,
        policy: str | Policy = "overlap",
        config: OffloadConfig | None = None,
        **torch_options: Any,
    ) -> None:
        config = OffloadConfig() if config is None else config
        if not isinstance(config, OffloadConfig):
            raise TypeError(f"config must be an OffloadConfig, got {config!r}")
        if model is not None and not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module or None, got {type(model).__name__}")
        _refuse_options(torch_options)
        _check_max_norm(max_norm)
        check_device_name(config.device)
        build = find_policy(policy)
        weight_decay = self._default_weight_decay if weight_decay is None else weight_decay
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        _check_hyper(defaults, "")
        self._config = config
        self._waits = True
        self._runtime: Runtime | None = None
        self._entry_count = 0
        super().__init__(_checked_params(params), defaults)
        entries = self._new_entries()
        if not entries:
            raise ValueError("params holds no parameter that requires a gradient: there is nothing to train")
        reference = weakref.ref(self)

        def read_hyper() -> tuple[Hyper, ...]:
            optimizer = reference()
            return () if optimizer is None else optimizer._hyper()

        def new_entries() -> list[Entry]:
            optimizer = reference()
            return [] if optimizer is None else optimizer._new_entries()

        self._runtime = Runtime(
            entries,
            self._rule,
            build,
            config,
            max_norm=max_norm,
            model=model,
            read_hyper=read_hyper,
            new_entries=new_entries,
        )
        _OPEN.add(self._runtime)
        weakref.finalize(self, Runtime.close, self._runtime).atexit = False

    # --- torch's protocol ---------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Apply the gradients. Returns what ``closure`` (run with gradients enabled) returned, else None.

        With ``model=`` the update is in flight when this returns, and reads of weights through the model wait for their
        own upload; without it the weights are current.

        Raises:
            Whatever an earlier or this step's work raised; `NonFiniteGradientError` where that was asked for;
            `TornStateError` after a failure that has left the state half updated; `ClosedError` after ``close()``.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        runtime = self._open_runtime()
        self._check_groups(runtime)
        grad_scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        runtime.step(
            self._hyper(),
            inverse_scale=1.0 if grad_scale is None else 1.0 / float(grad_scale),
            overflowed=found_inf is not None and bool(found_inf),
            wait=self._waits,
        )
        return loss

    @contextlib.contextmanager
    def _closed_without_waiting(self) -> Iterator[None]:
        """While this is entered ``step()`` only closes the step; leaving it waits as ``step()`` would have done."""
        self._waits = False
        try:
            yield
        finally:
            self._waits = True
        self._open_runtime().wait_after_step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients (or make them zero). Never waits for the update in flight, and does not disturb it."""
        runtime = self._open_runtime()
        if set_to_none:
            runtime.discard_gradients()
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None
        else:
            super().zero_grad(set_to_none=False)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its parameters get masters and buckets of their own."""
        if not isinstance(param_group, dict):
            raise TypeError(f"param_group must be a dict, got {type(param_group).__name__}")
        group = {**self.defaults, **param_group}
        where = f" of param_groups[{len(self.param_groups)}]"
        _check_group(group, where)
        if isinstance(param_group["params"], set | frozenset):
            raise TypeError(f"params{where} is a set, whose order is not defined: pass a list")
        params = [param_group["params"]] if isinstance(param_group["params"], Tensor) else list(param_group["params"])
        _check_parameters(params, len(self.param_groups))
        super().add_param_group({**param_group, "params": params})
        if self._runtime is not None and (entries := self._new_entries()):
            self._runtime.add(entries)

    @property
    def state(self) -> defaultdict[Tensor, dict[str, Any]]:
        """torch's own shape: ``step, exp_avg, exp_avg_sq`` and ``master`` a parameter; waits for the update in flight.

        The tensors are the optimizer's own (fp32, on the host): reading them while a later step runs sees it happen.
        """
        state: defaultdict[Tensor, dict[str, Any]] = defaultdict(dict)
        if self._runtime is not None:
            state.update(read_state(self._runtime))
        return state

    @state.setter
    def state(self, value: object) -> None:
        """torch's constructor sets an empty dict; the state is the runtime's."""

    def state_dict(self) -> dict[str, Any]:
        """A snapshot in the shape of ``torch.optim.AdamW``, plus ``master``; later steps do not change it.

        Waits for the update in flight, and flushes a delayed one. Plain dicts, tensors (fp32, CPU), numbers and
        strings.
        """
        runtime = self._open_runtime()
        runtime.flush()
        runtime.check()
        packed = super().state_dict()
        for values in packed["state"].values():
            for name, value in values.items():
                values[name] = value.clone()
        packed["param_groups"] = copy.deepcopy(packed["param_groups"])  # a tensor lr is the optimizer's own
        packed["zoff_async"] = {"version": VERSION, "rule": self._rule.name, "steps": runtime.steps_done}
        return packed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take a state of this optimizer or of torch's own; all of it or, on an error, nothing.

        A state without ``master`` (torch's) takes the masters from the model's weights. Model weights that differ from
        the loaded masters are taken over at the next step, so the model's state may be loaded before or after.

        Raises:
            StateError: it is foreign, of a newer version, or of another model; the message names the first difference.
        """
        load_state(self, self._open_runtime(), state_dict, _check_group)

    # --- our own ------------------------------------------------------------------------------------------------------

    @property
    def plan(self) -> StepPlan:
        """The step plan in force."""
        return self._open_runtime().plan

    @property
    def timeline(self) -> Timeline:
        """The spans of the last steps (``OffloadConfig(trace_steps=...)``)."""
        return self._open_runtime().timeline()

    def synchronize(self) -> None:
        """Return when every update is in the masters and in the model, a delayed one too."""
        runtime = self._open_runtime()
        runtime.flush()
        runtime.check()

    def refresh(self) -> None:
        """Read the masters again from the model where its weights were edited; the other elements keep their digits."""
        self._open_runtime().refresh()

    def grad(self, parameter: Tensor) -> Tensor:
        """The gradient as it stands: an fp32 copy on the CPU, shaped like the parameter. Waits for copies under way.

        Raises:
            GradientError: there is none now.
            ValueError: the parameter is not trained here.
        """
        runtime = self._open_runtime()
        entry = self._entry(parameter)
        runtime.start()
        runtime.check()
        gradient = parameter.grad
        source = runtime.intake.sources[parameter]
        if gradient is not None and gradient is not source.stand_in:
            return gradient.detach().to(device="cpu", dtype=torch.float32, copy=True)
        return runtime.intake.gradient(entry)

    def master(self, parameter: Tensor) -> Tensor:
        """The master weights: an fp32 copy on the CPU, shaped like the parameter. Waits for the update in flight.

        Raises:
            ValueError: the parameter is not trained here.
        """
        runtime = self._open_runtime()
        entry = self._entry(parameter)
        runtime.flush()
        return entry.view(runtime.states[entry.bucket.index].master).clone()

    def statistics(self) -> OffloadStatistics:
        """Counts and bytes now. ``last_grad_norm`` waits for the last gradient copy of that step."""
        runtime = self._open_runtime()
        norm = runtime.last_norm()
        held = [state.nbytes for state in runtime.states]
        master, moments, gradients = (sum(h[name] for h in held) for name in ("master", "moments", "gradients"))
        memory = runtime.device.memory() if runtime.started else None
        return OffloadStatistics(
            steps=runtime.counters.steps,
            skipped_steps=runtime.counters.skipped_steps,
            last_grad_norm=norm,
            kernel=runtime.kernel.name,
            workers=runtime.workers,
            policy=runtime.plan.name,
            device=runtime.device.name if runtime.started else str(runtime.config.device),
            d2h_bytes=runtime.counters.d2h_bytes,
            h2d_bytes=runtime.counters.h2d_bytes,
            parameters=sum(entry.numel for entry in runtime.entries),
            master_bytes=master,
            moment_bytes=moments,
            gradient_bytes=gradients,
            host_bytes=master + moments + gradients + (memory.pageable_bytes if memory else 0),
            pinned_bytes=memory.pinned_bytes if memory else 0,
            device_bytes=memory.staging_bytes if memory else 0,
            slot_waits=runtime.intake.slot_waits if runtime.started else 0,
        )

    def close(self) -> None:
        """Finish what is under way, end the threads and give plain torch back. Idempotent; always returns."""
        if self._runtime is not None:
            self._runtime.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            f"{type(self).__name__} holds threads and cannot be pickled or copied: save optimizer.state_dict(), and "
            f"build a new "
            "optimizer to load it into"
        )

    # --- inside -------------------------------------------------------------------------------------------------------

    def _open_runtime(self) -> Runtime:
        assert self._runtime is not None
        self._runtime.refuse_closed()
        return self._runtime

    def _hyper(self) -> tuple[Hyper, ...]:
        return tuple(Hyper.of(group) for group in self.param_groups)

    def _entry(self, parameter: Tensor) -> Entry:
        entry = self._open_runtime().entry_of(parameter)
        if entry is None:
            raise ValueError(f"the parameter of shape {tuple(parameter.shape)} is not trained by this optimizer")
        return entry

    def _check_groups(self, runtime: Runtime) -> None:
        """Raise, before anything moves, for groups that were edited into something that would not be honoured."""
        seen = 0
        for number, group in enumerate(self.param_groups):
            where = f" of param_groups[{number}]"
            _check_group(group, where)
            for parameter in group["params"]:
                entry = runtime.entry_of(parameter)
                if entry is None:
                    if parameter.grad is not None and not parameter.requires_grad:
                        raise ValueError(
                            f"a parameter{where} of shape {tuple(parameter.shape)} has a gradient and does not "
                            f"require one: "
                            "call requires_grad_(True) to train it, or set its grad to None"
                        )
                    continue
                seen += 1
                if entry.group != number:
                    raise StepError(_EDITED_GROUPS.format(name=entry.name, what=f"was moved to{where[3:]}"))
        if seen != len(runtime.entries):
            here = {parameter for group in self.param_groups for parameter in group["params"]}
            lost = next((entry.name for entry in runtime.entries if entry.parameter not in here), "a parameter")
            raise StepError(_EDITED_GROUPS.format(name=lost, what="was taken out of param_groups, or put in twice"))

    def _new_entries(self) -> list[Entry]:
        """Entries for the parameters that require gradients and have none yet."""
        known = self._runtime
        entries = []
        for number, group in enumerate(self.param_groups):
            names = group.get("param_names")
            for position, parameter in enumerate(group["params"]):
                if not parameter.requires_grad or (known is not None and known.entry_of(parameter) is not None):
                    continue
                name = names[position] if names else f"param_groups[{number}]['params'][{position}]"
                _check_parameter(parameter, repr(name) if names else name)
                notice = self._config.notice_edits
                entries.append(Entry(parameter, name, self._entry_count, number, wants_fingerprint=notice))
                self._entry_count += 1
        return entries


class OffloadAdamW(_OffloadOptimizer):
    """AdamW (decoupled weight decay) with masters, moments and arithmetic on the host: a drop-in for torch's.

    Args:
        params: What ``torch.optim.AdamW`` takes: parameters, groups, or named parameters. fp32, bf16 or fp16; frozen
            ones cost nothing until they are unfrozen.
        lr, betas, eps, weight_decay: as torch's, a group; read at the ``step()`` they belong to.
        model: The module that reads the weights. With it ``step()`` returns while the update runs, and each weight
            waits for itself where it is read; without it ``step()`` waits.
        max_norm: Clip the global gradient norm as ``torch.nn.utils.clip_grad_norm_`` would.
        policy: ``serial``, ``overlap``, ``in_backward``, ``delayed``, or a function from a `Layout` to a `StepPlan`.
        config: Sizes and threads, see `OffloadConfig`.

    The numbers are those of ``torch.optim.AdamW`` in fp32 (moments within 2 ulp after a step); every exact policy gives
    the same bits. A parameter without a gradient is untouched, step counts are per parameter.

    Raises:
        ValueError, TypeError: at construction, naming the argument, its value and the way out.

    Source: Loshchilov & Hutter, "Decoupled Weight Decay Regularization", arXiv:1711.05101; ZeRO-Offload,
        arXiv:2101.06840.
    """

    _rule = ADAMW
    _default_weight_decay = 1e-2


class OffloadAdam(_OffloadOptimizer):
    """Adam with L2 weight decay (default 0), as ``torch.optim.Adam``; everything else as `OffloadAdamW`."""

    _rule = ADAM
    _default_weight_decay = 0.0


# --- checks at construction -------------------------------------------------------------------------------------------


def _refuse_options(options: Mapping[str, Any], where: str = "") -> None:
    for name, value in options.items():
        if name not in NOT_HONOURED:
            raise TypeError(f"unexpected argument {name!r}{where}: see OffloadAdamW's documentation for what there is")
        if value not in NOT_HONOURED[name]:
            raise ValueError(
                f"{name}={value!r}{where} is not honoured by this optimizer: leave it out, or use torch.optim.AdamW"
            )


def _check_max_norm(max_norm: object) -> None:
    if max_norm is None:
        return
    if isinstance(max_norm, bool) or not isinstance(max_norm, int | float):
        raise TypeError(f"max_norm must be a positive number or None, got {max_norm!r}")
    if not max_norm > 0:
        raise ValueError(f"max_norm must be positive (or None for no clipping), got {max_norm}")


def _check_hyper(group: Mapping[str, Any], where: str) -> None:
    """Raise unless lr, betas, eps and weight_decay are usable numbers."""
    lr = group["lr"]
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError(f"lr{where} must be a number or a tensor of one element, got shape {tuple(lr.shape)}")
    for name in ("lr", "eps", "weight_decay"):
        value = group[name]
        if isinstance(value, bool) or not isinstance(value, int | float | Tensor):
            raise TypeError(f"{name}{where} must be a number, got {value!r}")
        if not 0 <= float(value) < math.inf:
            raise ValueError(f"{name}{where} must be finite and not negative, got {float(value)}")
    betas = group["betas"]
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        raise TypeError(f"betas{where} must be two numbers, got {betas!r}")
    for position, beta in enumerate(betas):
        if isinstance(beta, bool) or not isinstance(beta, int | float | Tensor):
            raise TypeError(f"betas[{position}]{where} must be a number, got {beta!r}")
        if not 0 <= float(beta) < 1:
            raise ValueError(f"betas[{position}]{where} must be in [0, 1), got {float(beta)}")


def _check_group(group: Mapping[str, Any], where: str) -> None:
    """Raise for a group, made here or loaded, that this optimizer would not honour."""
    _check_hyper(group, where)
    _refuse_options({name: group[name] for name in NOT_HONOURED if name in group}, where)


def _checked_params(params: Any) -> Any:
    """``params`` as torch takes it, read once; raises for what torch would take and we cannot."""
    if isinstance(params, Tensor):
        raise TypeError(
            f"params must be an iterable of parameters or groups, got a tensor of shape {tuple(params.shape)}"
        )
    if isinstance(params, dict) or not isinstance(params, Iterable):
        raise TypeError(f"params must be an iterable of parameters or groups, got {type(params).__name__}")
    listed = list(params)
    if not listed:
        raise ValueError("params is empty: pass model.parameters()")
    return listed


def _check_parameters(params: list[Any], group: int) -> None:
    """Raise for a parameter that cannot be trained here, or that comes twice in its group."""
    seen: dict[int, int] = {}
    for position, item in enumerate(params):
        named = isinstance(item, tuple) and len(item) == 2
        parameter = item[1] if named else item
        name = repr(item[0]) if named else f"param_groups[{group}]['params'][{position}]"
        if not isinstance(parameter, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(parameter).__name__}")
        if id(parameter) in seen:
            raise ValueError(f"{name} is the same tensor as entry {seen[id(parameter)]} of its group: list it once")
        seen[id(parameter)] = position
        if parameter.requires_grad:  # nothing is kept for a frozen one
            _check_parameter(parameter, name)


def _check_parameter(parameter: Tensor, name: str) -> None:
    """Raise, naming it, for a parameter that cannot be trained here."""
    if is_lazy(parameter):
        raise ValueError(
            f"{name} is a lazy layer's parameter and has no shape yet: run a batch through the model first"
        )
    if not parameter.is_leaf:
        raise ValueError(
            f"{name} is not a leaf: an optimizer updates the original parameter, not a tensor made from it"
        )
    if parameter.dtype not in DTYPES:
        allowed = ", ".join(str(dtype) for dtype in DTYPES)
        raise TypeError(f"{name} has dtype {parameter.dtype}: masters are fp32, so parameters must be one of {allowed}")
    if parameter.layout != torch.strided:
        raise TypeError(f"{name} has layout {parameter.layout}: parameters must be dense")
    if parameter.device.type == "meta":
        raise ValueError(f"{name} is on the meta device and has no weights yet: materialise the model first")


@atexit.register
def _close_all() -> None:
    """A script that ends without ``close()`` finishes its update in flight and ends quietly."""
    for runtime in list(_OPEN):
        runtime.close()
