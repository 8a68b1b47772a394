"""What moves together: parameters packed into buckets, and where each of their elements lies.

A bucket's parameters are consecutive in its flat range, without padding. Membership and order depend on the
registration order alone, never on the order in which gradients happen to arrive.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from zoff_async.fingerprint import fingerprint

#: Model dtypes with a host path.
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(eq=False)
class Entry:
    """One trainable parameter: who it is and where it lies."""

    parameter: Tensor
    name: str
    index: int  # position among all parameters of the optimizer: the order of norms and messages
    group: int  # index of its param group
    bucket: Bucket = field(init=False, repr=False)
    position: int = field(init=False)  # among the bucket's entries
    start: int = field(init=False)  # first element in the bucket's flat range
    version: int = field(init=False, default=0)  # the autograd version that our own writes account for
    address: int = field(init=False, default=0)  # data_ptr when the weights were last known to be ours
    fingerprint: int | None = field(init=False, default=None)  # of the weights as they were then, if it is wanted
    wants_fingerprint: bool = False

    def __post_init__(self) -> None:
        self.numel = self.parameter.numel()
        self.shape = self.parameter.shape
        self.note_weights()

    def note_weights(self) -> None:
        """Take the parameter's present weights as known to the master."""
        self.version = self.parameter._version
        self.address = self.parameter.data_ptr()
        self.note_fingerprint()

    def note_fingerprint(self) -> None:
        """Remember what the weights look like, as far as that is wanted and they are on the CPU."""
        here = self.wants_fingerprint and self.parameter.device.type == "cpu"
        self.fingerprint = fingerprint(self.parameter) if here else None

    def weights_edited(self, *, in_flight: bool = False) -> bool:
        """Whether somebody else has written the weights: by autograd's version, the address, or the fingerprint.

        While our own write is in flight a version that is one short means nothing yet, and the bytes neither.
        """
        version = self.parameter._version
        if self.parameter.data_ptr() != self.address:
            return True
        if in_flight:
            return version > self.version
        if version != self.version:
            return True
        return self.fingerprint is not None and fingerprint(self.parameter) != self.fingerprint

    def expect_write(self) -> None:
        """Our own ``copy_`` into the parameter is under way: it counts one version."""
        self.version += 1

    def suspect(self) -> None:
        """Take the weights for edited, whatever the version says: they are compared at the next opportunity."""
        self.version = -1

    def view(self, flat: Tensor) -> Tensor:
        """This parameter's piece of a flat tensor of its bucket, in its shape."""
        return flat[self.start : self.start + self.numel].view(self.shape)


class Bucket:
    """Parameters of one dtype that are copied together. ``index`` 0 is the one backward yields first."""

    def __init__(self, index: int, entries: Sequence[Entry], chunk_numel: int) -> None:
        self.index = index
        self.entries = tuple(entries)
        self.dtype = entries[0].parameter.dtype
        self.bounds = np.zeros(len(entries) + 1, dtype=np.int64)  # (entries + 1,) first element of each entry
        for position, entry in enumerate(entries):
            entry.bucket, entry.position, entry.start = self, position, int(self.bounds[position])
            self.bounds[position + 1] = entry.start + entry.numel
        self.numel = int(self.bounds[-1])
        self.chunk_numel = chunk_numel
        self.chunks = max(1, -(-self.numel // chunk_numel))
        self.groups = np.array([entry.group for entry in entries], dtype=np.int64)

    @property
    def nbytes(self) -> int:
        """Bytes of the bucket in the parameters' dtype: what one copy moves."""
        return self.numel * self.dtype.itemsize

    def chunk(self, index: int) -> tuple[int, int]:
        """First and last-plus-one element of a chunk."""
        start = index * self.chunk_numel
        return start, min(start + self.chunk_numel, self.numel)

    def views(self, flat: Tensor) -> tuple[Tensor, ...]:
        """One piece an entry of a flat tensor, in the parameters' shapes."""
        return tuple(entry.view(flat) for entry in self.entries)


def pack(entries: Iterable[Entry], bucket_bytes: int, chunk_numel: int, *, first_index: int = 0) -> list[Bucket]:
    """Pack entries, given in registration order, into buckets in reverse order: backward yields the last layers first.

    Each dtype fills its own open bucket, so a model of bf16 weights and fp32 norms does not fall into tiny pieces. A
    bucket is closed when the next entry would take it over ``bucket_bytes``; an entry larger than that has a bucket of
    its own.
    """
    closed: list[list[Entry]] = []
    open_by_dtype: dict[torch.dtype, tuple[list[Entry], int]] = {}  # members and their bytes
    for entry in reversed(list(entries)):
        dtype = entry.parameter.dtype
        size = entry.numel * dtype.itemsize
        members, held = open_by_dtype.get(dtype, ([], 0))
        if members and held + size <= bucket_bytes:
            members.append(entry)
            open_by_dtype[dtype] = members, held + size
        else:
            closed.append([entry])
            open_by_dtype[dtype] = closed[-1], size
    return [Bucket(first_index + number, members, chunk_numel) for number, members in enumerate(closed)]
