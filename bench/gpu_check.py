"""Does everything that needs a GPU hold on this one, and how fast is it?

    python bench/gpu_check.py --out gpu_check.jsonl

Needs one GPU, torch, numpy, numba or numexpr, and the package in the working tree; takes at most --budget seconds
(default 300). Writes one JSON line a finding to --out and to the terminal as it goes, so a run that is cut short
keeps what it has. Exit status: 0 when every section held, 1 when one did not, 2 when there is no GPU.

    contract     what every device promises the runtime, on this device; again with memory that cannot be pinned
    transfers    large copies with little compute, 200 repeats: sources freed at once, slots and weights reused at once
    latency      from the end of a copy to its news on the host; what a sleeping waiter burns
    bandwidth    both ways, alone, together, beside a matrix product; thousands of tiny tensors
    exactness    every exact policy equals serial bit for bit; delayed equals the hand-written delayed loop
    races        training with large weights and tiny compute, 200 steps, equal to serial
    memory       peak device bytes against the promise; reserved memory flat over the steps
    demo         the demo GPT at a size that fills a good part of the GPU, with its timeline

``--on cpu`` runs the same script on an emulated device, small, to try the script itself.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]  # works from any directory, without installing anything

import torch  # noqa: E402

Finding = dict[str, object]


class Report:
    """Findings as JSON lines, each on disk before the next section starts."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", encoding="utf-8")
        self._start_s = time.perf_counter()
        self._lock = threading.Lock()
        self.failed: list[str] = []

    @property
    def elapsed_s(self) -> float:
        return time.perf_counter() - self._start_s

    def write(self, section: str, finding: Finding) -> None:
        line = json.dumps({"section": section, "at_s": round(self.elapsed_s, 2), **finding})
        with self._lock:
            if finding.get("ok") is False:
                self.failed.append(section)
            self._file.write(line + "\n")
            self._file.flush()
            os.fsync(self._file.fileno())
            print(line if len(line) < 600 else line[:597] + "...", flush=True)


class Guard:
    """Ends the process when the budget is spent, whatever hangs: what was found is on disk."""

    def __init__(self, report: Report, budget_s: float) -> None:
        self.section = "start"
        self._report = report
        self._timer = threading.Timer(budget_s, self._end)
        self._timer.daemon = True
        self._timer.start()

    def _end(self) -> None:
        frames = sys._current_frames()
        where = [traceback.format_stack(frames[thread.ident])[-1] for thread in threading.enumerate() if thread.ident]
        self._report.write(self.section, {"ok": False, "error": "cut short: the budget is spent", "where": where})
        os._exit(1)


def machine(on: str) -> Finding:
    """What this was measured on."""
    found: Finding = {
        "ok": True,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "numexpr": importlib.util.find_spec("numexpr") is not None,
        "numba": importlib.util.find_spec("numba") is not None,
        "uvloop": importlib.util.find_spec("uvloop") is not None,
    }
    if not found["numexpr"]:
        found["note"] = "numexpr is absent: its kernel is not tried here"
    if on == "cuda":
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        found |= {"gpu": properties.name, "gpu_memory_bytes": properties.total_memory}
    return found


def sections(on: str, left_s: Callable[[], float]) -> list[tuple[str, float, Callable[[], Iterator[Finding]]]]:
    """Name, the seconds that should be left to begin it, and the section."""
    import gpu_check_device as device
    import gpu_check_training as training

    place = device.Place.of(on)
    return [
        ("contract", 5, lambda: device.contract(place)),
        ("transfers", 10, lambda: device.transfers(place)),
        ("latency", 5, lambda: device.latency(place)),
        ("bandwidth", 10, lambda: device.bandwidth(place)),
        ("exactness", 15, lambda: training.exactness(place)),
        ("races", 20, lambda: training.races(place)),
        ("memory", 15, lambda: training.memory(place)),
        ("demo", 60, lambda: training.demo(place, left_s)),
    ]


def run_section(report: Report, name: str, section: Callable[[], Iterator[Finding]]) -> None:
    try:
        for finding in section():
            report.write(name, finding)
    except Exception as error:  # one section's failure must not hide the others
        report.write(name, {"ok": False, "error": repr(error), "trace": traceback.format_exc(limit=-6)})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu_check.jsonl"))
    parser.add_argument("--budget", type=float, default=300, help="seconds")
    parser.add_argument("--only", nargs="+", help="these sections")
    parser.add_argument("--on", choices=["cuda", "cpu"], default="cuda")
    options = parser.parse_args()
    if options.on == "cuda" and not torch.cuda.is_available():
        print("gpu_check: torch.cuda.is_available() is False: nothing to check here", file=sys.stderr)
        return 2
    os.environ.setdefault("ZOFF_PROFILE", "off")
    report = Report(options.out)
    guard = Guard(report, options.budget)
    report.write("machine", machine(options.on))

    def left_s() -> float:
        return float(options.budget) - report.elapsed_s

    for name, needed_s, section in sections(options.on, left_s):
        if options.only and name not in options.only:
            continue
        if left_s() < needed_s:
            report.write(name, {"skipped": f"needs {needed_s:g} s, {left_s():.0f} s are left"})
            continue
        guard.section = name
        run_section(report, name, section)
    report.write("summary", {"ok": not report.failed, "failed": report.failed})
    return 1 if report.failed else 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    # Not by way of interpreter shutdown: a thread that a failed section left behind must not hold the machine.
    os._exit(status)
