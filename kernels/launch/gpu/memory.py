"""The device's memory, item by item, before any of it is taken: what is left is for KV blocks."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from compilerllm.ir.step import Bucket, StateGroup
from compilerllm.kernels.errors import KernelError
from compilerllm.kernels.launch.dtypes import ITEM_BYTES
from compilerllm.kernels.launch.gpu.backend import ALIGNMENT
from compilerllm.kernels.launch.gpu.graphs import captured_buckets, graph_bytes
from compilerllm.kernels.launch.gpu.program import Program
from compilerllm.kernels.launch.gpu.sampling import BIASES, GpuSampler, late_bytes, table_allocations
from compilerllm.kernels.launch.gpu.steps import step_bytes
from compilerllm.kernels.launch.memory_plan import Item, MemoryPlan

BLOCK_SIZE = 32  # tokens of a KV block on CUDA
LIBRARY_BYTES = (
    32 << 20
)  # cuBLAS's workspace for one stream, as torch sets it on compute capability 9.0 and above
# The driver's context, torch's and the libraries' own: what an H200 showed as in use (121,767 MiB; driver 580, torch
# 2.11) less all that was planned, of Qwen3-0.6B (benchmarks/results/h200.jsonl, 89a2e84).
CONTEXT_BYTES = 778 << 20
# torch's caching allocator takes memory of the device in segments.
SMALL, SMALL_SEGMENT = 1 << 20, 2 << 20  # allocations up to this many bytes share segments of that many
LARGE, LARGE_SEGMENT = 10 << 20, 20 << 20  # and those below this, segments of that many
GRANULE = 2 << 20  # beyond, a segment an allocation, rounded up

CONTEXT, ALLOCATOR = "CUDA context", "allocator's rounding"
STEP_FLAGS = ("--max-num-batched-tokens", "--max-num-seqs")


class NoRoomForStates(KernelError):
    """Nothing is left for KV blocks."""


@dataclass(frozen=True)
class PlanSizes:
    """One bucket's plan: arena bytes, number of launches, and in a sampling program its variant."""

    bucket: Bucket
    arena_bytes: int
    launches: int
    variant: str = ""


@dataclass(frozen=True)
class ProgramSizes:
    """What a program's memory follows from. library: whether cuBLAS or torch will want its workspace."""

    plans: tuple[PlanSizes, ...]
    counters: int
    library: bool

    @staticmethod
    def of(program: Program) -> "ProgramSizes":
        """Of a program, be it read from an artifact or drafted."""
        return ProgramSizes(
            tuple(PlanSizes(p.bucket, p.arena_bytes, len(p.launches), p.variant) for p in program.plans),
            program.counters,
            any(k.template in ("library:matmul", "library:aten") for k in program.kernels),
        )


@dataclass(frozen=True)
class Overhead:
    """What a device takes beside allocations. context: before the first one; segments: bytes that it takes for allocations
    of these sizes in this order; granule: what an allocation of KV blocks is rounded up to."""

    context: int
    segments: Callable[[Sequence[int]], int]
    granule: int


