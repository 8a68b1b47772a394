"""The fast kernel: one compiled pass over a chunk, from the gradient as it arrived to the weights as they leave.

The loop's body is the rule's own lines, so its bits are numexpr's and numpy's. It reads 14 bytes an element (bf16
gradient, master, moments) and writes 14, and is limited by memory, not by arithmetic.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import ClassVar, NamedTuple

from zoff_async.cpu_ops.kernel import Buffers, Kernel
from zoff_async.cpu_ops.numba_text import ARRAYS, ELEMENTS, KINDS, bits, compiled
from zoff_async.cpu_ops.rule import FUNCTIONS, GRADIENT, MASTER, Line, Program, Scalars, UpdateRule, names_in

#: Elements computed into L1 before they are streamed out; whole cache lines for every dtype.
_BLOCK_NUMEL = 512


class Shape(NamedTuple):
    """What a compiled loop is made for, besides the program."""

    grad: str  # f32, bf16 or f16
    out: str | None
    in_place: bool


class NumbaKernel(Kernel):
    """``rule.programs`` in numba; compiled at the first bind of each combination of dtypes."""

    name: ClassVar[str] = "numba"
    order: ClassVar[str] = "rule"

    def __init__(self, rule: UpdateRule) -> None:
        super().__init__(rule)
        self._loops: dict[tuple[str, Shape], Callable[..., None]] = {}

    def _bind(self, buffers: Buffers) -> _NumbaUpdate:
        out = None if buffers.out is None else KINDS[buffers.out.dtype]
        shape = Shape(KINDS[buffers.grad.dtype], out, buffers.in_place)
        for key, program in self.rule.programs.items():
            if (key, shape) not in self._loops:
                name = f"{self.rule.name}_{key}_{shape.grad}_{shape.out}_{'in_place' if shape.in_place else 'second'}"
                text, signature = loop_text(name, program, tuple(self.rule.states), shape)
                self._loops[key, shape] = compiled(name, text, signature)
        return _NumbaUpdate({key: self._loops[key, shape] for key in self.rule.programs}, buffers)


class _NumbaUpdate:
    def __init__(self, loops: dict[str, Callable[..., None]], buffers: Buffers) -> None:
        tensors = [buffers.grad, buffers.master, *buffers.state]
        if not buffers.in_place:
            tensors += [buffers.master_out, *buffers.state_out]
        if buffers.out is not None:
            tensors.append(buffers.out)
        arrays = [bits(tensor) for tensor in tensors]
        self._loops = {key: functools.partial(loop, *arrays) for key, loop in loops.items()}

    def run(self, scalars: Scalars) -> None:
        self._loops[scalars.program](*scalars.values)


def loop_text(name: str, program: Program, states: tuple[str, ...], shape: Shape) -> tuple[str, str]:
    """(source, numba signature) of one pass.

    Arrays are called like the name in the program, with ``_in`` or ``_out``; the weights that leave are ``w``. What is
    read and written stays in its array; what is only written goes through a block and is streamed.
    """
    carried = (MASTER, *states)
    read = {GRADIENT: shape.grad, **dict.fromkeys(carried, "f32")}
    streamed = {} if shape.in_place else dict.fromkeys(carried, "f32")
    if shape.out is not None:
        streamed["w"] = shape.out
    arrays = [f"{x}_in" for x in read] + [f"{x}_out" for x in streamed]

    before = [f"{x}_block = np.empty({_BLOCK_NUMEL}, {ELEMENTS[kind]})" for x, kind in streamed.items()]
    before += [f"{x}_head = head_numel({x}_out)" for x in streamed]
    body = [f"{x} = widen_{kind}({x}_old[i])" for x, kind in read.items()]
    body += [f"{line.target} = {_in_numpy(line)}" for line in program.lines]
    body += [f"{x}_old[i] = {x}" for x in carried if shape.in_place]
    body += [f"{x}_block[i] = narrow_{kind}({x if x != 'w' else MASTER})" for x, kind in streamed.items()]
    text = [
        f"def {name}({', '.join([*arrays, *program.scalars])}):",
        *(f"    {x}" for x in before),
        f"    for start in range(0, {MASTER}_in.size, {_BLOCK_NUMEL}):",
        f"        numel = min({_BLOCK_NUMEL}, {MASTER}_in.size - start)",
        *(f"        {x}_old = {x}_in[start : start + numel]" for x in read),
        "        for i in range(numel):",
        *(f"            {x}" for x in body),
        *(f"        stream({x}_out, start, {x}_block, numel, {x}_head)" for x in streamed),
        *["    fence()" for _ in streamed][:1],
    ]
    kinds = [ARRAYS[kind] for kind in (*read.values(), *streamed.values())]
    return "\n".join(text) + "\n", f"void({', '.join([*kinds, *('float32' for _ in program.scalars)])})"


def _in_numpy(line: Line) -> str:
    """The line's expression as numba reads it."""
    expression = line.expression
    if line.double:
        for name in names_in(expression):
            expression = re.sub(rf"\b{name}\b", f"np.float64({name})", expression)
        expression = f"np.float32({expression})"
    for function in FUNCTIONS:
        expression = expression.replace(f"{function}(", f"np.{function}(")
    return expression
