"""Gates: where a model reads a weight, the read waits for that weight's own upload.

Every module's ``_parameters`` becomes a dict whose reads go through the gate. Attribute reads, functional reads of
another module's weight, ``parameters()`` and ``state_dict()`` all end there. While nothing is under way a read costs
one attribute test; copies and pickles of a model hold plain dicts.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from types import CodeType
from typing import Any, Protocol

from torch import Tensor, nn
from torch.compiler import is_compiling


class Uploads(Protocol):
    """What a gate asks: is this weight current, and if not, make it so."""

    def wait_current(self, parameter: Tensor) -> None:
        """Return when what this thread enqueues from now on sees the parameter's newest weights."""

    def wait_all_current(self) -> None:
        """The same for every parameter."""


class Gate:
    """Open while every weight is current; closed from ``step()`` until the last upload is done.

    ``bypassed`` turns True for good when a tracer has read a weight through a gate (see `_note_tracing`).
    """

    __slots__ = ("__weakref__", "bypassed", "open", "uploads")

    def __init__(self, uploads: Uploads) -> None:
        self.open = True
        self.bypassed = False
        self.uploads = uploads
        _GATES.add(self)


_GATES: weakref.WeakSet[Gate] = weakref.WeakSet()


def _note_tracing() -> bool:
    """Runs while torch.compile traces a read, once a trace, and not in the compiled code.

    Compiled code loads its weights by ``dict.__getitem__`` itself (seen in the bytecode of torch 2.13), past any gate.
    So from the first trace on every step waits until all weights are current, as it does without ``model=``. A tracer
    does not say whose weight it reads, so all gates of the process are told.
    """
    for gate in list(_GATES):
        gate.bypassed = True
        if not gate.open:
            gate.uploads.wait_all_current()
    return True


# What torch.compiler.assume_constant_result sets; calling that here would import all of dynamo with this package.
_note_tracing._dynamo_marked_constant = True  # type: ignore[attr-defined]


class GatedParameters(dict[str, Any]):
    """A module's ``_parameters``: a dict whose reads of values wait at the gate."""

    __slots__ = ("gate",)

    def __init__(self, parameters: dict[str, Any], gate: Gate) -> None:
        super().__init__(parameters)
        self.gate = gate

    def __getitem__(self, name: str) -> Any:
        if is_compiling():
            _note_tracing()
            return dict.__getitem__(self, name)
        value = dict.__getitem__(self, name)
        if not self.gate.open and value is not None:
            self.gate.uploads.wait_current(value)
        return value

    def get(self, name: str, default: Any = None) -> Any:
        try:
            return self[name]
        except KeyError:
            return default

    def __iter__(self) -> Iterator[str]:
        # dict(parameters) and {**parameters} copy values past __getitem__ unless the iterator is not dict's own.
        return super().__iter__()

    def setdefault(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self else super().setdefault(name, default)

    def popitem(self) -> tuple[str, Any]:
        name = next(reversed(self))
        return name, self.pop(name)

    def __or__(self, other: Any) -> Any:
        return self.copy() | dict(other)

    def __ror__(self, other: Any) -> Any:
        return dict(other) | self.copy()

    def values(self) -> Any:
        return _Values(self) if self._must_wait() else super().values()

    def items(self) -> Any:
        return _Items(self) if self._must_wait() else super().items()

    def pop(self, name: str, *default: Any) -> Any:
        if name in self:
            self[name]  # waits
        return super().pop(name, *default)

    def copy(self) -> dict[str, Any]:
        return dict(self.items())

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        from copy import deepcopy

        return {name: deepcopy(value, memo) for name, value in self.items()}

    def __reduce__(self) -> Any:
        return (dict, (dict(self.items()),))

    def _must_wait(self) -> bool:
        return not self.gate.open and not _called_from(_ZERO_GRAD)


class _Items:
    """Pairs of a gated dict; each waits for its own weight when it is yielded."""

    def __init__(self, parameters: GatedParameters) -> None:
        self.parameters = parameters

    def __len__(self) -> int:
        return len(self.parameters)

    def __iter__(self) -> Iterator[Any]:
        return ((name, self.parameters[name]) for name in self.parameters)


class _Values(_Items):
    def __iter__(self) -> Iterator[Any]:
        return (self.parameters[name] for name in self.parameters)


#: ``Module.zero_grad`` walks the parameters for their gradients only: it must not wait for weights.
_ZERO_GRAD = nn.Module.zero_grad.__code__
_ZERO_GRAD_DEPTH = 10


def _called_from(code: CodeType) -> bool:
    frame = sys._getframe(2)
    for _ in range(_ZERO_GRAD_DEPTH):
        if frame.f_code is code:
            return True
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return False


def install(model: nn.Module, gate: Gate) -> set[Tensor]:
    """Put the gate before every parameter of the model; all of it or, on an error, nothing. Idempotent.

    Returns the parameters behind the gate. Modules that join the model later are gated by the next call.

    Raises:
        ValueError: a module is behind another optimizer's gate.
    """
    modules = list(model.modules())
    for module in modules:
        parameters = module.__dict__["_parameters"]  # a compiled module passes attributes on
        if isinstance(parameters, GatedParameters) and parameters.gate is not gate:
            raise ValueError(
                f"model= is already gated by another optimizer (module {type(module).__name__}): "
                "pass the part of the model that this optimizer updates, or close the other optimizer first"
            )
    behind: set[Tensor] = set()
    for module in modules:
        own = module.__dict__
        if not isinstance(own["_parameters"], GatedParameters):
            own["_parameters"] = GatedParameters(own["_parameters"], gate)
        behind.update(parameter for parameter in dict.values(own["_parameters"]) if parameter is not None)
    return behind


def remove(model: nn.Module, gate: Gate) -> None:
    """Give every module its plain dict back."""
    for module in model.modules():
        parameters = module.__dict__["_parameters"]
        if isinstance(parameters, GatedParameters) and parameters.gate is gate:
            module.__dict__["_parameters"] = dict(dict.items(parameters))
