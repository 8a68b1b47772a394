"""Compiles generated text with numba, caching the machine code on disk.

numba finds its cache by the file a function comes from and by the function's name, and drops what is older than the
file. Generated functions are given this file, and a name that ends in a digest of their whole text (and of numba's
version), so that a cached binary can never belong to another text.

The text may call what ``TOOLS`` defines: conversions and streamed stores. Low precision is handled as bits, in
uint32: numba has no bf16, and every step is wrapped because numba would widen to 64 bits, which does not vectorise.
The fp16 conversions never touch a subnormal fp32, so they hold in a thread that flushes those.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from torch import Tensor

log = logging.getLogger(__name__)

# numba's releases differ in what they type.
_njit: Any = numba.njit
_intrinsic: Any = intrinsic

_COMPILING = threading.RLock()

# A division by zero gives inf or NaN, as in numpy, and not a branch that raises (which would not vectorise either).
_OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy"}

#: How a torch dtype looks to a compiled loop.
KINDS = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}
#: The array type of each in a numba signature, and the numpy type of one element.
ARRAYS = {"f32": "float32[::1]", "bf16": "uint16[::1]", "f16": "uint16[::1]"}
ELEMENTS = {"f32": "np.float32", "bf16": "np.uint16", "f16": "np.uint16"}

#: widen_KIND: stored bits -> fp32. narrow_KIND: fp32 -> stored bits, to nearest even, NaN to a quiet NaN.
#: stream: write a block where it belongs without reading that memory first, which a plain store would.
TOOLS = """
@inlined
def widen_f32(x):
    return x

@inlined
def narrow_f32(x):
    return x

@inlined
def widen_bf16(h):
    return np.uint32(np.uint32(h) << np.uint32(16)).view(np.float32)

@inlined
def narrow_bf16(x):
    u = np.float32(x).view(np.uint32)
    odd = np.uint32(np.uint32(u >> np.uint32(16)) & np.uint32(1))
    r = np.uint32(np.uint32(u + np.uint32(0x7FFF)) + odd)
    r = np.uint32(r >> np.uint32(16))
    return np.uint16(np.uint32(0x7FC0) if x != x else r)

@inlined
def widen_f16(h):
    u = np.uint32(h)
    sign = np.uint32(np.uint32(u & np.uint32(0x8000)) << np.uint32(16))
    magnitude = np.uint32(u & np.uint32(0x7FFF))
    shifted = np.uint32(magnitude << np.uint32(13))
    normal = np.uint32(shifted + np.uint32(0x38000000))
    special = np.uint32(shifted + np.uint32(0x70000000))
    small = np.float32(np.float32(np.int32(magnitude)) * np.float32(5.9604644775390625e-08)).view(np.uint32)
    r = special if magnitude >= np.uint32(0x7C00) else (normal if magnitude >= np.uint32(0x0400) else small)
    return np.uint32(r | sign).view(np.float32)

@inlined
def narrow_f16(x):
    u = np.float32(x).view(np.uint32)
    sign = np.uint32(np.uint32(u & np.uint32(0x80000000)) >> np.uint32(16))
    magnitude = np.uint32(u & np.uint32(0x7FFFFFFF))
    odd = np.uint32(np.uint32(magnitude >> np.uint32(13)) & np.uint32(1))
    normal = np.uint32(np.uint32(magnitude - np.uint32(0x37FFF001)) + odd)
    normal = np.uint32(normal >> np.uint32(13))
    small = np.float32(magnitude.view(np.float32) + np.float32(0.5)).view(np.uint32)
    small = np.uint32(small - np.uint32(0x3F000000))
    r = normal if magnitude >= np.uint32(0x38800000) else small
    r = np.uint32(0x7C00) if magnitude >= np.uint32(0x477FF000) else r
    r = np.uint32(0x7E00) if x != x else r
    return np.uint16(np.uint32(r | sign))

@inlined
def head_numel(array):
    return (64 - array.ctypes.data % 64) % 64 // array.itemsize

@inlined
def stream(target, start, block, numel, head):
    line = 64 // block.itemsize
    head = min(head, numel)
    for i in range(head):
        target[start + i] = block[i]
    i = head
    while i + line <= numel:
        store_line(target, start + i, block, i)
        i += line
    while i < numel:
        target[start + i] = block[i]
        i += 1
"""


def bits(tensor: Tensor) -> Any:
    """The numpy view a compiled loop takes: fp32 as it is, bf16 and fp16 as uint16."""
    tensor = tensor.detach()
    if tensor.dtype == torch.float32:
        return tensor.numpy()
    return tensor.view(torch.int16).numpy().view(np.uint16)


def compiled(name: str, text: str, signature: str) -> Callable[..., None]:
    """The function ``name`` of ``text``, compiled for ``signature`` with the GIL released.

    Without fast-math: nothing is contracted or reordered, which is what makes its bits those of numpy and numexpr.
    Compiling takes a second or so the first time on a machine and milliseconds after; one thread compiles at a time.
    """
    whole = f"{numba.__version__}\n{_OPTIONS}\n{signature}\n{TOOLS}\n{text}"
    unique = f"{name}_{hashlib.sha256(whole.encode()).hexdigest()[:16]}"
    namespace: dict[str, Any] = {
        "__name__": __name__,
        "np": np,
        "inlined": _njit(**_OPTIONS),
        "store_line": _intrinsic(_store_line),
        "fence": _intrinsic(_fence),
    }
    source = TOOLS + text.replace(f"def {name}(", f"def {unique}(", 1)
    with _COMPILING:
        exec(compile(source, __file__, "exec"), namespace)
        try:
            loop: Callable[..., None] = _njit(signature, cache=True, **_OPTIONS)(namespace[unique])
        except (RuntimeError, OSError) as error:  # no place to write a cache: compile for this process only
            log.info("numba cannot cache %s (%s)", name, error)
            loop = _njit(signature, **_OPTIONS)(namespace[unique])
    return loop


def _store_line(context: Any, target: Any, at: Any, block: Any, i: Any) -> Any:
    """64 bytes of ``block`` from element i to ``target`` from element ``at``, a 64-byte boundary, past the caches."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        line = ir.VectorType(ir.IntType(8), 64)
        ends = []
        for kind, array, index in ((target, values[0], values[1]), (block, values[2], values[3])):
            data = context.make_array(kind)(context, builder, array).data
            ends.append(builder.bitcast(builder.gep(data, [index]), line.as_pointer()))
        store = builder.store(builder.load(ends[1], align=1), ends[0], align=64)
        one = ir.Constant(ir.IntType(32), 1)
        store.set_metadata("nontemporal", builder.module.add_metadata([one]))
        return context.get_dummy_value()

    return types.void(target, types.intp, block, types.intp), generate


def _fence(context: Any) -> Any:
    """Streamed stores are seen by other threads before anything stored after this."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate
