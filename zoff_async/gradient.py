"""``p.grad``'s stand-in: a gradient that has left for the host, still answering for itself.

A stand-in has the parameter's shape, dtype and device and no storage. What the training loops of this world do with a
gradient is answered without bringing it back: its 2-norm from the host's sums, scale factors by keeping them. Anything
else reads the values back; in-place writes reach the host. The next backward adds to it as to any gradient.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from zoff_async.errors import GradientError

aten = torch.ops.aten


class GradientSource(Protocol):
    """What stands behind a stand-in: one parameter's gradient on the host.

    ``generation`` counts the parameter's gradients; what stands for an earlier one is refused.
    """

    name: str
    generation: int

    def read(self) -> Tensor:
        """The values, in the parameter's dtype, shape and device; waits for copies under way."""

    def write(self, values: Tensor) -> None:
        """Replace the values."""

    def zero(self) -> None:
        """Make it zero, without waiting."""

    def norm(self) -> float:
        """The 2-norm in fp64; waits for copies under way. inf or NaN if an element is."""

    def scale(self, factor: float) -> None:
        """Multiply by a factor, without touching the values."""

    def receive(self, gradient: Tensor) -> None:
        """A further backward's gradient, to be added when the accumulation hook fires. It is not changed any more."""


class _ViewStep(NamedTuple):
    """One view operation on the way from the gradient to a view of it."""

    operation: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    pick: int | None  # which output, where there are several

    def apply(self, base: Tensor) -> Tensor:
        output = self.operation(base, *self.args, **self.kwargs)
        return cast(Tensor, output if self.pick is None else output[self.pick])


class GradientStandIn(Tensor):
    """Stands for a gradient, or for a view of one, whose values are on the host."""

    _source: GradientSource
    _generation: int
    _path: tuple[_ViewStep, ...]

    @staticmethod
    def __new__(
        cls, source: GradientSource, like: Tensor, device: torch.device, path: tuple[_ViewStep, ...] = ()
    ) -> GradientStandIn:
        stand_in: GradientStandIn = Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=device
        )
        # Code below the dispatcher (DLPack, extensions) would read the null address of a tensor without storage.
        torch._C._set_throw_on_mutable_data_ptr(stand_in)
        stand_in._source = source
        stand_in._generation = source.generation
        stand_in._path = path
        return stand_in

    @property
    def source(self) -> GradientSource:
        """What stands behind it, as long as that still is the same gradient."""
        if self._generation != self._source.generation:
            raise GradientError(
                f"this gradient of {self._source.name!r} is gone, the parameter has another one by now: "
                "keep a gradient beyond zero_grad() with .clone()"
            )
        return self._source

    def read(self) -> Tensor:
        """The values, on the parameter's device."""
        values = self.source.read()
        for step in self._path:
            values = step.apply(values)
        return values

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        answer = _ANSWERS.get(func)
        if answer is not None:
            result = answer(func, args, kwargs or {})
            if result is not NotImplemented:
                return result
        return _on_values(func, args, kwargs or {})

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        answer = _IN_PYTHON.get(func)
        if answer is not None:
            return answer(func, args, kwargs or {})
        before, _python.calls = getattr(_python, "calls", False), True
        try:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        finally:
            _python.calls = before

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return repr(self.read())

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        values = self.read().clone()
        memo[id(self)] = values
        return values

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.read().clone().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


#: ``calls``: whether Python code, and not autograd's engine, has called what this thread dispatches.
_python = threading.local()


def next_stand_in(stand_in: GradientStandIn) -> GradientStandIn:
    """The stand-in for a parameter's next gradient; call it when the source's ``generation`` has moved on.

    It is the old one again, unless somebody has kept that: then he is refused from now on, not shown the new gradient.
    """
    source = stand_in._source
    if sys.getrefcount(stand_in) > _OWN_REFERENCES:
        return GradientStandIn(source, stand_in, stand_in.device)
    stand_in._generation = source.generation
    return stand_in


#: The source's attribute, the parameter of `next_stand_in`, the argument of ``getrefcount``.
_OWN_REFERENCES = 3


# --- what Python's own functions ask ----------------------------------------------------------------------------------


