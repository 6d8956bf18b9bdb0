"""A GPU's kernels node by node: a bucket's launches over an arena in which no bytes are used twice, then every value read.

On a machine without a GPU the launches run in Triton's interpreter, by the same code.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compilerllm.bisect.evaluate import Site, instance, number
from compilerllm.bisect.nodes import Seen, operand_of, reads_state, writes_state
from compilerllm.bisect.parameters import Parameters
from compilerllm.bisect.plan import Overlap, cuda_overlaps
from compilerllm.bisect.workload import BLOCK, Workload
from compilerllm.cuda_artifact import flat_module, prepare_bucket
from compilerllm.ir.graph import Graph, Module, Node, Value
from compilerllm.ir.step import Bucket, StepInputs
from compilerllm.ir.text import print_node
from compilerllm.ir.types import StateType, StepType
from compilerllm.kernels.groups import paged_windows
from compilerllm.kernels.launch.dtypes import TORCH_DTYPES
from compilerllm.kernels.launch.gpu.backend import Backend, BoundPlan
from compilerllm.kernels.launch.gpu.parameters import Placement, load_parameters
from compilerllm.kernels.launch.gpu.program import Addresses, Pointer, samples_all
from compilerllm.kernels.launch.gpu.steps import StepStage
from compilerllm.kernels.launch.packing import ParameterSpec
from compilerllm.kernels.reference.states import State, Step
from compilerllm.kernels.refs import VIEW_OPS, Ref
from compilerllm.kernels.spec import KernelSpec
from compilerllm.kernels.triton.emit import ProgramDraft, build_program, finish_program
from compilerllm.kernels.triton.emitter import BucketEmitter, Chooser
from compilerllm.kernels.triton.target import CudaTarget
from compilerllm.kernels.tuning import problem_key

FOREVER = 1 << 30


@dataclass(frozen=True, eq=False)
class Made:
    """A choice that a node's emitter made: of which candidates."""

    family: str
    problem: str
    candidates: Sequence[Mapping[str, Any]]
    chosen: Mapping[str, Any]


class OneChoice:
    """A chooser that decides every choice, so that each node runs one candidate. ``forced``: by (family, problem)."""

    def __init__(
        self, base: Chooser, forced: Mapping[tuple[str, str], Mapping[str, Any]] | None = None
    ) -> None:
        self._base, self._forced = base, forced or {}
        self.made: list[Made] = []

    def choose(
        self, family: str, problem: Mapping[str, int | str], candidates: Sequence[dict[str, Any]]
    ) -> dict[str, Any]:
        key = family, problem_key(problem)
        wanted = self._forced.get(key)
        known = wanted is not None and dict(wanted) in candidates
        config = dict(wanted or {}) if known else self._base.choose(family, problem, candidates)
        self.made.append(Made(*key, tuple(candidates), config))
        return config


class _OpenEmitter(BucketEmitter):
    """An emitter that tells where each result is, and which choices each node made."""

    def placed(self, value: Value) -> tuple[Ref, Pointer] | None:
        ref = self._refs.get(value)
        return None if ref is None else (ref, self._bases[ref.base])

    def choose(
        self, node: Node, family: str, problem: Mapping[str, int | str], candidates: Sequence[dict[str, Any]]
    ) -> dict[str, Any]:
        config = super().choose(node, family, problem, candidates)
        assert isinstance(self.chooser, OneChoice)
        self.choices.setdefault(node, []).append(self.chooser.made[-1])
        return config

    @property
    def choices(self) -> dict[Node, list[Made]]:
        if not hasattr(self, "_made"):
            self._made: dict[Node, list[Made]] = {}
        return self._made


