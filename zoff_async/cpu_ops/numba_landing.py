"""Landing in one compiled pass over a whole bucket."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from zoff_async.cpu_ops import numba_text
from zoff_async.cpu_ops.landing import BLOCK_NUMEL, LANES, Landing, Offsets, Sums

# An index that may be negative counts from the end in Python, and the test for it does not vectorise: indices that
# are sums are made unsigned.
_Key = tuple[str, str | None, bool]

_TEXT = """
def {name}(source, {parameters}bounds, squares):
    lanes = np.empty({lanes}, np.float64)
    for k in range(squares.size):
        total = 0.0
        for start in range(bounds[k], bounds[k + 1], {block}):
            stop = min(start + {block}, bounds[k + 1])
            lanes[:] = 0.0
            whole = start + (stop - start) // {lanes} * {lanes}
            for row in range(start, whole, {lanes}):
                for j in range({lanes}):
                    {land_row}
                    lanes[j] += np.float64(x) * np.float64(x)
            for j in range(stop - whole):
                {land_rest}
                lanes[j] += np.float64(x) * np.float64(x)
            width = {lanes}
            while width > 1:
                width //= 2
                for j in range(width):
                    lanes[j] += lanes[j + width]
            total += lanes[0]
        squares[k] = total
"""


class NumbaLanding(Landing):
    """The order of ``landing`` in compiled loops, one for each combination of dtypes."""

    def __init__(self) -> None:
        self._loops: dict[_Key, Callable[..., None]] = {}

    def _land(self, source: Tensor, target: Tensor | None, bounds: Offsets, squares: Sums, add: bool) -> None:
        key = (
            numba_text.KINDS[source.dtype],
            None if target is None else numba_text.KINDS[target.dtype],
            add,
        )
        loop = self._loops.get(key)
        if loop is None:
            loop = self._loops[key] = _loop(*key)
        if target is None:
            loop(numba_text.bits(source), bounds, squares)
        else:
            loop(numba_text.bits(source), numba_text.bits(target), bounds, squares)


def _loop(source: str, target: str | None, add: bool) -> Callable[..., None]:
    name = f"land_{source}_{target}{'_add' if add else ''}"
    parameters = "" if target is None else "target, "
    arrays = [numba_text.ARRAYS[source]] + ([] if target is None else [numba_text.ARRAYS[target]])
    text = _TEXT.format(
        name=name,
        parameters=parameters,
        lanes=LANES,
        block=BLOCK_NUMEL,
        land_row=_statements(source, target, add, "np.uintp(row + j)"),
        land_rest=_statements(source, target, add, "np.uintp(whole + j)"),
    )
    return numba_text.compiled(name, text, f"void({', '.join(arrays)}, int64[::1], float64[::1])")


def _statements(source: str, target: str | None, add: bool, at: str) -> str:
    """Land one element and leave what the target then holds, as fp32, in x."""
    if target is None:
        return f"x = widen_{source}(source[{at}])"
    if add:
        return f"x = target[{at}] + widen_{source}(source[{at}]); target[{at}] = x"
    if target == source:
        return f"target[{at}] = source[{at}]; x = widen_{source}(source[{at}])"
    return f"x = widen_{source}(source[{at}]); target[{at}] = x"
