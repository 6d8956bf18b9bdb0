"""What this processor can do, by the kernel's own words."""

from pathlib import Path


def host_features() -> frozenset[str]:
    """CPU features as /proc/cpuinfo names them; empty where there is no such file."""
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return frozenset()
    for line in info.read_text().splitlines():
        if line.startswith("flags"):
            return frozenset(line.partition(":")[2].split())
    return frozenset()
