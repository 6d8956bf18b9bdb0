"""Times candidates on the GPU: each a program of one node, replayed from a graph over rotating weights.

A task's weights and states are there several times, so that a replay reads from memory what a real step would; the
launches follow one another as in a step, programmatic dependent launch included.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from compilerllm.ir.dims import substitute
from compilerllm.ir.graph import Value
from compilerllm.ir.types import StateType, StepType, TensorType
from compilerllm.kernels.cutlass.build import provide_library
from compilerllm.kernels.cutlass.supply import NONE as NO_CUTLASS
from compilerllm.kernels.cutlass.supply import Supply
from compilerllm.kernels.errors import BuildFailed, KernelError
from compilerllm.kernels.launch.dtypes import TORCH_DTYPES
from compilerllm.kernels.launch.gpu.driver import Driver
from compilerllm.kernels.launch.gpu.launcher import PackedPlan
from compilerllm.kernels.launch.gpu.program import META, Addresses, Pointer, Program, StepLayout
from compilerllm.kernels.triton.build import Cubin, KernelBuildError, build_kernels
from compilerllm.kernels.triton.emit import ProgramDraft, cutlass_cache, finish_program
from compilerllm.kernels.triton.source import KernelSource
from compilerllm.kernels.triton.target import CudaTarget
from compilerllm.kernels.triton.tasks import Task
from compilerllm.kernels.tuning import CONTEXT, TuningData

BLOCK = 32  # tokens
ROTATE_BYTES = 192 << 20  # well past any L2
MOST_REPLICAS = 24
Progress = Callable[[int, int, str], None]


class Bench:
    """Runs one-node programs on the first GPU."""

    def __init__(self, target: CudaTarget, libraries: Path) -> None:
        """libraries: the folder where those lie that programs call."""
        self.target, self._libraries = target, libraries
        self.driver = Driver()
        self.stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._functions: dict[str, int] = {}
        self._modules: list[Any] = []
        self._memory: list[tuple[int, int, torch.Tensor]] = []

    def time(self, task: Task, program: Program, cubins: Mapping[str, Cubin], seconds: float = 0.02) -> float:
        """Microseconds a run of the program's only plan, the median over replays. Raises what a launch raises."""
        self._memory = []
        copies = self._replicas(task)
        plans = [self._pack(task, program, cubins, where) for where in self._addresses(task, program, copies)]
        with torch.cuda.stream(self.stream):
            for plan in plans:
                plan.run()
            self.stream.synchronize()
            rounds = max(1, 8 // len(plans))
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=self.stream):
                for _ in range(rounds):
                    for plan in plans:
                        plan.run()
            graph.replay()
            first = self._elapsed(graph)
            repeats = int(min(20, max(5, seconds * 1e3 / max(first, 1e-3))))
            times = [self._elapsed(graph) for _ in range(repeats)]
        del graph
        return statistics.median(times) * 1e3 / (rounds * len(plans))

    def _elapsed(self, graph: "torch.cuda.CUDAGraph") -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record(self.stream)
        graph.replay()
        end.record(self.stream)
        end.synchronize()
        return float(start.elapsed_time(end))

    def _pack(
        self, task: Task, program: Program, cubins: Mapping[str, Cubin], where: Addresses
    ) -> PackedPlan:
        functions = [self._function(k.key, cubins) if k.key else 0 for k in program.kernels]
        plan = PackedPlan(
            program.plans[0], program.kernels, functions, where, self.driver.launch_function(), self.stream.cuda_stream,
            self._tensor, self._libraries,
        )  # fmt: skip
        return plan

    def _function(self, key: str, cubins: Mapping[str, Cubin]) -> int:
        if key not in self._functions:
            cubin = cubins[key]
            module, function = self.driver.load(cubin.file.read_bytes(), cubin.name, cubin.shared, cubin.name)
            self._modules.append(module)
            self._functions[key] = function
        return self._functions[key]

    # -- memory ----------------------------------------------------------------------------------------------------

    def _new(self, shape: Sequence[int], dtype: torch.dtype, fill: str = "random") -> int:
        made = torch.empty(tuple(shape), dtype=dtype, device="cuda")
        if fill == "zero" or not dtype.is_floating_point:
            made.zero_()
        else:
            made.uniform_(-0.05, 0.05)
        self._memory.append((made.data_ptr(), made.numel() * made.element_size(), made))
        return made.data_ptr()

    def _tensor(self, address: int, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
        for start, nbytes, made in self._memory:
            if start <= address < start + max(nbytes, 1):
                flat = made.view(-1).view(torch.uint8)[address - start :]
                return flat[: math.prod(shape) * dtype.itemsize].view(dtype).view(tuple(shape))
        raise KernelError(f"no memory of the bench lies at {address:#x}")

    def _replicas(self, task: Task) -> int:
        size = sum(_bytes(p.value) for p in task.module.main.params) + sum(
            self._blocks(task) * _block_bytes(s.state) for s in task.module.main.states
        )
        return max(1, min(MOST_REPLICAS, -(-ROTATE_BYTES // max(1, size))))

    def _blocks(self, task: Task) -> int:
        return sum(-(-n // BLOCK) for n in self._lengths(task)) + 1

    @staticmethod
    def _lengths(task: Task) -> list[int]:
        """Context of each real sequence: decoding ones at CONTEXT, else one prompt of all tokens."""
        b = task.bucket
        return [CONTEXT] * b.sequences if b.max_query == 1 else [b.tokens]

    def _addresses(self, task: Task, program: Program, copies: int) -> list[Addresses]:
        main, bucket = task.module.main, task.bucket
        dims = {"T": bucket.tokens, "S": bucket.sequences, "R": bucket.rows}
        columns = max(1, *(-(-n // BLOCK) for n in self._lengths(task)))
        layout = StepLayout.of(bucket, 1 + len(main.states), columns)
        packed = torch.from_numpy(self._step(task, layout, columns)).cuda()
        self._memory.append((packed.data_ptr(), packed.numel() * 4, packed))
        inputs = {
            f"input_{i}": self._input(v, dims, task)
            for i, v in enumerate(main.inputs)
            if not isinstance(v.type, StepType)
        }
        outs = [self._new(_shape(v, dims), TORCH_DTYPES[v.dtype], "zero") for v in main.outputs]
        arena = self._new([max(256, program.plans[0].arena_bytes)], torch.uint8)
        counters = self._new([max(1, program.counters)], torch.int32, "zero")
        last = self._new([max(bucket.sequences, 1)], torch.int32, "zero")
        found = []
        for _ in range(copies):
            params = {
                p.name: self._new(_shape(p.value, dims), TORCH_DTYPES[p.value.dtype]) for p in main.params
            }
            states = {s.name: self._state(s.state, self._blocks(task)) for s in main.states}
            found.append(
                _Results(
                    Addresses(
                        params, states, {"last_token": last} | inputs, arena, outs[0] if outs else 0, counters,
                        packed.data_ptr(), layout.offsets,
                    ),
                    outs,
                )
            )  # fmt: skip
        return list(found)

    def _input(self, value: Value, dims: Mapping[str, int], task: Task) -> int:
        shape = _shape(value, dims)
        address = self._new(shape, TORCH_DTYPES[value.dtype])
        if value.dtype in ("i64", "i32") and "E" in task.problem:  # ids of experts
            made = self._memory[-1][2]
            made.copy_(torch.rand(shape[0], int(task.problem["E"]), device="cuda").topk(shape[-1]).indices)
        return address

    def _state(self, state: StateType, blocks: int) -> int:
        return self._new((blocks, 2, state["heads"], BLOCK, state["dim"]), TORCH_DTYPES[state.dtype])

    def _step(self, task: Task, layout: StepLayout, columns: int) -> "np.ndarray[Any, np.dtype[np.int32]]":
        bucket, lengths = task.bucket, self._lengths(task)
        decode = bucket.max_query == 1
        packed = np.zeros(layout.bytes // 4, np.int32)

        def put(name: str, values: Any) -> None:
            at = layout.offsets[name] // 4
            packed[at : at + len(values)] = values

        count = len(lengths)
        packed[: len(META)] = [bucket.tokens, count, count, columns]
        put("positions", [n - 1 for n in lengths] if decode else np.arange(bucket.tokens))
        starts = np.arange(count + 1) if decode else np.array([0, bucket.tokens])
        put("query_start", np.concatenate([starts, np.full(bucket.sequences - count, starts[-1])]))
        put("seq_lens", lengths)
        put("slots", np.arange(count))
        tables = 1 + np.arange(sum(-(-n // BLOCK) for n in lengths), dtype=np.int32)
        np.random.default_rng(0).shuffle(tables)
        for name in layout.offsets:
            if name.startswith("table_"):
                put(name, tables)
        return packed


class _Results(Addresses):
    """Addresses whose results differ by index."""

    def __init__(self, base: Addresses, outs: list[int]) -> None:
        super().__init__(**vars(base))
        self.outs = outs

    def of(self, pointer: Pointer) -> int:
        if pointer.space == "logits":
            return self.outs[int(pointer.name or 0)] + pointer.offset
        return super().of(pointer)


def tune(
    tasks: Iterable[Task],
    target: CudaTarget,
    level: int,
    cache: Path,
    chip: str,
    on_progress: Progress = lambda done, total, what: None,
    seconds: float = 0.02,
    cutlass: Supply = NO_CUTLASS,
) -> TuningData:
    """Time every candidate of every task. Ones that do not compile or fail at launch are left out, and said so."""
    drafts: list[tuple[Task, dict[str, Any], ProgramDraft]] = []
    for task in tasks:
        drafts += [
            (task, candidate, task.draft(candidate, target, level, cutlass)) for candidate in task.candidates
        ]
    cubins = _build_all([d for _, _, d in drafts], target, cache, on_progress)
    library = _build_library([d for _, _, d in drafts], cache, on_progress)
    data = TuningData(chip)
    bench = Bench(target, cutlass_cache(cache))
    by_key = {c.key: c for c in cubins.values()}
    for index, (task, candidate, draft) in enumerate(drafts):
        on_progress(index, len(drafts), f"{task.family} {dict(task.problem)}")
        if any(s not in cubins for s in draft.sources()) or (draft.instances() and not library):
            continue
        try:
            us = bench.time(task, finish_program(draft, cubins, library), by_key, seconds)
        except (KernelError, RuntimeError) as error:
            on_progress(index, len(drafts), f"left out: {task.family} {candidate}: {error}")
            continue
        data.add(task.family, task.problem, candidate, us)
    return data


def _build_all(
    drafts: Sequence[ProgramDraft], target: CudaTarget, cache: Path, on_progress: Progress
) -> dict[KernelSource, Cubin]:
    sources = list(dict.fromkeys(s for d in drafts for s in d.sources()))

    def said(done: int, total: int) -> None:
        on_progress(done, total, "compiling")

    try:
        return build_kernels(sources, target, cache, said)
    except KernelBuildError:  # one of many: find the others one by one, from the cache
        good: dict[KernelSource, Cubin] = {}
        for source in sources:
            try:
                good |= build_kernels([source], target, cache)
            except KernelBuildError as error:
                on_progress(len(good), len(sources), f"left out: {error}"[:300])
        return good


def _build_library(drafts: Sequence[ProgramDraft], cache: Path, on_progress: Progress) -> str:
    """One library of all CUTLASS instances; its name, empty where none is called or none can be built."""
    instances = sorted({i for d in drafts for i in d.instances()}, key=lambda i: i.name)
    if not instances:
        return ""

    def said(done: int, total: int, name: str) -> None:
        on_progress(done, total, f"compiling {name}")

    on_progress(0, len(instances), "compiling CUTLASS kernels")
    try:
        return provide_library(instances, cutlass_cache(cache), said).stem
    except BuildFailed as error:
        on_progress(0, len(instances), f"left out: CUTLASS kernels: {error}")
        return ""


def _shape(value: Value, dims: Mapping[str, int]) -> list[int]:
    return [int(substitute(d, dict(dims))) for d in value.shape]


def _bytes(value: Value) -> int:
    assert isinstance(value.type, TensorType)
    return (
        int(math.prod(int(d) for d in value.shape if isinstance(d, int))) * TORCH_DTYPES[value.dtype].itemsize
    )


def _block_bytes(state: StateType) -> int:
    return 2 * int(state["heads"]) * BLOCK * int(state["dim"]) * TORCH_DTYPES[state.dtype].itemsize
