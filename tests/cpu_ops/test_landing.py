"""Gradients arrive whole, and their squares are summed in an order that only positions decide."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.cpu_ops.reference import in_mode, same_bits
from zoff_async.cpu_ops import BLOCK_NUMEL, make_landing

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
WAYS = [
    (s, t, a) for s in DTYPES for t, a in ((None, False), (s, False), (torch.float32, False), (torch.float32, True))
]
NAMES = ["numba", "numexpr"]  # compiled, and by numpy
SIZES = [1, 3, 255, 256, 257, 511, 512, 513, 5000, BLOCK_NUMEL - 1, BLOCK_NUMEL, BLOCK_NUMEL + 1, 2 * BLOCK_NUMEL + 300]


ARGUMENTS = {
    "source": torch.zeros(4).bfloat16(),
    "target": torch.zeros(4),
    "bounds": np.array([0, 4]),
    "squares": np.empty(1),
    "add": False,
}


def bounds_of(sizes: list[int], first: int = 0) -> np.ndarray:
    return np.concatenate([[first], first + np.cumsum(sizes)]).astype(np.int64)


def sum_by_the_rule(values: Tensor) -> float:
    """The order as ``landing`` words it, in scalars."""
    total = np.float64(0)
    for start in range(0, values.numel(), BLOCK_NUMEL):
        block = values[start : start + BLOCK_NUMEL].double().numpy()
        lanes = np.zeros(256)
        for row in range(0, len(block), 256):
            piece = block[row : row + 256]
            lanes[: len(piece)] += piece * piece
        width = 128
        while width:
            for j in range(width):
                lanes[j] += lanes[j + width]
            width //= 2
        total += lanes[0]
    return float(total)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("source", "target", "add"), WAYS)
def test_every_way_of_landing_moves_the_values_and_sums_their_squares(name, source, target, add):
    """In one call for many parameters; nothing outside the bounds is touched."""
    bounds = bounds_of(SIZES, first=5)
    numel = int(bounds[-1]) + 9
    gradient = torch.randn(numel).to(source)
    held = None if target is None else torch.randn(numel).to(target)
    before = None if held is None else held.clone()
    squares = np.full(len(SIZES), np.nan)
    make_landing(name).land(gradient, held, bounds, squares, add=add)

    values = gradient
    if held is not None and before is not None:
        expected = before.clone()
        inside = slice(int(bounds[0]), int(bounds[-1]))
        expected[inside] = before[inside] + gradient[inside].float() if add else gradient[inside].to(target)
        assert same_bits(held, expected)
        values = held
    for i, (start, stop) in enumerate(itertools.pairwise(bounds)):
        assert squares[i] == sum_by_the_rule(values[start:stop]), SIZES[i]
        np.testing.assert_allclose(squares[i], values[start:stop].double().square().sum().item(), rtol=1e-13)


@pytest.mark.parametrize("name", NAMES)
def test_the_sum_does_not_depend_on_what_else_is_landed_or_where(name):
    """Alone, among others, from another offset, or block by block: one number."""
    landing = make_landing(name)
    numel = 2 * BLOCK_NUMEL + 777
    parameter = torch.randn(numel).bfloat16()
    alone, among, pieces = np.empty(1), np.empty(3), np.empty(3)
    landing.squares(parameter, bounds_of([numel]), alone)
    landing.squares(
        torch.cat([torch.ones(3).bfloat16(), parameter, torch.ones(77).bfloat16()]), bounds_of([3, numel, 77]), among
    )
    landing.squares(parameter, np.array([0, BLOCK_NUMEL, 2 * BLOCK_NUMEL, numel], dtype=np.int64), pieces)

    assert among[1] == alone[0]
    assert pieces[0] + pieces[1] + pieces[2] == alone[0]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("numel", [1, 200, 3000, BLOCK_NUMEL + 5])
def test_one_bad_element_makes_its_parameter_and_no_other_not_finite(name, bad, numel):
    gradient = torch.ones(3 * numel)
    gradient[2 * numel - 1] = bad
    squares = np.empty(3)
    make_landing(name).squares(gradient, bounds_of([numel] * 3), squares)

    assert np.isfinite(squares).tolist() == [True, False, True]


@pytest.mark.parametrize("name", NAMES)
def test_the_largest_finite_numbers_have_finite_squares(name):
    squares = np.empty(1)
    numel = BLOCK_NUMEL + 1
    make_landing(name).squares(torch.full((numel,), torch.finfo(torch.float32).max), bounds_of([numel]), squares)

    assert np.isfinite(squares[0])


@pytest.mark.parametrize("name", NAMES)
def test_an_overflow_while_adding_is_seen(name):
    held = torch.full((4,), 3e38)
    squares = np.empty(1)
    make_landing(name).land(torch.full((4,), 3e38), held, bounds_of([4]), squares, add=True)

    assert held.isinf().all()
    assert not np.isfinite(squares[0])


@pytest.mark.parametrize("flush", [True, False])
def test_subnormals_are_treated_alike_by_both(flush):
    """As the pool's threads treat them, or as a plain thread does."""
    gradient = torch.randn(3000) * 1e-38
    found = []
    for name in NAMES:
        held, squares = torch.randn(3000) * 1e-38, np.empty(2)
        held[::2] = -gradient[::2] * (1 + 2**-20)
        in_mode(
            flush=flush,
            run=lambda name=name, held=held, squares=squares: make_landing(name).land(
                gradient, held, bounds_of([100, 2900]), squares, add=True
            ),
        )
        found.append((held, squares))
        torch.manual_seed(0)
        torch.randn(3000)

    assert same_bits(found[0][0], found[1][0])
    assert found[0][1].tolist() == found[1][1].tolist()


