"""Landing without numba: torch moves and widens, numpy sums, a block's worth at a time so that it stays in cache."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from zoff_async.cpu_ops.landing import BLOCK_NUMEL, LANES, Landing, Offsets, Sums

#: Blocks whose lanes are halved together: 256 take 512 KiB.
_BATCH = 256

Doubles = np.ndarray[Any, np.dtype[np.float64]]


class _Block(NamedTuple):
    """A parameter's elements from ``start`` to ``stop``, at most BLOCK_NUMEL of them."""

    parameter: int
    start: int
    stop: int


class _Scratch(threading.local):
    """One thread's squares and lanes."""

    def __init__(self) -> None:
        self.tensor = torch.empty(BLOCK_NUMEL, dtype=torch.float64)
        self.squares: Doubles = self.tensor.numpy()
        self.lanes: Doubles = np.empty((_BATCH, LANES))


class NumpyLanding(Landing):
    """The order of ``landing`` by numpy, whose sum along the slow axis adds one row after another."""

    def __init__(self) -> None:
        self._scratch = _Scratch()

    @torch.no_grad()
    def _land(self, source: Tensor, target: Tensor | None, bounds: Offsets, squares: Sums, add: bool) -> None:
        squares[:] = 0.0
        scratch = self._scratch
        for batch in _batches(bounds):
            first, last = batch[0].start, batch[-1].stop
            piece = source[first:last]
            if target is not None:
                landed = target[first:last]
                piece = landed.add_(piece) if add else landed.copy_(piece)
            values = scratch.squares[: last - first]
            scratch.tensor[: last - first].copy_(piece)
            np.multiply(values, values, out=values)
            lanes = scratch.lanes[: len(batch)]
            _fill(lanes, values, batch)
            for block, total in zip(batch, _halved(lanes).tolist(), strict=True):
                squares[block.parameter] += total


def _batches(bounds: Offsets) -> Iterator[list[_Block]]:
    """Consecutive blocks that fit into the scratch together; those that fill no row apart from those that do."""
    batch: list[_Block] = []
    for block in _blocks(bounds):
        if batch and (
            len(batch) == _BATCH or block.stop - batch[0].start > BLOCK_NUMEL or _is_small(block) != _is_small(batch[0])
        ):
            yield batch
            batch = []
        batch.append(block)
    if batch:
        yield batch


def _blocks(bounds: Offsets) -> Iterator[_Block]:
    edges = bounds.tolist()
    for parameter, end in enumerate(edges[1:]):
        for start in range(edges[parameter], end, BLOCK_NUMEL):
            yield _Block(parameter, start, min(start + BLOCK_NUMEL, end))


def _is_small(block: _Block) -> bool:
    return block.stop - block.start < LANES


def _fill(lanes: Doubles, values: Doubles, batch: list[_Block]) -> None:
    """Add each block's squares, which follow one another in ``values``, to its row of lanes."""
    if _is_small(batch[0]):
        sizes = np.array([block.stop - block.start for block in batch])
        lanes[:] = 0.0
        lanes[np.arange(LANES) < sizes[:, None]] = values
        return
    origin = batch[0].start
    for row, block in zip(lanes, batch, strict=True):
        squares = values[block.start - origin : block.stop - origin]
        whole = len(squares) - len(squares) % LANES
        np.add.reduce(squares[:whole].reshape(-1, LANES), axis=0, out=row)
        row[: len(squares) - whole] += squares[whole:]


def _halved(lanes: Doubles) -> Doubles:
    """Each row's lanes added in halves, in place."""
    width = LANES
    while width > 1:
        width //= 2
        lanes[:, :width] += lanes[:, width : 2 * width]
    return lanes[:, 0]
