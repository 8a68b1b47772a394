"""Few cases that hold every pair of values of any two dimensions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, product
from typing import Any

Case = dict[str, Any]


def pairwise(dimensions: Mapping[str, Sequence[Any]], allowed: Callable[[Case], bool]) -> list[Case]:
    """Cases, each a value a dimension, so that every allowed pair of values is in one of them. Deterministic.

    ``allowed`` is asked about partial cases too, and must be content with a missing dimension.
    """
    names = list(dimensions)
    pairs = {
        ((a, i), (b, j))
        for a, b in combinations(names, 2)
        for i, j in product(range(len(dimensions[a])), range(len(dimensions[b])))
        if allowed({a: dimensions[a][i], b: dimensions[b][j]})
    }
    left, cases = set(pairs), []
    while left:
        first = min(left, key=lambda pair: (names.index(pair[0][0]), names.index(pair[1][0]), pair[0][1], pair[1][1]))
        chosen = dict(first)
        for name in names:
            if name in chosen:
                continue
            candidates = [
                i
                for i in range(len(dimensions[name]))
                if allowed({known: dimensions[known][j] for known, j in {**chosen, name: i}.items()})
            ]
            chosen[name] = max(candidates, key=lambda i, name=name: (_gain(left, chosen, name, i), -i))
        case = {name: chosen[name] for name in names}
        left -= {(a, b) for a, b in combinations(case.items(), 2)}
        cases.append({name: dimensions[name][i] for name, i in case.items()})
    return cases


def _gain(left: set[Any], chosen: Mapping[str, int], name: str, value: int) -> int:
    return sum(((a, i), (name, value)) in left or ((name, value), (a, i)) in left for a, i in chosen.items())