@pytest.mark.parametrize("name", NAMES)
def test_empty_parameters_and_no_parameters_are_nothing_special(name):
    squares = np.full(3, np.nan)
    make_landing(name).squares(torch.full((4,), 2.0), bounds_of([0, 4, 0]), squares)
    make_landing(name).squares(torch.zeros(0), np.zeros(1, np.int64), np.empty(0))

    assert squares.tolist() == [0.0, 16.0, 0.0]


def test_a_thousand_small_parameters_are_one_call():
    gradient = torch.randn(64_000)
    sums = [np.empty(1000) for _ in NAMES]
    for name, squares in zip(NAMES, sums, strict=True):
        make_landing(name).squares(gradient, bounds_of([64] * 1000), squares)

    assert sums[0].tolist() == sums[1].tolist()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target": None, "add": True}, "add=True needs a target to add to"),
        ({"target": torch.zeros(5)}, "source and target must have one length, got 4 and 5"),
        ({"bounds": np.array([0, 4, 5])}, "bounds must have one more entry than squares, got 3 and 1"),
        ({"bounds": np.array([0, 5])}, "bounds must ascend within 0..4, got [0, 5]"),
        ({"bounds": np.array([3, 2])}, "bounds must ascend within 0..4, got [3, 2]"),
        (
            {"source": torch.zeros(2, 2).bfloat16()},
            "source must be a flat contiguous tensor on the cpu, got shape (2, 2)",
        ),
    ],
)
def test_what_does_not_fit_together_is_refused_by_name(change, message):
    with pytest.raises(ValueError) as caught:
        make_landing("numba").land(**{**ARGUMENTS, **change})

    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"source": torch.zeros(4).double()},
            "source must be one of torch.float32, torch.bfloat16, torch.float16, got torch.float64",
        ),
        (
            {"target": torch.zeros(4).bfloat16(), "add": True},
            "target must be torch.float32 for a source of torch.bfloat16 with add=True, got torch.bfloat16",
        ),
        (
            {"target": torch.zeros(4).half()},
            "target must be torch.float32 or torch.bfloat16 for a source of torch.bfloat16 with add=False, "
            "got torch.float16",
        ),
        (
            {"bounds": np.array([0, 4], np.int32)},
            "bounds must be int64 and squares float64, got int32 and float64",
        ),
    ],
)
def test_dtypes_that_do_not_land_are_refused_by_name(change, message):
    with pytest.raises(TypeError) as caught:
        make_landing("numba").land(**{**ARGUMENTS, **change})

    assert str(caught.value) == message


@pytest.mark.parametrize("name", NAMES)
def test_preparing_compiles_without_touching_anything(name):
    landing = make_landing(name)
    for source, target, add in WAYS:
        landing.prepare(source, target, add=add)

    if name == "numba":
        assert len(landing._loops) == len(set(WAYS))
