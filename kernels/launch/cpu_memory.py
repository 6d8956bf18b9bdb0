"""A CPU process's memory, item by item, before any of it is taken."""

from collections.abc import Iterable, Mapping
from typing import Any

from compilerllm.kernels.launch.host_memory import BASE, pages
from compilerllm.kernels.launch.library import kv_block_bytes
from compilerllm.kernels.launch.memory import ARENA_MARGIN
from compilerllm.kernels.launch.memory_plan import Basis, Item, MemoryPlan
from compilerllm.kernels.launch.packing import ParameterSpec, place_parameters
from compilerllm.kernels.launch.sampling import empty_tables

OBJECTS = "engine's objects"
# Beyond base, weights, arena and sampled rows: 5 to 12 MiB with SmolLM2-135M on two cores (docs/memory.md).
OBJECT_BYTES = 12 << 20


def arena_bytes(plans: Iterable[Mapping[str, Any]]) -> int:
    """Of the manifest's plans: intermediate values of the largest bucket."""
    return max((int(p["arena_bytes"]) for p in plans), default=0)


def state_bytes(states: Iterable[Mapping[str, Any]], num_blocks: int) -> int:
    """Bytes of the KV blocks of all states, each in a mapping of its own."""
    return sum(
        pages(kv_block_bytes(s["dtype"], s["heads"], s["dim"]) * num_blocks) for s in states if num_blocks
    )


def table_bytes(slots: int) -> int:
    """Bytes of the sampling tables of so many sequences."""
    return slots * sum(int(getattr(table, "nbytes", 0)) for table in vars(empty_tables(1)).values())


def plan_process(
    parameters: Iterable[ParameterSpec], arena: int, rows: int, vocab: int, slots: int, base: int, basis: Basis = "measured"
) -> MemoryPlan:  # fmt: skip
    """Every item but the KV blocks. rows: the most of a step; base: what the process takes with nothing loaded."""
    return MemoryPlan((
        Item(BASE, base, basis, note="the process with everything imported and nothing loaded", before=True),
        Item(OBJECTS, OBJECT_BYTES, "estimated", note="manifest, scheduler, threads' stacks, what malloc keeps"),
        Item("weights", pages(place_parameters(parameters)[1]), flags=("--weights packed", "--dtype", "a smaller model")),
        Item("intermediate values", pages(arena + ARENA_MARGIN), flags=("--max-num-batched-tokens",),
             note="the largest bucket's arena"),
        Item("logits", pages(4 * rows * vocab), flags=("--max-num-batched-tokens",), note=f"{rows} rows of {vocab:,}"),
        Item("sampling tables", pages(table_bytes(slots)), flags=("--max-num-seqs",)),
        Item("penalties and biases", 4 * slots * vocab, flags=("--max-num-seqs",),
             note="with the first request that has some", later=True),
    ))  # fmt: skip
