"""State in and out: torch's own AdamW shape, plus the fp32 masters; and the masters alone, as a safetensors file."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zoff_async.bucket import Entry
from zoff_async.errors import StateError
from zoff_async.runtime import Runtime

VERSION = 1

#: One parameter's saved values by name, None for a parameter that has never been updated.
Saved = Mapping[str, Any] | None
#: Raises ValueError or TypeError for a group's values that cannot be honoured; the text says where the group is from.
CheckGroup = Callable[[Mapping[str, Any], str], None]


def read_state(runtime: Runtime) -> Iterator[tuple[Tensor, dict[str, Any]]]:
    """Each parameter with its state: views of the optimizer's own tensors. Waits for the update in flight.

    Also what was loaded for parameters that are frozen now: it is saved again, as torch does.
    """
    runtime.flush()
    for entry in runtime.entries:
        state = runtime.states[entry.bucket.index]
        values: dict[str, Any] = {"step": torch.tensor(float(state.counts[entry.position]))}
        for name, moment in zip(runtime.rule.state_names, state.moments, strict=True):
            values[name] = entry.view(moment)
        values["master"] = entry.view(state.master)
        yield entry.parameter, values
    for parameter, kept in runtime.set_aside.items():
        yield parameter, dict(kept)


# --- loading ----------------------------------------------------------------------------------------------------------


def load_state(
    optimizer: Optimizer, runtime: Runtime, state_dict: Mapping[str, Any], check_group: CheckGroup | None = None
) -> None:
    """Check the whole of a state, then take it. See ``OffloadAdamW.load_state_dict``.

    Hooks registered with torch's ``register_load_state_dict_pre_hook`` and ``..._post_hook`` run as in torch: the first
    may give another state, the second sees the loaded optimizer.
    """
    for hook in optimizer._optimizer_load_state_dict_pre_hooks.values():
        given = hook(optimizer, dict(state_dict))
        state_dict = state_dict if given is None else given
    loaded = _checked(optimizer, runtime, state_dict, check_group)
    runtime.prepare_load(state_dict.get("zoff_async", {}).get("steps"))
    for group, settings in zip(optimizer.param_groups, loaded.settings, strict=True):
        group.update(settings)
    for entry, values in loaded.trained:
        runtime.take_saved(entry, values)
    runtime.set_aside.clear()
    runtime.set_aside.update(loaded.frozen)
    for finished in optimizer._optimizer_load_state_dict_post_hooks.values():
        finished(optimizer)


class _Loaded(NamedTuple):
    """A state that fits, paired with what it is for."""

    settings: list[dict[str, Any]]  # a group
    trained: list[tuple[Entry, Saved]]
    frozen: dict[Tensor, dict[str, Any]]  # copies, for the day they are trained again


def _checked(
    optimizer: Optimizer, runtime: Runtime, state_dict: Mapping[str, Any], check_group: CheckGroup | None
) -> _Loaded:
    """The saved state paired with our groups and parameters, or StateError before anything has changed."""
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= state_dict.keys():
        raise StateError("state_dict has no 'state' and 'param_groups': it is not an optimizer's state")
    _check_origin(runtime, state_dict.get("zoff_async", {}))
    groups, saved = list(state_dict["param_groups"]), state_dict["state"]
    if len(groups) != len(optimizer.param_groups):
        raise StateError(f"state_dict has {len(groups)} param groups, this optimizer has {len(optimizer.param_groups)}")
    checked = _Loaded([], [], {})
    for number, (ours, theirs) in enumerate(zip(optimizer.param_groups, groups, strict=True)):
        checked.settings.append(_checked_group(number, ours, theirs, check_group))
        for parameter, key in zip(ours["params"], theirs["params"], strict=True):
            entry, values = runtime.entry_of(parameter), saved.get(key)
            name = f"parameter {key}" if entry is None else repr(entry.name)
            _check_values(name, parameter, runtime.rule.state_names, values)
            if entry is not None:
                checked.trained.append((entry, values))
            elif values is not None:
                checked.frozen[parameter] = {n: _copied(value) for n, value in values.items()}
    return checked


def _copied(value: Any) -> Any:
    return value.detach().to(device="cpu", dtype=torch.float32, copy=True) if isinstance(value, Tensor) else value


def _check_origin(runtime: Runtime, about: Mapping[str, Any]) -> None:
    if about.get("version", VERSION) > VERSION:
        raise StateError(
            f"state_dict has version {about['version']}, this zoff_async reads up to {VERSION}: upgrade it"
        )
    if about.get("rule", runtime.rule.name) != runtime.rule.name:
        raise StateError(f"state_dict is of {about['rule']!r}, this optimizer is {runtime.rule.name!r}")


def _checked_group(
    number: int, ours: Mapping[str, Any], theirs: Mapping[str, Any], check_group: CheckGroup | None
) -> dict[str, Any]:
    """The values that a saved group sets: all but who its parameters are."""
    if len(ours["params"]) != len(theirs["params"]):
        raise StateError(
            f"param group {number} has {len(theirs['params'])} parameters in the state_dict "
            f"and {len(ours['params'])} here"
        )
    settings = {name: value for name, value in theirs.items() if name not in ("params", "param_names")}
    if check_group is not None:
        try:
            check_group({**ours, **settings}, f" of param_groups[{number}] in the state_dict")
        except (ValueError, TypeError) as error:
            raise StateError(str(error)) from error
    return copy.deepcopy(settings)  # a learning rate may be a tensor, and schedulers write into it


def _check_values(name: str, parameter: Tensor, needed: tuple[str, ...], values: Saved) -> None:
    if values is None:
        return
    for value in ("step", *needed):
        if value not in values:
            raise StateError(f"state_dict has no {value!r} for {name}: it is the state of another optimizer")
    _check_count(name, values["step"])
    for value in (*needed, "master"):
        tensor = values.get(value, parameter)
        if not isinstance(tensor, Tensor):
            raise StateError(f"{value} of {name} must be a tensor, got {type(tensor).__name__} in the state_dict")
        if tensor.shape != parameter.shape:
            raise StateError(
                f"{value} of {name} has shape {tuple(tensor.shape)} in the state_dict, "
                f"the parameter has {tuple(parameter.shape)}: it is the state of another model"
            )


def _check_count(name: str, step: object) -> None:
    number = step.item() if isinstance(step, Tensor) and step.numel() == 1 else step
    if not isinstance(number, int | float) or not 0 <= number < math.inf:
        raise StateError(f"step of {name} must be a number of updates, got {step!r} in the state_dict")


# --- the masters alone ------------------------------------------------------------------------------------------------


def export_safetensors(optimizer: Optimizer, path: str | os.PathLike[str], model: nn.Module | None = None) -> None:
    """Write the consolidated fp32 weights to a safetensors file: the masters, not their roundings in the model.

    Waits for the update in flight. The file appears whole or not at all. Needs no memory beyond what is not fp32
    already.

    Args:
        optimizer: An ``OffloadAdamW`` or ``OffloadAdam``.
        path: The file to write; one that is there is replaced.
        model: Names the weights as ``model.state_dict()`` does, and adds what the optimizer does not train: frozen
            parameters and buffers, floating-point ones in fp32. A weight with several names is written under the
            first one (``safetensors.torch.load_model`` ties it again). Without a model the names given to the optimizer
            are used.

    Raises:
        ImportError: the safetensors package is missing.
        ValueError: no model was given and the optimizer was made of parameters without names.
        OSError: the file cannot be written; a file of that name is as it was.
    """
    try:
        from safetensors.torch import save_file
    except ImportError:
        raise ImportError("export_safetensors needs the safetensors package: pip install safetensors") from None
    masters = {parameter: values["master"] for parameter, values in optimizer.state.items()}
    named = _names_in_groups(optimizer) if model is None else _names_in_model(model)
    tensors = {}
    for name, tensor in named:
        value = masters.get(tensor, tensor).detach()
        value = value.to(device="cpu", dtype=torch.float32 if value.is_floating_point() else None)
        tensors[name] = value.contiguous()
    path = Path(path)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.unfinished")
    try:
        save_file(tensors, str(unfinished), metadata={"format": "pt"})
        with unfinished.open("rb") as file:
            os.fsync(file.fileno())
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def _names_in_groups(optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
    for group in optimizer.param_groups:
        if group["params"] and not group.get("param_names"):
            raise ValueError(
                "the optimizer was made of parameters without names: pass model=, "
                "or make it of model.named_parameters()"
            )
        yield from zip(group.get("param_names", ()), group["params"], strict=True)


def _names_in_model(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    seen: set[int] = set()
    for name, value in model.state_dict(keep_vars=True).items():
        if isinstance(value, Tensor) and id(value) not in seen:
            seen.add(id(value))
            yield name, value
