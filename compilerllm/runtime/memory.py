"""How many KV blocks there can be."""

from typing import Protocol, runtime_checkable

from compilerllm.config import CacheConfig
from compilerllm.errors import KVCacheTooLarge, KVCacheTooSmall
from compilerllm.ir.step import StateGroup
from compilerllm.kernels.launch.host_memory import BASE, available_memory
from compilerllm.kernels.launch.memory_plan import MemoryPlan

DEFAULT_KV_BYTES = 4 << 30  # host memory has other users; whoever wants more says so


@runtime_checkable
class Planned(Protocol):
    """A model that knows what its process takes."""

    def memory_plan(self, max_num_seqs: int | None = None) -> MemoryPlan:
        """Everything but the KV blocks."""
        ...


def count_blocks(
    cache: CacheConfig,
    groups: tuple[StateGroup, ...],
    *,
    max_model_len: int,
    max_num_seqs: int,
    plan: MemoryPlan | None = None,
) -> int:
    """Blocks of each paged group, within the configured bytes and no more than all sequences could ever use.

    ``plan``: everything else that the process takes, which --memory is held against. Raises ``KVCacheTooSmall`` if not even one block fits, ``KVCacheTooLarge`` if more is asked for than there is: the
    memory is taken as blocks are first written, so that it would run out in the middle of serving.
    """
    paged = [g for g in groups if g.addressing == "paged"]
    if not paged:
        return 0
    slots = sum(g.bytes_per_block for g in groups if g.addressing == "slot") * max_num_seqs
    per_block = sum(g.bytes_per_block for g in paged)
    free = available_memory()
    if cache.memory_bytes is not None:
        left = planned_budget(plan, cache.memory_bytes)
        return _planned_blocks(cache, left, paged, max_model_len, max_num_seqs)
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


def planned_budget(plan: MemoryPlan | None, memory: int) -> int:
    """Bytes for sequence states that --memory leaves. Raises ``KVCacheTooSmall`` with the plan's items."""
    if plan is None:
        raise KVCacheTooSmall(
            "--memory is held against a plan, which reference operators (--optimization-level 0) have none of. Leave it "
            "out, or use --kv-cache-bytes."
        )
    if memory <= plan.ceiling:
        raise KVCacheTooSmall(
            f"no memory is left for KV blocks: --memory allows {memory / 2**20:,.1f} MiB, and everything else takes "
            f"{plan.ceiling / 2**20:,.1f} ({plan[BASE] / 2**20:,.0f} for Python and torch, {plan.text()}). Raise --memory, "
            "or lower --max-num-batched-tokens; `compilerllm plan` computes what fits."
        )
    return memory - plan.ceiling


def _planned_blocks(
    cache: CacheConfig, budget: int, paged: list[StateGroup], max_model_len: int, max_num_seqs: int
) -> int:
    per_block = sum(g.bytes_per_block for g in paged)
    wish = cache.num_blocks * per_block if cache.num_blocks is not None else cache.kv_cache_bytes
    if wish is not None and wish > budget:
        flag = "--kv-cache-bytes" if cache.num_blocks is None else "--num-blocks"
        raise KVCacheTooLarge(
            f"{flag} asks for {wish / 2**20:,.1f} MiB of KV blocks, but --memory leaves {budget / 2**20:,.1f}. Lower it, or "
            "raise --memory."
        )
    if cache.num_blocks is not None:
        return cache.num_blocks
    blocks = min(
        (budget if wish is None else wish) // per_block,
        max_num_seqs * -(-max_model_len // min(g.block_size for g in paged)),
    )
    if blocks < 1:
        raise KVCacheTooSmall(
            f"{budget / 2**20:,.2f} MiB are left of --memory for KV blocks, which hold none of {per_block / 2**20:,.2f} MiB. "
            "Raise it, or lower --max-num-batched-tokens."
        )
    return blocks


def _check_fits(need: int, free: int, flag: str) -> None:
    if need > free:
        raise KVCacheTooLarge(
            f"The KV cache would take {need / 2**20:,.0f} MiB, but {free / 2**20:,.0f} MiB of memory are available. "
            f"Lower {flag}, or leave it out."
        )
