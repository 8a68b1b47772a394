"""Conversions of low precision, exhaustively, and the life of compiled code."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from tests.cpu_ops.reference import in_mode, same_bits
from zoff_async.cpu_ops import numba_text

LOW = [torch.bfloat16, torch.float16]


def convert(name: str, source: torch.Tensor, target: torch.dtype) -> torch.Tensor:
    """Every element of ``source`` through one of the conversions."""
    kinds = numba_text.KINDS[source.dtype], numba_text.KINDS[target]
    text = f"def convert(x, y):\n    for i in range(x.size):\n        y[i] = {name}(x[i])\n"
    loop = numba_text.compiled("convert", text, f"void({numba_text.ARRAYS[kinds[0]]}, {numba_text.ARRAYS[kinds[1]]})")
    result = torch.empty(source.numel(), dtype=target)
    loop(numba_text.bits(source), numba_text.bits(result))
    return result


@pytest.mark.parametrize("low", LOW)
@pytest.mark.parametrize("flush", [True, False])
def test_every_low_precision_number_is_widened_exactly(low, flush):
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(low)
    widened = in_mode(flush=flush, run=lambda: convert(f"widen_{numba_text.KINDS[low]}", every, torch.float32))

    assert same_bits(widened, every.float())


@pytest.mark.parametrize("low", LOW)
@pytest.mark.parametrize("flush", [True, False])
def test_narrowing_is_torchs_at_every_number_tie_and_neighbour(low, flush):
    """Every low-precision number, every half-way point between two, and the fp32 numbers next to both."""
    numbers = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(low).float()
    bits = numbers.view(torch.int32)
    half = {torch.bfloat16: 1 << 15, torch.float16: 1 << 12}[low]
    ties = bits + half
    spread = torch.cat([x + d for x in (bits, ties) for d in (-1, 0, 1)])
    random = torch.randint(-(2**31), 2**31 - 1, (200_000,), dtype=torch.int32)
    small = (torch.arange(1 << 12) * 2.0**-25).view(torch.int32)  # ties among fp16's subnormals
    wide = torch.cat([spread, random, small, small - 1, small + 1]).view(torch.float32)
    narrowed = in_mode(flush=flush, run=lambda: convert(f"narrow_{numba_text.KINDS[low]}", wide, low))

    assert same_bits(narrowed, wide.to(low))


def test_a_division_by_zero_is_infinite_and_raises_nothing():
    text = "def divide(x, y):\n    for i in range(x.size):\n        y[i] = x[i] / (x[i] - x[i])\n"
    x, y = np.array([1, -1, 0], np.float32), np.empty(3, np.float32)
    numba_text.compiled("divide", text, "void(float32[::1], float32[::1])")(x, y)

    assert y[0] == np.inf
    assert y[1] == -np.inf
    assert np.isnan(y[2])


@pytest.mark.parametrize("element", [np.uint16, np.float32])
@pytest.mark.parametrize("begin", [0, 1, 5, 31])
@pytest.mark.parametrize("numel", [1, 31, 32, 33, 64, 100])
def test_a_streamed_block_arrives_whole_and_nothing_else_is_written(element, begin, numel):
    kind = {np.uint16: "uint16", np.float32: "float32"}[element]
    text = "def move(target, block):\n    stream(target, 0, block, block.size, head_numel(target))\n    fence()\n"
    loop = numba_text.compiled("move", text, f"void({kind}[::1], {kind}[::1])")
    whole = np.zeros(256, element)
    block = np.arange(1, numel + 1).astype(element)
    loop(whole[begin : begin + numel], block)

    assert whole[begin : begin + numel].tolist() == block.tolist()
    assert not whole[:begin].any()
    assert not whole[begin + numel :].any()


def test_without_a_place_for_a_cache_it_compiles_for_this_process(monkeypatch, caplog):
    real = numba_text._njit

    def no_cache(*arguments, **options):
        if options.get("cache"):
            raise RuntimeError("cannot cache function: no locator available")
        return real(*arguments, **options)

    monkeypatch.setattr(numba_text, "_njit", no_cache)
    caplog.set_level("INFO", logger=numba_text.__name__)
    one = np.ones(1, np.float32)
    numba_text.compiled("double", "def double(x):\n    x[0] = x[0] + x[0]\n", "void(float32[::1])")(one)

    assert one[0] == 2
    assert "cannot cache double" in caplog.text


def test_the_name_in_the_cache_follows_the_text():
    """Else a cached binary could belong to another text."""
    names = [
        re.search(r"\w+$", numba_text.compiled("f", f"def f(x):\n    x[0] = {value}\n", "void(int64[::1])").__name__)
        for value in (1, 2, 1)
    ]
    first, second, again = (match.group() for match in names)

    assert first == again
    assert first != second
    assert first.startswith("f_")