def torch_segments(sizes: Sequence[int]) -> int:
    """Device memory that torch's caching allocator takes for allocations of these sizes, none of them freed."""
    free: dict[bool, list[int]] = {
        True: [],
        False: [],
    }  # bytes left in segments, of small allocations and of others
    total = 0
    for size in sizes:
        size = -(-max(size, 1) // 512) * 512
        small = size <= SMALL
        places = free[small]
        found = min(
            (i for i, left in enumerate(places) if left >= size), key=lambda i: places[i], default=None
        )
        if found is None:
            segment = (
                SMALL_SEGMENT if small else LARGE_SEGMENT if size < LARGE else -(-size // GRANULE) * GRANULE
            )
            total += segment
            places.append(segment)
            found = len(places) - 1
        left = places.pop(found) - size
        if left >= (512 if small else SMALL + 1):  # a smaller rest stays with the allocation
            places.append(left)
    return total


CUDA = Overhead(CONTEXT_BYTES, torch_segments, GRANULE)
PLAIN = Overhead(0, sum, 1)  # memory that is taken as it is asked for


@dataclass(frozen=True)
class ModelSizes:
    """Everything that the plan of a model on a GPU follows from. code: bytes of cubins, and whether that is a guess."""

    forward: ProgramSizes
    sampling: ProgramSizes | None
    weights: int
    vocab: int
    logit_bytes: int
    groups: int
    max_model_len: int
    code: int
    graphs: bool
    max_graph_tokens: int
    code_known: bool = True

    @property
    def rows(self) -> int:
        """The most rows of a step."""
        return max(p.bucket.rows for p in self.forward.plans)

    @property
    def most_sequences(self) -> int:
        """The most sequences of a step."""
        return max(p.bucket.sequences for p in self.forward.plans)

    @property
    def logits(self) -> int:
        """Bytes of a step's logits."""
        return self.rows * self.vocab * self.logit_bytes

    @property
    def arena(self) -> int:
        """Bytes of the largest bucket's intermediate values."""
        return max(p.arena_bytes for p in self.forward.plans)

    def graph_nodes(self) -> list[int]:
        """Kernel nodes of every graph that is captured."""
        plans = self.forward.plans
        captured = captured_buckets([p.bucket for p in plans], self.max_graph_tokens) if self.graphs else []
        joined = [plans[i].launches for i in captured if plans[i].bucket.max_query == 1]
        variants = variant_nodes(self.sampling)
        return [
            *(plans[i].launches for i in captured),
            *(launches + n for launches in joined for n in variants.values()),
        ]


def variant_nodes(sampling: ProgramSizes | None) -> dict[str, int]:
    """Launches of each variant of sampling that a graph may have joined to it."""
    plans = sampling.plans if sampling is not None else ()
    return {p.variant: p.launches for p in plans if p.variant in GpuSampler.variants}


def rounded(nbytes: int) -> int:
    """What an allocation takes at least."""
    return -(-max(nbytes, 1) // ALIGNMENT) * ALIGNMENT


def plan_model(sizes: ModelSizes, slots: int | None = None, overhead: Overhead = CUDA) -> MemoryPlan:
    """Every item but the KV blocks. slots: the most sequences at once, by default as many as the buckets hold."""
    slots = slots or sizes.most_sequences
    columns = table_columns(sizes.max_model_len)
    steps = step_bytes([p.bucket for p in sizes.forward.plans], sizes.groups, columns)
    parts = {
        "weights": [sizes.weights],
        "intermediate values": [sizes.arena, 4 * max(1, sizes.forward.counters)],
        "logits": [sizes.logits],
        "step inputs": [steps],
        "sampling tables": [],
        "library workspace": [LIBRARY_BYTES] if sizes.forward.library else [],
    }
    late = 0
    if sizes.sampling is not None:
        arena = max((p.arena_bytes for p in sizes.sampling.plans), default=0)
        parts["sampling tables"] = table_allocations(arena, sizes.sampling.counters, sizes.rows, slots)
        late = late_bytes(slots, sizes.rows, sizes.vocab)
    taken = {name: sum(map(rounded, pieces)) for name, pieces in parts.items()}
    in_order = [rounded(piece) for pieces in parts.values() for piece in pieces]
    graphs = sizes.graph_nodes()
    code = "cubins' files" if sizes.code_known else "from their number: nothing is compiled yet"
    return MemoryPlan((
        Item(CONTEXT, overhead.context, "estimated", note="driver, torch and libraries, as seen on an H200", before=True),
        Item("weights", taken["weights"], flags=("--dtype", "a smaller model")),
        Item("intermediate values", taken["intermediate values"], flags=STEP_FLAGS[:1], note="the largest bucket's arena"),
        Item("logits", taken["logits"], flags=STEP_FLAGS, note=f"{sizes.rows} rows of {sizes.vocab:,}"),
        Item("step inputs", taken["step inputs"], flags=("--max-num-seqs", "--max-model-len")),
        Item("sampling tables", taken["sampling tables"], flags=("--max-num-seqs",)),
        Item("kernels", sizes.code, "estimated", note=code),
        Item("library workspace", taken["library workspace"], note="cuBLAS's"),
        Item("graphs", graph_bytes(graphs), "estimated", ("--max-num-seqs", "--optimization-level 1"),
             f"{len(graphs)} graphs of {sum(graphs):,} nodes"),
        Item(ALLOCATOR, overhead.segments(in_order) - sum(in_order), note="segments of torch's allocator"),
        Item(BIASES, late, flags=("--max-num-seqs",), note="with the first request that has some", later=True),
    ))  # fmt: skip


def allocated(plan: MemoryPlan) -> dict[str, int]:
    """Of the plan, the items that the backend is asked for by name: what a ledger is held to."""
    return {
        i.name: i.nbytes for i in plan.items if i.name not in (CONTEXT, ALLOCATOR, "kernels", "graphs", "library workspace")
    }  # fmt: skip


def table_columns(max_model_len: int) -> int:
    """Most blocks of one sequence."""
    return -(-max_model_len // BLOCK_SIZE)


def state_block_bytes(entry: Mapping[str, int | str]) -> int:
    """Bytes of one KV block of one state of the manifest: keys and values [2, heads, 32, dim]."""
    return 2 * int(entry["heads"]) * BLOCK_SIZE * int(entry["dim"]) * ITEM_BYTES[str(entry["dtype"])]


def state_offsets(states: Iterable[Mapping[str, int | str]], num_blocks: int) -> tuple[list[int], int]:
    """Where each state's blocks begin in the KV cache, and its bytes."""
    starts, end = [], 0
    for entry in states:
        starts.append(end)
        end += -(-state_block_bytes(entry) * num_blocks // ALIGNMENT) * ALIGNMENT
    return starts, end


def planned_budget(plan: MemoryPlan, memory: int, granule: int = GRANULE) -> int:
    """Bytes for KV blocks that --memory leaves. Raises ``NoRoomForStates`` with the plan's items."""
    budget = (memory - plan.ceiling) // granule * granule
    if budget <= 0:
        raise NoRoomForStates(
            f"no memory is left for KV blocks: --memory allows {memory / 2**20:,.1f} MiB, and everything else takes "
            f"{plan.ceiling / 2**20:,.1f} ({plan.text()}; {plan[CONTEXT] / 2**20:,.0f} for the CUDA context, "
            f"{plan[BIASES] / 2**20:,.0f} for penalties and biases). Raise --memory, or lower --max-num-batched-tokens or "
            "--max-num-seqs; `compilerllm plan` computes what fits."
        )
    return budget


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
    budget: int, groups: Sequence[StateGroup], max_num_seqs: int, max_model_len: int, asked: int | None = None,
    flag: str = "--memory-utilization",
) -> int:  # fmt: skip
    """Blocks of each paged group in ``budget`` bytes, no more than all sequences could ever use.

    ``asked``: the user's --num-blocks; ``flag`` is what makes the budget larger. Raises ``NoRoomForStates``.
    """
    per_block = sum(g.bytes_per_block for g in groups if g.addressing == "paged")
    if not per_block:
        return 0
    if asked is not None:
        if asked * per_block > budget:
            raise NoRoomForStates(
                f"--num-blocks {asked} takes {asked * per_block / 2**20:,.0f} MiB, {budget / 2**20:,.0f} MiB of GPU memory "
                f"are left: room for {budget // per_block}. Lower it, or raise {flag}."
            )
        return asked
    blocks = min(budget // per_block, max_num_seqs * table_columns(max_model_len))
    if blocks < 1:
        raise NoRoomForStates(
            f"{budget / 2**20:,.0f} MiB of GPU memory hold no KV block of {per_block / 2**20:,.2f} MiB. Raise "
            f"{flag}, or lower --max-num-batched-tokens."
        )
    return blocks


def limit_bytes(budget: int, kv_cache_bytes: int | None, flag: str = "--memory-utilization") -> int:
    """The budget, or the user's --kv-cache-bytes where it fits in. Raises ``NoRoomForStates``."""
    if kv_cache_bytes is not None and kv_cache_bytes > budget:
        raise NoRoomForStates(
            f"--kv-cache-bytes asks for {kv_cache_bytes / 2**20:,.0f} MiB, {budget / 2**20:,.0f} MiB of GPU memory "
            f"are left. Lower it, or raise {flag}."
        )
    return budget if kv_cache_bytes is None else kv_cache_bytes
