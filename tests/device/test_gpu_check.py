"""bench/gpu_check.py itself: what it says without a GPU, and that a run that is cut short keeps what it has."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "bench" / "gpu_check.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, timeout=100)


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch sees a CUDA device here")
def test_without_a_gpu_it_says_so_in_one_line() -> None:
    done = run()
    assert done.returncode == 2
    assert done.stderr == "gpu_check: torch.cuda.is_available() is False: nothing to check here\n"
    assert done.stdout == ""


def test_it_runs_from_anywhere_and_writes_a_line_a_finding(tmp_path: Path) -> None:
    """The device's own sections, on an emulated device, as the script would run them on a GPU."""
    out = tmp_path / "found.jsonl"
    done = run("--on", "cpu", "--only", "contract", "latency", "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    found = lines(out)
    assert [line["section"] for line in found] == ["machine", "contract", "latency", "latency", "summary"]
    assert found[1]["broken"] == {}
    assert found[-1] == {"section": "summary", "at_s": found[-1]["at_s"], "ok": True, "failed": []}


def test_a_section_that_would_not_fit_is_skipped_by_name(tmp_path: Path) -> None:
    out = tmp_path / "found.jsonl"
    done = run("--on", "cpu", "--budget", "14", "--only", "exactness", "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    (skipped,) = [line for line in lines(out) if line["section"] == "exactness"]
    assert str(skipped["skipped"]).startswith("needs 15 s, ")


HANGS = """
import sys, threading
sys.path.insert(0, sys.argv[1])
from pathlib import Path
import gpu_check
report = gpu_check.Report(Path(sys.argv[2]))
guard = gpu_check.Guard(report, 0.2)
report.write("first", {"ok": True})
guard.section = "second"
threading.Event().wait()
"""


def test_a_section_that_hangs_is_cut_short_and_what_was_found_is_kept(tmp_path: Path) -> None:
    out = tmp_path / "found.jsonl"
    done = subprocess.run([sys.executable, "-c", HANGS, str(SCRIPT.parent), str(out)], capture_output=True, timeout=100)
    assert done.returncode == 1
    found = lines(out)
    assert [line["section"] for line in found] == ["first", "second"]
    assert found[1]["error"] == "cut short: the budget is spent"
    assert found[1]["where"], "it says where every thread was"
