"""The device's memory, item by item, before any of it is taken: what is left is for KV blocks."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from compilerllm.ir.step import StateGroup
from compilerllm.kernels.errors import KernelError
from compilerllm.kernels.launch.dtypes import ITEM_BYTES
from compilerllm.kernels.launch.gpu.program import Program
from compilerllm.kernels.launch.gpu.sampling import ROW, TOP

BLOCK_SIZE = 32  # tokens of a KV block on CUDA
# Measured on an H200 as free device memory before and after graphs are instantiated and uploaded, by kernel nodes.
GRAPH_BYTES = 207_000  # of a graph, beside its nodes
NODE_BYTES = 2_455  # of a kernel node: parameters and launch descriptors
LIBRARY_BYTES = (
    32 << 20
)  # cuBLAS's workspace for one stream, as torch sets it on compute capability 9.0 and above


class NoRoomForStates(KernelError):
    """Nothing is left for KV blocks."""


@dataclass(frozen=True)
class MemoryPlan:
    """Predicted bytes by item, without KV blocks."""

    weights: int
    arena: int
    logits: int
    steps: int
    tables: int
    kernels: int
    library: int
    graphs: int

    @property
    def total(self) -> int:
        """Bytes of all items."""
        return sum(self.items().values())

    def items(self) -> dict[str, int]:
        """By name."""
        return {
            "weights": self.weights, "arena": self.arena, "logits": self.logits, "step inputs": self.steps,
            "sampling tables": self.tables, "kernels": self.kernels, "library workspace": self.library,
            "graphs": self.graphs,
        }  # fmt: skip

    def text(self) -> str:
        """For a log or a card: MiB by item."""
        return ", ".join(f"{name} {nbytes / 2**20:,.0f}" for name, nbytes in self.items().items()) + " MiB"


def state_block_bytes(entry: Mapping[str, int | str]) -> int:
    """Bytes of one KV block of one state of the manifest: keys and values [2, heads, 32, dim]."""
    return 2 * int(entry["heads"]) * BLOCK_SIZE * int(entry["dim"]) * ITEM_BYTES[str(entry["dtype"])]


def graph_bytes(nodes: Iterable[int]) -> int:
    """Predicted memory of instantiated graphs with these counts of nodes."""
    return sum(GRAPH_BYTES + NODE_BYTES * count for count in nodes)


def sampler_bytes(program: Program, rows: int, slots: int) -> int:
    """What ``GpuSampler`` reserves, but for the count tables, which the first request with penalties asks for."""
    a_row = 4 * (ROW.words + 3 + 2 * TOP)  # parameters; token, log-probability, rank; the most likely tokens
    arena = max((p.arena_bytes for p in program.plans), default=0)
    return arena + 4 * (program.counters + slots) + a_row * rows


def uses_library(program: Program) -> bool:
    """Whether cuBLAS will want its workspace."""
    return any(k.template in ("library:matmul", "library:aten") for k in program.kernels)


def state_budget(total: int, free: int, utilization: float, to_come: int) -> int:
    """Bytes for KV blocks: the share ``utilization`` of the device, less what is taken and what is still to come.

    ``free`` is now; ``to_come`` bytes of graphs and workspaces. Raises ``NoRoomForStates`` with the numbers.
    """
    budget = int(total * utilization) - (total - free) - to_come
    if budget <= 0:
        raise NoRoomForStates(
            f"no GPU memory is left for KV blocks: {total / 2**20:,.0f} MiB x --memory-utilization {utilization} less "
            f"{(total - free) / 2**20:,.0f} MiB in use and {to_come / 2**20:,.0f} MiB for graphs and workspaces. Raise "
            "--memory-utilization, lower --max-num-batched-tokens or --max-num-seqs, or free memory (nvidia-smi shows "
            "who has it)."
        )
    return budget


def count_blocks(
    budget: int, groups: Sequence[StateGroup], max_num_seqs: int, max_model_len: int, asked: int | None = None
) -> int:
    """Blocks of each paged group in ``budget`` bytes, no more than all sequences could ever use.

    ``asked``: the user's --num-blocks. Raises ``NoRoomForStates``.
    """
    per_block = sum(g.bytes_per_block for g in groups if g.addressing == "paged")
    if not per_block:
        return 0
    if asked is not None:
        if asked * per_block > budget:
            raise NoRoomForStates(
                f"--num-blocks {asked} takes {asked * per_block / 2**20:,.0f} MiB, {budget / 2**20:,.0f} MiB of GPU memory "
                f"are left: room for {budget // per_block}. Lower it, or raise --memory-utilization."
            )
        return asked
    blocks = min(budget // per_block, max_num_seqs * -(-max_model_len // BLOCK_SIZE))
    if blocks < 1:
        raise NoRoomForStates(
            f"{budget / 2**20:,.0f} MiB of GPU memory hold no KV block of {per_block / 2**20:,.2f} MiB. Raise "
            "--memory-utilization, or lower --max-num-batched-tokens."
        )
    return blocks
