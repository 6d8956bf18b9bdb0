"""What the operating system says of memory: what this process has, and what it may still take."""

import mmap
import os
import resource
from pathlib import Path

BASE = "Python and torch"  # what a plan calls the process with everything imported and nothing loaded


def pages(nbytes: int) -> int:
    """What a mapping of its own takes."""
    return -(-max(nbytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE


def resident() -> int:
    """Bytes of this process that are in memory now."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:  # no /proc: the peak is the next best
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def available_memory() -> int:
    """Bytes a process may still take: what the kernel calls available, within the control group's limit (v1 or v2)."""
    free = _table(Path("/proc/meminfo"))["MemAvailable"] * 1024
    group = Path("/sys/fs/cgroup")
    for limit, used, stat in (
        (group / "memory.max", group / "memory.current", group / "memory.stat"),
        (
            group / "memory/memory.limit_in_bytes",
            group / "memory/memory.usage_in_bytes",
            group / "memory/memory.stat",
        ),
    ):
        if limit.exists() and used.exists() and (text := limit.read_text().strip()) != "max":
            reclaimable = _table(stat).get(
                "inactive_file", 0
            )  # pages of files, such as the checkpoint just read
            free = min(free, int(text) - int(used.read_text()) + reclaimable)
    return max(0, free)


def _table(path: Path) -> dict[str, int]:
    """Lines of a name and a number."""
    rows = (line.replace(":", " ").split() for line in path.read_text().splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) >= 2}
