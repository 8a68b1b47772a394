"""What an update is: its arithmetic as text, its state, and the scalars of one step.

A rule says nothing about how it is run. Its arithmetic is a ``Program``: lines ``target = expression`` over one
element, every value fp32, every operation rounded, in the order written. Each kernel runs these very lines
(numexpr evaluates the text, numba compiles it), which is why kernels of one order agree bit for bit and why another
rule is one small file: see ``adam.py``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

#: Names a line may use besides the rule's states and scalars: the master weight and the gradient widened to fp32.
MASTER, GRADIENT = "p", "g"
#: Functions a line may call; every kernel rounds them as numpy does.
FUNCTIONS = frozenset({"sign", "sqrt"})
_NAME = re.compile(r"[A-Za-z_]\w*")
_NUMBER = re.compile(r"(?<![\w.])(\d+\.?\d*|\.\d+)")


def names_in(expression: str) -> tuple[str, ...]:
    """Arrays and scalars that ``expression`` reads, sorted."""
    return tuple(sorted(set(_NAME.findall(expression)) - FUNCTIONS))


class Line(NamedTuple):
    """``target = expression`` for every element.

    Where the scalar named ``unit`` is exactly one this step, a kernel may run ``shorter`` instead (None: skip the
    line). ``x*1`` is ``x`` in fp32, so that saves an operation and changes no bit.

    With ``double`` the whole expression is evaluated in fp64, which holds any product of two fp32 numbers, and is
    rounded once, to fp32: for sums that may cancel, and for ``sign``, which numexpr has in fp64 only.
    """

    target: str
    expression: str
    unit: str | None = None
    shorter: str | None = None
    double: bool = False


class Program(NamedTuple):
    """Lines in order, and the names of the fp32 scalars they take, in the order ``Scalars.values`` has them."""

    lines: tuple[Line, ...]
    scalars: tuple[str, ...]


class Hyper(NamedTuple):
    """The hyperparameters a set of scalars was formed from, for kernels with an order of their own."""

    step: int
    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    factor: float


class Scalars(NamedTuple):
    """Everything about one step that the arithmetic needs; hashable, cheap to compare."""

    program: str  # key into UpdateRule.programs
    values: tuple[np.float32, ...]  # formed in fp64, rounded once
    hyper: Hyper


@dataclass(frozen=True)
class UpdateRule:
    """A named update: programs over master, gradient and states, and the function that forms a step's scalars.

    Args:
        name: How errors and benchmarks call it.
        states: Short name in the program -> public name of the state, in the order kernels take the buffers.
        programs: The arithmetic, by name. Most rules have one; a second is for a difference that a scalar cannot
            express bit for bit (an L2 term of weight 0 is not the same as none where a weight is inf).
        form: The scalars of a step from its hyperparameters; a rule ignores those it does not have.
        fused: The name of torch's fused CPU operator that does the same update in its own order, if there is one.
    """

    name: str
    states: Mapping[str, str] = field(hash=False)
    programs: Mapping[str, Program] = field(hash=False)
    form: Callable[[Hyper], Scalars]
    fused: str | None = None

    def __post_init__(self) -> None:
        for key, program in self.programs.items():
            _check_program(f"{self.name}.{key}", program, set(self.states))

    @property
    def state_names(self) -> tuple[str, ...]:
        """Public names of the state buffers, in the order ``Kernel.bind`` takes them."""
        return tuple(self.states.values())

    def scalars(
        self,
        *,
        step: int,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        factor: float = 1.0,
    ) -> Scalars:
        """The fp32 scalars of one step, formed in fp64 and rounded once.

        Args:
            step: 1 for the first update.
            lr, betas, eps, weight_decay: as ``torch.optim`` has them.
            factor: Multiplies the gradient before anything else: unscaling times clipping.

        Raises:
            ValueError: if ``step`` is below 1.
        """
        if step < 1:
            raise ValueError(f"step counts from 1 for the first update, got step={step}")
        beta1, beta2 = betas
        hyper = (int(step), float(lr), (float(beta1), float(beta2)), float(eps), float(weight_decay), float(factor))
        return self.form(Hyper(*hyper))


def _check_program(where: str, program: Program, states: set[str]) -> None:
    """A literal would turn a whole numexpr expression into fp64, and a typo would read the caller's frame."""
    allowed = states | {MASTER, GRADIENT, *program.scalars}
    for line in program.lines:
        if line.target not in states | {MASTER, GRADIENT}:
            raise ValueError(f"{where} assigns {line.target!r}: a line assigns p, g or one of {sorted(states)}")
        for text in filter(None, (line.expression, line.shorter)):
            unknown = set(names_in(text)) - allowed
            if unknown or _NUMBER.search(text):
                raise ValueError(
                    f"{where} has {text!r}: it may use {', '.join(sorted(allowed | FUNCTIONS))} and no numbers; "
                    f"pass a number as a scalar (unknown: {sorted(unknown)})"
                )
        if line.unit is not None and line.unit not in program.scalars:
            raise ValueError(f"{where} shortens on {line.unit!r}, which is none of its scalars {program.scalars}")
