"""The plan of a GPU's memory against what is really asked for, on a device that counts."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from compilerllm.compiled_cuda import CudaModel, CudaOptions
from compilerllm.ir.step import Bucket, StateGroup
from compilerllm.kernels.launch.gpu import memory
from compilerllm.kernels.launch.gpu.memory import NoRoomForStates, torch_segments
from compilerllm.kernels.launch.memory_plan import AllocationBeyondPlan, DoesNotFit, Item, Ledger, MemoryPlan
from compilerllm.kernels.triton.emit_sampling import draft_sampling, finish_sampling
from compilerllm.kernels.triton.target import find_cuda_target
from tests.kernels.gpu.tiny import VOCAB, IdentitySource, greedy, step_of, write_artifact

interpreted = pytest.importorskip("compilerllm.kernels.triton.interpreted_backend")
BUCKETS = (Bucket(1, 1, 1, 1), Bucket(4, 4, 4, 1), Bucket(16, 4, 4, 16), Bucket(64, 4, 4, 64))
SMALL = CudaOptions(max_graph_tokens=16)
MIB = 1 << 20


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    draft, variants = draft_sampling(VOCAB, [1, 4], find_cuda_target("sm_90"))
    write_artifact(tmp_path, BUCKETS, sampling=finish_sampling(draft, variants))
    return tmp_path


def load(folder: Path, total: int = 64 * MIB, allowed: int | None = None) -> CudaModel:
    backend = interpreted.InterpretedBackend(total=total)
    return CudaModel.load(folder, IdentitySource(), backend=backend, options=SMALL, memory=allowed)


def test_allocations_are_the_plan_to_the_byte(folder: Path) -> None:
    """At the start every item is taken as planned; penalties and biases take theirs when first asked for."""
    model = load(folder)
    blocks = model.count_blocks(0.9, 4, 128)
    tables = model.allocate(blocks, 4)
    plan = model.memory_plan(4)
    taken = model._backend.ledger.taken
    planned = memory.allocated(plan)
    later = planned.pop("penalties and biases")
    assert taken == planned | {"KV cache": memory.state_offsets(model.manifest["states"], blocks)[1]}
    assert sum(taken.values()) == interpreted_taken(model)
    tables.presence_penalty[0] = 1.0
    tables.prompt_counts, tables.output_counts = (np.zeros((4, VOCAB), np.uint16) for _ in range(2))
    tables.changed.add(0)
    mask = np.full((1, 1), 0xFFFFFFFF, np.uint32)
    model.forward(step_of([(0, [3], 0, [2])]))
    model.sample(dataclasses.replace(greedy([0]), penalties=True, mask=mask))
    late = taken["penalties and biases"]
    room = -(-3 * 4 * VOCAB // 256) * 256  # counts of four sequences: a byte and two a token
    assert room <= late <= later - 8 * MIB, "what is beyond the 8 MiB for longer lists of biases"
    assert sum(taken.values()) == interpreted_taken(model)


def interpreted_taken(model: CudaModel) -> int:
    free, total = model._backend.memory()
    return total - free


def test_memory_is_the_whole_budget(folder: Path) -> None:
    """KV blocks get what the plan leaves, to the block; one byte too few is one block fewer."""
    model = load(folder)
    plan = model.memory_plan(4)
    block = sum(g.bytes_per_block for g in model.groups)
    for count in (1, 3, 9):
        assert model.count_blocks(0.9, 4, 128, memory_bytes=plan.ceiling + count * block) == count
        assert model.count_blocks(0.9, 4, 128, memory_bytes=plan.ceiling + (count + 1) * block - 1) == count
    with pytest.raises(NoRoomForStates, match=r"--memory allows .*weights .* for penalties and biases"):
        model.count_blocks(0.9, 4, 128, memory_bytes=plan.ceiling)
    with pytest.raises(NoRoomForStates, match=r"--kv-cache-bytes asks for .* raise --memory\."):
        model.count_blocks(0.9, 4, 128, memory_bytes=plan.ceiling + 4 * block, kv_cache_bytes=5 * block)
    with pytest.raises(NoRoomForStates, match=r"--num-blocks 5 .* room for 4.*raise --memory\."):
        model.count_blocks(0.9, 4, 128, memory_bytes=plan.ceiling + 4 * block, num_blocks=5)


def test_refused_before_anything_is_allocated(folder: Path) -> None:
    """Too little free memory, or more planned than --memory allows: every item with its size, nothing taken."""
    backend = interpreted.InterpretedBackend(total=1 * MIB)
    with pytest.raises(
        DoesNotFit,
        match=r"MiB more than is free on the GPU \(1\.0 MiB\): weights 0\.0, .*graphs [\d.]+.*--max-num-seqs",
    ):
        CudaModel.load(folder, IdentitySource(), backend=backend, options=SMALL)
    assert backend.ledger.taken == {} and backend.memory()[0] == 1 * MIB
    backend = interpreted.InterpretedBackend(total=64 * MIB)
    with pytest.raises(DoesNotFit, match=r"more than --memory allows \(2\.0 MiB\)"):
        CudaModel.load(folder, IdentitySource(), backend=backend, options=SMALL, memory=2 * MIB)
    assert backend.ledger.taken == {}


def test_memory_larger_than_what_is_free(folder: Path) -> None:
    """--memory may allow more than the device has left."""
    model = load(folder, total=48 * MIB, allowed=1 << 40)
    with pytest.raises(NoRoomForStates, match=r"--memory allows \d+ KV blocks, .* GPU memory are free"):
        model.count_blocks(0.9, 4, 128 * 1024 * 32, memory_bytes=1 << 40)


def test_an_item_beyond_its_plan_is_named(folder: Path) -> None:
    model = load(folder)
    with pytest.raises(
        AllocationBeyondPlan,
        match=r"^logits: 1,024 bytes more would make [\d,]+, but the memory plan has [\d,]+",
    ):
        model._backend.allocate(1024, "logits")
    before = dict(model._backend.ledger.taken)
    model._backend.allocate(64, "something else")  # of which no plan knows
    assert model._backend.ledger.taken == before | {"something else": 256}


def test_ledger_without_a_plan_counts() -> None:
    ledger = Ledger()
    ledger.charge("weights", 5)
    ledger.charge("weights", 7)
    assert ledger.taken == {"weights": 12}
    ledger.hold({"weights": 13})
    ledger.charge("weights", 1)
    with pytest.raises(AllocationBeyondPlan):
        ledger.charge("weights", 1)


def test_totals() -> None:
    """What is there before, what is taken at the start, and what comes later."""
    plan = MemoryPlan((Item("context", 100, before=True), Item("weights", 10), Item("late", 1, later=True)))
    assert (plan.total, plan.ceiling, plan.to_come) == (110, 111, 11)
    assert plan["weights"] == 10 and plan["none"] == 0 and plan.largest.name == "context"
    plan.check(111, "is there")
    with pytest.raises(DoesNotFit):
        plan.check(110, "is there")
    plan.check(11, "is free", taken=True)


@pytest.mark.parametrize(
    ("sizes", "segments"),
    [
        ([1], 2 * MIB),  # small ones share two MiB
        ([MIB, MIB], 2 * MIB),
        ([MIB, MIB, 1], 4 * MIB),
        ([3 * MIB], 20 * MIB),  # middling ones share twenty
        ([3 * MIB, 9 * MIB, 8 * MIB], 20 * MIB),
        ([3 * MIB, 9 * MIB, 9 * MIB], 40 * MIB),
        ([10 * MIB], 10 * MIB),  # large ones are rounded up to two
        ([11 * MIB + 1], 12 * MIB),
        ([3 * MIB, 11 * MIB, MIB // 2], 22 * MIB),  # a large one finds room behind a middling one
    ],
)
def test_segments_of_torchs_allocator(sizes: list[int], segments: int) -> None:
    """By the allocator's documented thresholds: 1 MiB, 10 MiB, segments of 2 and 20 MiB."""
    assert torch_segments(sizes) == segments


def test_rounding_is_in_the_plan_of_a_real_device(folder: Path) -> None:
    """A CUDA device takes its context and segments; the tables of a few KiB cost two MiB, the workspace 32."""
    model = load(folder)
    plan = memory.plan_model(model.sizes, 4)
    plain = model.memory_plan(4)
    assert plan["CUDA context"] == memory.CONTEXT_BYTES and plain["CUDA context"] == 0
    allocated = (
        sum(memory.allocated(plain).values()) - plain["penalties and biases"] + plain["library workspace"]
    )
    assert allocated + plan["allocator's rounding"] == 2 * MIB + 32 * MIB
    assert plain["allocator's rounding"] == 0


def test_count_blocks_stops_at_what_sequences_can_use() -> None:
    group = StateGroup("kv", "paged", 32, 1000)
    assert memory.count_blocks(10**9, (group,), 4, 100) == 16
    assert memory.planned_budget(MemoryPlan((Item("weights", 5 * MIB),)), 8 * MIB) == 2 * MIB, (
        "in whole granules"
    )
