"""What the kernels are compared with: the rule's lines run by numpy, and numbers that are hard to get right."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from zoff_async.cpu_ops import Kernel, Scalars, UpdateRule

T = TypeVar("T")

HYPER: dict[str, Any] = {"step": 3, "lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}


def scalars_of(rule: UpdateRule, program: str) -> Scalars:
    """Scalars for which ``rule`` runs ``program``."""
    betas = (0.4, 0.9) if program.endswith("_short") else HYPER["betas"]
    return rule.scalars(**{**HYPER, "betas": betas, "weight_decay": 0.0 if program.startswith("plain") else 0.1})


def numpy_update(
    rule: UpdateRule, scalars: Scalars, master: Tensor, state: Sequence[Tensor], grad: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """The new (master, state) by numpy in fp32: every line of the program, none of them shortened."""
    program = rule.programs[scalars.program]
    names = dict(zip(program.scalars, scalars.values, strict=True))
    names.update(zip(rule.states, (t.numpy().copy() for t in state), strict=True))
    names.update(p=master.numpy().copy(), g=grad.float().numpy())
    with np.errstate(all="ignore"):
        for line in program.lines:
            values = {name: np.float64(value) for name, value in names.items()} if line.double else names
            found = eval(line.expression, {"sqrt": np.sqrt, "sign": np.sign}, values)
            names[line.target] = found.astype(np.float32) if line.double else found
    assert all(value.dtype == np.float32 for value in names.values())
    return torch.from_numpy(names["p"]), [torch.from_numpy(names[name]) for name in rule.states]


def in_mode(*, flush: bool, run: Callable[[], T]) -> T:
    """``run()`` in a thread of its own that flushes subnormals to zero, or does not."""
    results: list[T] = []
    errors: list[BaseException] = []

    def body() -> None:
        torch.set_flush_denormal(flush)
        try:
            results.append(run())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def hard_numbers(numel: int, dtype: torch.dtype = torch.float32, *, seed: int = 0, signed: bool = True) -> Tensor:
    """Ordinary numbers, and among them NaN, inf, zeros of both signs, subnormals, the largest and the smallest."""
    generator = torch.Generator().manual_seed(seed)
    limits = torch.finfo(dtype)
    special = [0.0, -0.0, float("nan"), float("inf"), -float("inf"), limits.max, limits.min, limits.tiny, -limits.tiny]
    special += [limits.tiny / 4, -limits.tiny / 8, limits.tiny * limits.eps, 1.0, 3.0, 1e-4]
    values = torch.randn(numel, generator=generator) * 10.0 ** torch.randint(-4, 3, (numel,), generator=generator)
    chosen = torch.randint(0, len(special), (numel,), generator=generator)
    where = torch.rand(numel, generator=generator) < 0.3
    values = torch.where(where, torch.tensor(special)[chosen], values)
    return (values if signed else values.abs()).to(dtype)


def same_bits(found: Tensor, expected: Tensor) -> bool:
    """Equal bit for bit, -0 apart from 0; any NaN equals any NaN (their payloads carry no meaning)."""
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    kind = {4: torch.int32, 2: torch.int16}[found.element_size()]
    equal = (found.view(kind) == expected.view(kind)) | (found.isnan() & expected.isnan())
    return bool(equal.all())


def check_kernel(
    kernel: Kernel,
    scalars: Scalars,
    numel: int,
    *,
    grad: torch.dtype = torch.bfloat16,
    out: torch.dtype | None = torch.bfloat16,
    in_place: bool = True,
    flush: bool = True,
    offset: int = 0,
) -> None:
    """One update of ``numel`` hard numbers, starting ``offset`` elements into larger buffers, is numpy's."""

    def cut(whole: Tensor) -> Tensor:
        return whole[offset : offset + numel]

    size = offset + numel + 7  # what lies around a chunk belongs to others
    whole_master = hard_numbers(size, seed=1)
    whole_state = [hard_numbers(size, seed=2 + i, signed=i == 0) for i in range(len(kernel.rule.state_names))]
    whole_out = None if out is None else torch.full((size,), 7.0, dtype=out)
    master, state = cut(whole_master), [cut(t) for t in whole_state]
    gradient = cut(hard_numbers(size, grad, seed=9))
    before = [t.clone() for t in (whole_master, *whole_state)]
    second = None if in_place else [torch.full((size,), 7.0)[offset : offset + numel] for _ in before]

    expected_master, expected_state = in_mode(
        flush=flush, run=lambda: numpy_update(kernel.rule, scalars, master, state, gradient)
    )
    update = kernel.bind(
        master,
        state,
        gradient,
        None if whole_out is None else cut(whole_out),
        master_out=None if second is None else second[0],
        state_out=None if second is None else second[1:],
    )
    in_mode(flush=flush, run=lambda: update.run(scalars))

    found = [master, *state] if second is None else second
    for name, tensor, expected in zip(
        ("master", *kernel.rule.state_names), found, [expected_master, *expected_state], strict=True
    ):
        assert same_bits(tensor, expected), name
    if whole_out is not None:
        assert same_bits(cut(whole_out), found[0].to(whole_out.dtype)), "out"
        assert (whole_out[:offset] == 7).all()
        assert (whole_out[offset + numel :] == 7).all()
    for tensor, old in zip((whole_master, *whole_state), before, strict=True):
        untouched = torch.ones(size, dtype=torch.bool)
        if in_place:
            untouched[offset : offset + numel] = False
        assert same_bits(tensor[untouched], old[untouched])
