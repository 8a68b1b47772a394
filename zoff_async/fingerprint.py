"""A number that tells whether weights have been edited where autograd's version does not: through ``.data``.

The weights' bytes, as 64-bit words, are multiplied by odd numbers that depend on the position, and summed modulo 2**64.
One changed word always changes the sum; several that cancel are as likely as 2**-64. One pass over the weights.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

_BLOCK = 1 << 16  # words a multiplier table covers: half a megabyte, which stays in L2
_INTEGERS = {2: torch.int16, 4: torch.int32}

Words = np.ndarray[Any, np.dtype[np.uint64]]


@cache
def _multipliers() -> Words:
    """Odd, and without a pattern that real weights share."""
    random = np.random.default_rng(0x5A0FF)
    return random.integers(0, 1 << 63, size=_BLOCK, dtype=np.uint64) * np.uint64(2) + np.uint64(1)


def fingerprint(weights: Tensor) -> int:
    """The fingerprint of fp32, bf16 or fp16 weights on the CPU, of any shape and strides."""
    flat = weights.detach().reshape(-1)
    octets = flat.view(_INTEGERS[flat.element_size()]).numpy().view(np.uint8)
    whole = len(octets) // 8 * 8
    words = octets[:whole].view(np.uint64)
    rest = np.zeros(8, dtype=np.uint8)
    rest[: len(octets) - whole] = octets[whole:]
    table = _multipliers()
    total = int(rest.view(np.uint64)[0]) * int(table[len(words) % _BLOCK])
    for number, start in enumerate(range(0, len(words), _BLOCK)):
        block = words[start : start + _BLOCK]
        total += int(np.dot(block, table[: len(block)])) * (2 * number + 1)
    return total % (1 << 64)
