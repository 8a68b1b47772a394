"""How many processors this process may use: its affinity and its cgroup's quota, not the machine's count."""

from __future__ import annotations

import os
from pathlib import Path


def available_cpus() -> tuple[int, ...]:
    """Processors the calling thread may run on, in ascending order; never empty."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def default_workers() -> int:
    """Workers that have a processor each: the affinity, or the cgroup's quota where that is less; at least one."""
    quota = quota_cpus(Path("/"))
    cpus = len(available_cpus())
    return cpus if quota is None else max(1, min(cpus, int(quota)))


def quota_cpus(root: Path) -> float | None:
    """The smallest cgroup quota in force, in processors, or None without one. ``root`` holds proc and sys."""
    quotas = []
    for v2, group in _own_groups(root / "proc/self/cgroup"):
        top = root / "sys/fs/cgroup" if v2 else _v1_mount(root)
        # A group is held to the quotas of all that contain it; inside a container its own path may not be visible.
        for directory in (top / group.lstrip("/"), *(top / group.lstrip("/")).parents):
            quota = _read_v2(directory) if v2 else _read_v1(directory)
            if quota is not None:
                quotas.append(quota)
            if directory == top:
                break
    return min(quotas, default=None)


def _own_groups(file: Path) -> list[tuple[bool, str]]:
    """(is version 2, path) of each cgroup that may limit this process's processor time."""
    groups = []
    for line in _text(file).splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            groups.append((True, path))
        elif "cpu" in controllers.split(","):
            groups.append((False, path))
    return groups


def _v1_mount(root: Path) -> Path:
    both = root / "sys/fs/cgroup/cpu,cpuacct"
    return both if both.is_dir() else root / "sys/fs/cgroup/cpu"


def _read_v2(directory: Path) -> float | None:
    words = _text(directory / "cpu.max").split()
    return None if len(words) != 2 or words[0] == "max" else _ratio(words[0], words[1])


def _read_v1(directory: Path) -> float | None:
    return _ratio(_text(directory / "cpu.cfs_quota_us"), _text(directory / "cpu.cfs_period_us"))


def _ratio(quota: str, period: str) -> float | None:
    try:
        allowed, of = float(quota), float(period)
    except ValueError:
        return None
    return allowed / of if allowed > 0 and of > 0 else None


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""
