"""Workers are counted from what this process may use, not from what the machine has."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from zoff_async.cpu_ops import available_cpus, default_workers
from zoff_async.cpu_ops.cpus import quota_cpus


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")
    return root


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, None),
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "max 100000"}, None),
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "150000 100000"}, 1.5),
        # The tightest of the groups above counts.
        (
            {
                "proc/self/cgroup": "0::/a/b",
                "sys/fs/cgroup/a/cpu.max": "400000 100000",
                "sys/fs/cgroup/a/b/cpu.max": "max 100000",
            },
            4.0,
        ),
        # In a container the path is the host's, and only the top is visible.
        ({"proc/self/cgroup": "0::/docker/x", "sys/fs/cgroup/cpu.max": "50000 100000"}, 0.5),
        (
            {
                "proc/self/cgroup": "3:cpu,cpuacct:/job\n1:memory:/job",
                "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us": "300000",
                "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_period_us": "100000",
            },
            3.0,
        ),
        (
            {
                "proc/self/cgroup": "1:cpu:/",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
            },
            None,
        ),
    ],
)
def test_the_quota_is_read_from_either_version_of_cgroups(tmp_path, files, quota):
    assert quota_cpus(write(tmp_path, files)) == quota


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system has no affinity")
def test_workers_follow_the_affinity():
    program = (
        "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "from zoff_async.cpu_ops import available_cpus, default_workers\n"
        "print(default_workers(), len(available_cpus()))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)

    assert done.stdout.split() == ["1", "1"]


@pytest.mark.parametrize(("quota", "workers"), [(None, 3), (0.5, 1), (1.9, 1), (2.0, 2), (64.0, 3)])
def test_a_quota_lowers_the_number_of_workers_but_not_below_one(monkeypatch, quota, workers):
    monkeypatch.setattr("zoff_async.cpu_ops.cpus.quota_cpus", lambda root: quota)
    monkeypatch.setattr("zoff_async.cpu_ops.cpus.available_cpus", lambda: (0, 2, 5))

    assert default_workers() == workers


def test_there_is_always_a_processor():
    assert len(available_cpus()) >= 1
    assert default_workers() >= 1
