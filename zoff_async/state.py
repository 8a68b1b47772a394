"""Masters and moments: the fp32 truth on the host, and the gradients that wait beside it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from zoff_async.bucket import Bucket, Entry
from zoff_async.cpu_ops import UpdateRule


class Segment(NamedTuple):
    """Consecutive elements of a bucket that one set of scalars updates: one group, one step count, one factor."""

    start: int
    stop: int
    group: int
    step: int  # the count this update has: 1 for a parameter's first
    factor: float  # unscale x clip, in fp64


class BucketState:
    """One bucket's host state. Elements are laid out as in the bucket's flat range.

    ``master`` and ``moments`` are written by Adam alone; ``counts`` by the loop's thread when an update is settled;
    the gradient store by ``acc``. ``present``, ``zeroed`` and ``factor`` belong to the callers' threads, in the order
    of their calls.
    """

    def __init__(self, bucket: Bucket, rule: UpdateRule) -> None:
        self.bucket = bucket
        entries = len(bucket.entries)
        self.master = torch.empty(bucket.numel, dtype=torch.float32)
        self.moments = tuple(torch.zeros(bucket.numel, dtype=torch.float32) for _ in rule.state_names)
        self.counts = np.zeros(entries, dtype=np.int64)  # (entries,) updates applied
        self.squares = np.zeros(entries, dtype=np.float64)  # (entries,) of the stored gradients, unscaled
        self.gradients: Tensor | None = None  # (numel,) in the parameters' dtype or fp32
        self.present = np.zeros(entries, dtype=np.bool_)  # a gradient belongs to the coming step
        self.zeroed = np.zeros(entries, dtype=np.bool_)  # ... and is zero by zero_grad(set_to_none=False)
        self.factor = np.ones(entries, dtype=np.float64)  # ... and is to be multiplied by this
        with torch.no_grad():
            for entry in bucket.entries:
                entry.view(self.master).copy_(entry.parameter)

    def ready_store(self, dtype: torch.dtype) -> Tensor:
        """The gradient store in at least ``dtype``; what it holds is widened, never narrowed."""
        if self.gradients is None:
            self.gradients = torch.zeros(self.bucket.numel, dtype=dtype)
        elif self.gradients.dtype != dtype and self.gradients.dtype != torch.float32:
            self.gradients = self.gradients.to(torch.float32)
        return self.gradients

    def set_zeros(self) -> None:
        """Fill with zeros what ``zero_grad(set_to_none=False)`` has only noted."""
        for position in np.flatnonzero(self.zeroed & self.present):
            entry = self.bucket.entries[position]
            entry.view(self.ready_store(self.bucket.dtype)).zero_()
            self.squares[position] = 0.0
        self.zeroed[:] = False

    def segments(self, present: np.ndarray, factor: np.ndarray) -> Iterator[Segment]:
        """Cut the bucket where group, step count, factor or presence change; without the absent pieces."""
        bucket = self.bucket
        changes = (
            (np.diff(bucket.groups) != 0)
            | (np.diff(self.counts) != 0)
            | (np.diff(present) != 0)
            | (factor[1:] != factor[:-1])
        )
        cuts = [0, *(np.flatnonzero(changes) + 1).tolist(), len(bucket.entries)]
        for first, last in pairwise(cuts):
            start, stop = int(bucket.bounds[first]), int(bucket.bounds[last])
            if present[first] and stop > start:
                yield Segment(start, stop, int(bucket.groups[first]), int(self.counts[first]) + 1, float(factor[first]))

    def take_over(self, entry: Entry, old: BucketState, position: int, start: int) -> None:
        """Move one parameter's state here from the bucket it was in, where it was at ``position`` and ``start``."""
        here, there = entry.position, slice(start, start + entry.numel)
        piece = slice(entry.start, entry.start + entry.numel)
        self.master[piece] = old.master[there]
        for moment, old_moment in zip(self.moments, old.moments, strict=True):
            moment[piece] = old_moment[there]
        for name in ("counts", "squares", "present", "zeroed", "factor"):
            getattr(self, name)[here] = getattr(old, name)[position]
        if old.gradients is not None:
            same = old.gradients.dtype == self.bucket.dtype
            self.ready_store(self.bucket.dtype if same else torch.float32)[piece] = old.gradients[there]

    def take_saved(self, entry: Entry, names: Sequence[str], values: Mapping[str, Any] | None) -> None:
        """Copy one parameter's saved state in; None: it has never been updated. Without a master the weights are it."""
        saved = {} if values is None else values
        self.counts[entry.position] = int(saved.get("step", 0))
        with torch.no_grad():
            for name, moment in zip(names, self.moments, strict=True):
                if name in saved:
                    entry.view(moment).copy_(saved[name])
                else:
                    entry.view(moment).zero_()
            entry.view(self.master).copy_(saved.get("master", entry.parameter))
        entry.suspect()

    def adopt_weights(self, entry: Entry, known_dtype: torch.dtype) -> int:
        """Take into the master the elements of a parameter that differ from what the master last sent; say how many.

        The other elements keep their fp32 digits. ``known_dtype`` is the dtype in which the weights were last sent.
        """
        weights = entry.parameter.detach().to("cpu")
        master = entry.view(self.master)
        sent = master.to(known_dtype)
        expected = sent.to(weights.dtype)  # a cast of the sent weights is not an edit
        same = (weights == expected) | (weights.isnan() & expected.isnan())
        master.copy_(torch.where(same, master, weights.to(torch.float32)))
        entry.note_weights()
        return int(same.numel() - int(same.sum()))

    @property
    def nbytes(self) -> dict[str, int]:
        """Host bytes held, by purpose."""
        return {
            "master": self.master.nbytes,
            "moments": sum(moment.nbytes for moment in self.moments),
            "gradients": 0 if self.gradients is None else self.gradients.nbytes,
        }
