"""How many KV blocks there can be."""

from pathlib import Path

from compilerllm.config import CacheConfig
from compilerllm.errors import KVCacheTooLarge, KVCacheTooSmall
from compilerllm.ir.step import StateGroup

DEFAULT_KV_BYTES = 4 << 30  # host memory has other users; whoever wants more says so


def count_blocks(
    cache: CacheConfig, groups: tuple[StateGroup, ...], *, max_model_len: int, max_num_seqs: int
) -> int:
    """Blocks of each paged group, within the configured bytes and no more than all sequences could ever use.

    Raises ``KVCacheTooSmall`` if not even one block fits, ``KVCacheTooLarge`` if more is asked for than there is: the
    memory is taken as blocks are first written, so that it would run out in the middle of serving.
    """
    paged = [g for g in groups if g.addressing == "paged"]
    if not paged:
        return 0
    slots = sum(g.bytes_per_block for g in groups if g.addressing == "slot") * max_num_seqs
    per_block = sum(g.bytes_per_block for g in paged)
    free = available_memory()
    if cache.num_blocks is not None:
        _check_fits(cache.num_blocks * per_block + slots, free, "--num-blocks")
        return cache.num_blocks
    budget, flag = cache.kv_cache_bytes, "--kv-cache-bytes"
    if budget is None:
        budget = min(int(free * cache.memory_utilization), DEFAULT_KV_BYTES)
        flag = "--memory-utilization, or set --kv-cache-bytes"
    blocks = (budget - slots) // per_block
    if blocks < 1:
        raise KVCacheTooSmall(
            f"{budget / 2**20:.0f} MiB for sequence states hold no KV block beside {slots / 2**20:.0f} MiB of slots "
            f"for {max_num_seqs} sequences. Free memory, raise {flag}, or lower --max-num-seqs."
        )
    blocks = min(blocks, max_num_seqs * -(-max_model_len // min(g.block_size for g in paged)))
    _check_fits(blocks * per_block + slots, free, "--kv-cache-bytes")
    return blocks


def _check_fits(need: int, free: int, flag: str) -> None:
    if need > free:
        raise KVCacheTooLarge(
            f"The KV cache would take {need / 2**20:,.0f} MiB, but {free / 2**20:,.0f} MiB of memory are available. "
            f"Lower {flag}, or leave it out."
        )


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
