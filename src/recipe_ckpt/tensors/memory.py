"""How much memory this process may still take: the machine's, and that of the control groups it lives in."""

from __future__ import annotations

import os
from collections.abc import Iterator

_USABLE = 0.9
"""The share of what is available that one allocation may take: the rest of training grows too."""

_MEMINFO = "/proc/meminfo"
_CGROUPS = "/proc/self/cgroup"
_CGROUP_ROOT = "/sys/fs/cgroup"


def find_memory_problem(size_bytes: int) -> str | None:
    """Say why `size_bytes` more of host memory would not fit, or None if they do or nobody can tell.

    Counted for each of this node's ranks (LOCAL_WORLD_SIZE), because they all allocate at the same moment.
    """
    available = find_available_bytes()
    local_ranks = max(1, int(os.environ.get("LOCAL_WORLD_SIZE") or 1))
    if available is None or size_bytes * local_ranks <= available * _USABLE:
        return None
    each = f"{size_bytes / 1e9:.2f} GB of host memory for each of {local_ranks} ranks on this node"
    return f"a staged copy needs {each}, of {available / 1e9:.2f} GB that are available it may take {_USABLE:.0%}"


def find_available_bytes() -> int | None:
    """Return the least of what the machine and each enclosing control group have left; None off Linux."""
    found = [room for room in (_read_meminfo(), *_read_cgroups()) if room is not None]
    return min(found, default=None)


def _read_meminfo() -> int | None:
    lines = (_read(_MEMINFO) or "").splitlines()
    sizes = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    return sizes[0] if sizes else None


def _read_cgroups() -> Iterator[int | None]:
    """Yield what is left in each memory group from this process's own up to the root, in either version's files."""
    for line in (_read(_CGROUPS) or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "" or "memory" in controllers.split(","):
            root = os.path.join(_CGROUP_ROOT, "memory") if controllers else _CGROUP_ROOT
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if controllers else ("memory.max", "memory.current")
            while True:
                folder = os.path.normpath(root + path)
                yield _find_room(folder, *names)
                if path in ("/", ""):
                    break
                path = os.path.dirname(path)


def _find_room(folder: str, limit_name: str, usage_name: str) -> int | None:
    limit, usage = (_read(os.path.join(folder, name)) for name in (limit_name, usage_name))
    if limit is None or usage is None or not limit.strip().isdigit():
        return None
    # Pages of the page cache count as used, but are given back before anything fails.
    stat = dict(line.split() for line in (_read(os.path.join(folder, "memory.stat")) or "").splitlines())
    reclaimable = int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))
    return max(0, int(limit) - int(usage) + reclaimable)


def _read(path: str) -> str | None:
    try:
        with open(path) as file:
            return file.read()
    except OSError:
        return None
