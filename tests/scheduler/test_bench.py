"""The scheduler's benches still run, and print what they say they print."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from zoff_async.scheduler import POLICIES

BENCH = Path(__file__).parents[2] / "bench"


def load(name):
    spec = importlib.util.spec_from_file_location(f"bench_{name}", BENCH / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_the_executor_is_measured_against_a_bare_pool(loop):
    if loop == "uvloop":
        pytest.importorskip("uvloop")
    lines = load("scheduler").measure(loop, 100, repeats=1, workers=2)

    assert [(line["loop"], line["case"], line["actions"]) for line in lines] == [
        (loop, "bare", 100),
        (loop, "pool", 100),
        (loop, "pure", 100),
    ]
    assert all(line["us_per_action"] > 0 for line in lines)


def test_policies_are_measured_at_every_balance():
    module = load("policies")
    lines = list(module.measure(buckets=3, chunks=2, slots=2, steps=4))

    assert {line["policy"].split(",")[0] for line in lines} == set(POLICIES)
    assert {line["balance"] for line in lines} == set(module.BALANCES)
    assert all(line["ideal_over_bound"] >= 1 for line in lines)
    assert module.table(lines).count("\n") == 1 + len(module.BALANCES)


@pytest.mark.parametrize("name", ["scheduler", "policies"])
def test_a_bench_prints_one_json_line_a_case(name, monkeypatch, capsys):
    small = {"scheduler": ["--actions", "36", "--loops", "asyncio", "--repeats", "1"], "policies": ["--buckets", "2"]}
    monkeypatch.setattr(sys, "argv", [name, "--json", *small[name]])
    load(name).main()

    printed = capsys.readouterr().out.splitlines()
    assert printed
    assert all(line.startswith(f'{{"bench": "{name}"') for line in printed)