def _read_in_python(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return func(args[0].read(), *args[1:], **kwargs)


def _numpy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An array that cannot be written to: what is written to it would not reach the gradient, as it does in torch."""
    array = func(args[0].read(), *args[1:], **kwargs)
    array.flags.writeable = False
    return array


def _write_in_python(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0].copy_(func(args[0].read(), *args[1:], **kwargs))


def _set_data(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    target, data = args
    if not isinstance(target, GradientStandIn):
        func(target, data.read())
        return
    if target._path or data.shape != target.shape:
        raise GradientError(
            f"the gradient of {target._source.name!r} has left for the host and keeps its shape {tuple(target.shape)}, "
            f"got data of shape {tuple(data.shape)}: set parameter.grad instead"
        )
    target.source.write(data)
    # Models that are cast or moved set their gradients' data too: dtype and device follow.
    with torch._C.DisableTorchFunctionSubclass():
        func(target, GradientStandIn(target.source, data, data.device))


def _refuse_address(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if func is Tensor.untyped_storage and torch._guards.TracingContext.try_get() is not None:
        # A tracer describes parameters with their gradients; the storage it asks for is empty, and it reads nothing.
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    raise GradientError(
        f"the gradient of {args[0]._source.name!r} has left for the host and has no address: "
        "read it with .clone(), or with optimizer.grad(parameter)"
    )


#: Tensor methods that never reach dispatch on a subclass, or that would reach for memory that is not there.
_IN_PYTHON: dict[Any, Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]] = {
    **dict.fromkeys(
        (Tensor.tolist, Tensor.__format__, Tensor.__dlpack__, Tensor.__float__, Tensor.__int__, Tensor.__index__),
        _read_in_python,
    ),
    **dict.fromkeys((Tensor.numpy, Tensor.__array__), _numpy),
    Tensor.apply_: _write_in_python,
    Tensor.data.__set__: _set_data,  # type: ignore[attr-defined]
    **dict.fromkeys(
        (
            Tensor.data_ptr,
            Tensor.untyped_storage,
            Tensor.storage,
            Tensor._typed_storage,
            Tensor.share_memory_,
            Tensor.is_shared,
        ),
        _refuse_address,
    ),
}


# --- answers without the values -------------------------------------------------------------------------------------


def _detach(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    stand_in = args[0]
    return GradientStandIn(stand_in.source, stand_in, stand_in.device, stand_in._path)


def _itself(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0]


def _vector_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    stand_in, order = args[0], args[1] if len(args) > 1 else kwargs.get("ord", 2)
    if float(order) != 2.0 or len(args) > 2 or kwargs.keys() - {"ord", "dtype"} or stand_in._path:
        return NotImplemented
    return _norm(stand_in, kwargs.get("dtype"))


def _foreach_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    order = args[1] if len(args) > 1 else kwargs.get("ord", 2)
    if float(order) != 2.0:
        return NotImplemented
    dtype = args[2] if len(args) > 2 else kwargs.get("dtype")
    return [
        _norm(tensor, dtype) if _whole(tensor) else torch.linalg.vector_norm(tensor, 2.0, dtype=dtype)
        for tensor in args[0]
    ]


def _norm(stand_in: GradientStandIn, dtype: torch.dtype | None) -> Tensor:
    """Told in fp32 (torch's own norm of a bf16 gradient is itself bf16, and up to 4e-3 off)."""
    return torch.tensor(stand_in.source.norm(), dtype=dtype or torch.float32, device=stand_in.device)


def _scale(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    stand_in, factor = args[0], _factor_of(args[1])
    if kwargs or not _whole(stand_in) or factor is None:
        return NotImplemented
    stand_in.source.scale(factor)
    return stand_in


def _foreach_scale(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensors, others = args[0], args[1]
    if kwargs:
        return NotImplemented
    factors = list(others) if isinstance(others, list | tuple) else [others] * len(tensors)
    for tensor, factor in zip(tensors, factors, strict=True):
        tensor.mul_(factor)  # a stand-in keeps the factor; a gradient that is here is multiplied
    return None


def _check_and_unscale(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensors, found_inf, inverse_scale = args
    here = [tensor for tensor in tensors if not _whole(tensor)]
    if here:
        func(here, found_inf, inverse_scale)
    factor = float(inverse_scale)
    for tensor in filter(_whole, tensors):
        if not torch.tensor(tensor.source.norm(), dtype=torch.float64).isfinite():
            found_inf.fill_(1.0)
        tensor.source.scale(factor)
    return None


def _add(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    stand_in, other = args[0], args[1]
    in_backward = torch._C._current_graph_task_id() != -1
    if not in_backward or kwargs or not _whole(stand_in) or type(other) is not Tensor:
        return NotImplemented
    # Autograd's own tensor is not changed any more; one that a hook adds by hand may be, while its copy is under way.
    stand_in.source.receive(other.clone() if getattr(_python, "calls", False) else other)
    return stand_in


def _zero(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not _whole(args[0]):
        return NotImplemented
    args[0].source.zero()
    return args[0]


def _foreach_zero(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    for tensor in args[0]:
        tensor.zero_()
    return None


def _whole(tensor: object) -> bool:
    return isinstance(tensor, GradientStandIn) and not tensor._path


def _factor_of(other: object) -> float | None:
    if isinstance(other, int | float):
        return float(other)
    if isinstance(other, Tensor) and other.numel() == 1 and not isinstance(other, GradientStandIn):
        return float(other)
    return None


#: Only products: a quotient is rounded otherwise than a product with the inverse, so divisions read the values.
_ANSWERS: dict[Any, Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]] = {
    aten.detach.default: _detach,
    aten.detach_.default: _itself,
    aten.linalg_vector_norm.default: _vector_norm,
    aten._foreach_norm.Scalar: _foreach_norm,
    aten.mul_.Tensor: _scale,
    aten.mul_.Scalar: _scale,
    aten._foreach_mul_.Tensor: _foreach_scale,
    aten._foreach_mul_.Scalar: _foreach_scale,
    aten._foreach_mul_.ScalarList: _foreach_scale,
    aten._amp_foreach_non_finite_check_and_unscale_.default: _check_and_unscale,
    aten.add_.Tensor: _add,
    aten.zero_.default: _zero,
    aten._foreach_zero_.default: _foreach_zero,
}


# --- everything else reads the values --------------------------------------------------------------------------------


def _on_values(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation on the values; write back what it changed; views stay tied to the gradient."""
    if _is_view(func) and isinstance(args[0], GradientStandIn):
        return _view(func, args, kwargs)
    bases: dict[int, Tensor] = {}  # one real tensor a gradient, however often it occurs
    written: dict[int, tuple[GradientStandIn, Tensor]] = {}

    def real(stand_in: GradientStandIn) -> Tensor:
        key = id(stand_in._source)
        if key not in bases:
            bases[key] = stand_in.source.read()
        values = bases[key]
        for step in stand_in._path:
            values = step.apply(values)
        replaced[id(stand_in)] = values
        return values

    replaced: dict[int, Tensor] = {}
    real_args, real_kwargs = tree_map_only(GradientStandIn, real, (args, kwargs))
    for stand_in in _mutated(func, args, kwargs):
        written[id(replaced[id(stand_in)])] = (stand_in, bases[id(stand_in._source)])
    output = func(*real_args, **real_kwargs)
    for stand_in, base in written.values():
        _write(func, stand_in, base, replaced[id(stand_in)])
    return tree_map_only(Tensor, lambda tensor: written[id(tensor)][0] if id(tensor) in written else tensor, output)


def _write(func: Any, stand_in: GradientStandIn, base: Tensor, values: Tensor) -> None:
    if values.shape != stand_in.shape:
        raise GradientError(
            f"{func} would give the gradient of {stand_in._source.name!r} another shape, {tuple(values.shape)}, "
            "and it has left for the host: set parameter.grad to a tensor of your own instead"
        )
    stand_in.source.write(base)


def _is_view(func: Any) -> bool:
    returns = func._schema.returns
    alias = returns[0].alias_info if returns else None
    return alias is not None and not alias.is_write


def _view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    stand_in = args[0]
    shape = torch.empty_strided(stand_in.shape, stand_in.stride(), dtype=stand_in.dtype, device="meta")
    output = func(shape, *args[1:], **kwargs)

    def tied(like: Tensor, pick: int | None) -> GradientStandIn:
        path = (*stand_in._path, _ViewStep(func, args[1:], kwargs, pick))
        return GradientStandIn(stand_in.source, like, stand_in.device, path)

    if isinstance(output, Tensor):
        return tied(output, None)
    return [tied(like, pick) for pick, like in enumerate(output)]


def _mutated(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[GradientStandIn]:
    """The stand-ins that an operation writes to, by its schema."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        for item in value if isinstance(value, list | tuple) else (value,):
            if isinstance(item, GradientStandIn):
                yield item