class CudaNodes:
    """A served module as a GPU's programs, of the buckets that a workload needs. A ``NodeRunner``.

    shares: the arena is planned as a build plans it; otherwise every value keeps its bytes.
    """

    def __init__(
        self, module: Module, params: Parameters, target: CudaTarget, level: int, buckets: Sequence[Bucket],
        backend: Backend, chooser: OneChoice, folder: Path, *, shares: bool = False, cache: Path | None = None,
    ) -> None:  # fmt: skip
        """``cache``: where cubins are kept; None for a backend that interprets."""
        self.module, self.params, self.target, self.level = flat_module(module), params, target, level
        self.backend, self.chooser, self.shares, self.cache = backend, chooser, shares, cache
        self.folder = folder
        self.windows = paged_windows(self.module)
        self._all_buckets = buckets
        self.logits: list[Tensor] = []

    @property
    def total(self) -> int:
        return 0

    def buckets_of(self, work: Workload) -> list[Bucket]:
        """For each step the smallest bucket that holds it."""
        order = sorted(self._all_buckets, key=lambda b: (b.tokens, b.rows))
        found = []
        for step in work.steps(len(self.windows)):
            every = len(step.sample_rows) == len(step.token_ids)
            found.append(next(b for b in order if b.holds(step) and (every or not samples_all(b))))
        return found

    def prepare(self, work: Workload) -> None:
        """Emit, place and load what the workload needs."""
        self.backend.attach()
        self._step_buckets = self.buckets_of(work)
        self._buckets = tuple(dict.fromkeys(self._step_buckets))
        self._graphs: list[Graph] = []
        self._emitters: list[_OpenEmitter] = []
        emitted = []
        for bucket in self._buckets:
            prepared = prepare_bucket(self.module, bucket)
            emitter = _OpenEmitter(prepared, bucket, self.target, self.windows, self.level, self.chooser)
            emitted.append(emitter.emit())
            self._graphs.append(prepared.main)
            self._emitters.append(emitter)
        if not self.shares:
            for one in emitted:
                for memory in one.memory.values():
                    memory.first, memory.last = 0, FOREVER
        draft = ProgramDraft(self.target, tuple(emitted))
        if self.cache is None:
            self.program = finish_program(draft)
        else:
            built = build_program(draft, self.cache)
            self.program = built.program
            (self.folder / "kernels").mkdir(parents=True, exist_ok=True)
            for cubin in built.cubins.values():
                (self.folder / "kernels" / f"{cubin.key}.cubin").write_bytes(cubin.file.read_bytes())
        self.memory = [one.memory for one in emitted]
        self._load(work)

    def overlaps(self) -> Iterator[Overlap]:
        """Faults of the plan, after ``prepare`` with ``shares``."""
        for graph, memory in zip(self._graphs, self.memory, strict=True):
            yield from cuda_overlaps(graph, memory)

    def _load(self, work: Workload) -> None:
        backend, specs = self.backend, dict[str, ParameterSpec]()
        for graph in self._graphs:
            for param in graph.params:
                bound = self.params.bound(instance(graph, param.name, ""))
                shape = tuple(int(d) for d in bound.type.shape)
                specs[param.name] = ParameterSpec(param.name, bound.type.dtype, shape, bound.recipe)
        self._weights, params = load_parameters(backend, Placement.of(specs.values()), self.params.source)
        self._arena = backend.allocate(
            max(p.arena_bytes for p in self.program.plans) + 256, "intermediate values"
        )
        rows, width = max(b.rows for b in self._buckets), int(self._graphs[0].outputs[0].shape[-1])
        self._logits = backend.allocate(rows * width * 4, "logits")
        self._counters = backend.allocate(4 * max(1, self.program.counters), "counters")
        self._last = backend.allocate(4 * len(work.sequences), "last tokens")
        self._states: dict[str, tuple[StateType, Tensor]] = {}
        addresses = {}
        for value in {v.name: v for graph in self._graphs for v in graph.states}.values():
            state = value.state
            shape = (work.num_blocks, 2, state["heads"], BLOCK, state["dim"])
            nbytes = torch.Size(shape).numel() * TORCH_DTYPES[state.dtype].itemsize
            memory = backend.allocate(nbytes, "KV cache")
            addresses[value.name] = memory.data_ptr()
            self._states[value.name] = (
                state,
                backend.tensor(memory.data_ptr(), TORCH_DTYPES[state.dtype], shape),
            )
        columns = max(-(-len(s) // BLOCK) for s in work.sequences)
        self._stage = StepStage(backend, self._buckets, len(self.windows), columns)
        loaded = backend.load(self.program, self.folder)
        self._where = [
            Addresses(
                params=params, states=addresses, tables={"last_token": self._last.data_ptr()},
                arena=self._arena.data_ptr(), logits=self._logits.data_ptr(), counters=self._counters.data_ptr(),
                step_base=self._stage.address, step=self._stage.offsets(i),
            )
            for i in range(len(self._buckets))
        ]  # fmt: skip
        self._plans: list[BoundPlan] = [
            loaded.bind(plan, where) for plan, where in zip(self.program.plans, self._where, strict=True)
        ]

    def _clear(self) -> None:
        def work() -> None:
            for tensor in (self._counters, self._last, *(t for _, t in self._states.values())):
                tensor.zero_()

        self.backend.do(work)

    def _run_step(self, index: int, step: StepInputs) -> dict[str, int]:
        """One step, at its bucket's sizes if it is a decode (as graphs run them), else at its own; gives its own."""
        bucket = self._buckets[index]
        own = len(step.token_ids), len(step.seq_lens), len(step.sample_rows)
        sizes = (bucket.tokens, bucket.sequences, bucket.rows) if bucket.max_query == 1 else own
        self.backend.do(lambda: void(self._arena.fill_(0xFF)))  # NaN: what is never written shows
        self._stage.send(index, step, None, sizes)
        plan = self._plans[index]
        plan.size(dict(zip("TSR", sizes, strict=True)))
        plan.run()
        self.backend.synchronize()
        return dict(zip("TSR", own, strict=True))

    def run_whole(self, work: Workload) -> list[Tensor]:
        """Logits of every step."""
        self.prepare(work)
        self._clear()
        result = []
        for step, bucket in zip(work.steps(len(self.windows)), self._step_buckets, strict=True):
            index = self._buckets.index(bucket)
            dims = self._run_step(index, step)
            result.append(self._read(index, self._graphs[index].outputs[0], dims))
        return [r.float() for r in result if r is not None]

    def run(self, work: Workload) -> Iterator[Seen]:
        self.prepare(work)
        self._clear()
        self.logits = []
        for at, (step, bucket) in enumerate(
            zip(work.steps(len(self.windows)), self._step_buckets, strict=True)
        ):
            index = self._buckets.index(bucket)
            before = self._snapshot()
            dims = self._run_step(index, step)
            yield from self._look(index, at, step, dims, before, self._snapshot())

    def _snapshot(self) -> dict[str, State]:
        """The states in the reference's layout [blocks, 32, 2, heads, dim]."""
        self.backend.synchronize()
        return {
            name: State(
                type, data.permute(0, 3, 1, 2, 4).contiguous().cpu(), self.windows.index(type.get("window"))
            )
            for name, (type, data) in self._states.items()
        }

    def _look(
        self, index: int, at: int, step: StepInputs, dims: Mapping[str, int], before: Mapping[str, State],
        after: Mapping[str, State],
    ) -> Iterator[Seen]:  # fmt: skip
        graph, emitter, ready = self._graphs[index], self._emitters[index], Step(step)
        calls: dict[int, list[KernelSpec]] = {}
        for call in emitter.out.calls:
            calls.setdefault(call.node, []).append(call.spec)
        values: dict[Value, Tensor] = {}
        for position, node in enumerate(graph.nodes):
            results = [self._read(index, v, dims) for v in node.outputs]
            values.update({v: r for v, r in zip(node.outputs, results, strict=True) if r is not None})
            if position not in calls and node.op in VIEW_OPS:
                continue
            if position not in calls:
                continue  # another node's kernel does its work
            writes = writes_state(node.op)
            operands: list[Any] = []
            for value in node.inputs:
                if value is None:
                    operands.append(None)
                elif isinstance(value.type, StateType):
                    operands.append(
                        before[value.name] if writes or not reads_state(node.op) else after[value.name]
                    )
                elif isinstance(value.type, StepType):
                    operands.append(ready)
                else:
                    operands.append(operand_of(graph, value, values, self.params, "", dims, ready))
            written = [after[v.name] for v in node.operands if v.name in after] if writes else []
            yield Seen(Site(graph, node), tuple(calls[position]), operands, results, written, at, ready, dims)
        self.logits.append(values[graph.outputs[0]].float())

    def _read(self, index: int, value: Value, dims: Mapping[str, int]) -> Tensor | None:
        """A result's elements for the step's own sizes; None where it has no place."""
        found = self._emitters[index].placed(value)
        if found is None:
            return None
        ref, pointer = found
        if pointer.space == "arena":
            pointer = Pointer("arena", "", self.memory[index][pointer.name].offset + pointer.offset)
        elif pointer.space == "step":
            return None
        dtype = TORCH_DTYPES[ref.dtype]
        shape = [number(d, dims) for d in ref.shape]
        strides = [number(s, dims) for s in ref.strides]
        address = self._where[index].of(pointer) + number(ref.offset, dims) * dtype.itemsize
        if 0 in shape:
            return torch.empty(shape, dtype=dtype)
        span = 1 + sum((e - 1) * s for e, s in zip(shape, strides, strict=True))
        flat = self.backend.tensor(address, dtype, (span,))
        return flat.as_strided(shape, strides).cpu().clone()

    def choices_of(self, path: str, node: str) -> list[Made]:
        """The choices behind a node's kernel, of the first bucket that has it."""
        for emitter in self._emitters:
            for made_for, made in emitter.choices.items():
                if made_for.origin.path == path and print_node(made_for).strip() == node:
                    return made
        return []


def void(result: object) -> None:
    """Forget a result: for lambdas that are run for what they do."""
