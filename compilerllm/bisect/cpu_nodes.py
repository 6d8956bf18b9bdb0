"""The CPU's kernels node by node: a function at a time as a program of its own, in which every value keeps its bytes.

A layer function's program is the code that the model's own has for it; only the offsets differ, and those are a table.
Its weights are packed for one call at a time.
"""

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from compilerllm.bisect.errors import CannotCompare
from compilerllm.bisect.evaluate import Site, instance, number, run_node
from compilerllm.bisect.nodes import Seen, operand_of, reads_state, writes_state
from compilerllm.bisect.parameters import Parameters
from compilerllm.bisect.workload import Workload
from compilerllm.ir.graph import Graph, Module, Node, Value
from compilerllm.ir.step import StepInputs
from compilerllm.ir.text import print_node
from compilerllm.ir.types import StateType, StepType, TensorType
from compilerllm.kernels.cpu.build import build_library
from compilerllm.kernels.cpu.emit import emit_program
from compilerllm.kernels.cpu.target import CpuTarget
from compilerllm.kernels.groups import paged_windows
from compilerllm.kernels.launch.aten import tensor_at
from compilerllm.kernels.launch.dtypes import TORCH_DTYPES
from compilerllm.kernels.launch.library import Library, kv_block_bytes
from compilerllm.kernels.launch.memory import Region, aligned
from compilerllm.kernels.launch.packing import ParameterSpec, load_parameters
from compilerllm.kernels.launch.program import CpuProgram
from compilerllm.kernels.reference.states import BLOCK_SIZE, State, Step
from compilerllm.kernels.refs import VIEW_OPS, view_roots
from compilerllm.kernels.spec import KernelSpec

Values = dict[Value, Tensor]


@dataclass(frozen=True, eq=False)
class Part:
    """A graph that runs as a program: a layer function with the rotary tables it reads, or main without its calls.

    before: nodes put in front, main's, whose results it does not show. outer: its parameters that are main's.
    """

    graph: Graph
    name: str
    before: tuple[Node, ...] = ()
    outer: frozenset[str] = frozenset()


def main_part(module: Module) -> Part:
    """Main with the results of its calls as inputs."""
    main = module.main
    calls = [n for n in main.nodes if n.op == "call"]
    given = tuple(v for n in calls for v in n.outputs)
    rest = tuple(n for n in main.nodes if n.op != "call")
    return Part(replace(main, inputs=(*main.inputs, *given), nodes=rest), "main")


def layer_part(module: Module, call: Node) -> Part:
    """The function of a call. Rotary tables come as the kernels keep them, so that they are made inside."""
    main, callee = module.main, module.functions[call.fn]
    made = main.producers()
    tables = {
        inner: given
        for inner, given in zip(callee.inputs, call.inputs, strict=True)
        if given is not None and given in made and made[given].op == "rotary_table"
    }
    before: dict[Node, None] = {}

    def need(node: Node) -> None:
        for value in node.operands:
            if value in made:
                need(made[value])
        before.setdefault(node)

    for given in tables.values():
        need(made[given])
    renamed = {given: inner for inner, given in tables.items()}
    front = tuple(replace(n, outputs=tuple(renamed.get(v, v) for v in n.outputs)) for n in before)
    read = {v for n in front for v in n.operands}
    params = [p for p in main.params if p.value in read]
    steps = [v for v in main.inputs if v in read and isinstance(v.type, StepType)]
    graph = replace(
        callee, name="main", dims=tuple({d.name: d for d in (*main.dims, *callee.dims)}.values()),
        inputs=(*(v for v in callee.inputs if v not in tables), *steps), params=(*callee.params, *params),
        nodes=(*front, *callee.nodes),
    )  # fmt: skip
    return Part(graph, callee.name, front, frozenset(p.name for p in params))


class _OpenProgram(CpuProgram):
    """A program whose arena is looked into."""

    @property
    def arena(self) -> Region:
        return self._arena


class PartProgram:
    """A part, compiled. Values of its nodes can be read after a run."""

    def __init__(self, part: Part, module: Module, target: CpuTarget, cache: Path, threads: int) -> None:
        self.part, self.threads = part, threads
        groups = {n.fn for n in part.graph.nodes if n.op == "group"}
        own = Module({"main": part.graph, **{n: module.functions[n] for n in groups}}, module.attrs)
        self.module = own
        self.program = emit_program(own, target)
        self.library = Library(build_library(self.program.source, target, cache))
        self.windows = paged_windows(own)
        # Of each node with a kernel of a template, by its text, in the order of the source.
        self.specs: dict[str, list[KernelSpec]] = {}
        for use in self.program.kernels:
            self.specs.setdefault(use.node, []).append(use.spec)
        self._views = view_roots(part.graph)
        self._ready: dict[tuple[int, ...], _OpenProgram] = {}

    def _planned(self, dims: Mapping[str, int]) -> tuple[_OpenProgram, list[int]]:
        """The program with a place for every value, none shared, and the places."""
        end, offsets, scratch = 0, [], []
        for _, value in self.program.slots:
            offsets.append(end)
            end += aligned(number(value.tensor.nbytes, dims))
        for size in self.program.scratch:
            scratch.append(end)
            end += aligned(number(size, dims))
        key = tuple(dims[n] for n in self.program.dims)
        if key not in self._ready:
            plan = {"arena_bytes": end, "offsets": offsets, "scratch": scratch}
            calls = [vars(c) for c in self.program.host_calls]
            spec: dict[str, Any] = {
                "dims": self.program.dims, "params": self.program.params, "states": self.program.states,
                "plans": [plan], "host_calls": calls,
            }  # fmt: skip
            self._ready[key] = _OpenProgram(self.library, spec, self.threads)
        return self._ready[key], offsets

    def run(
        self, inputs: Values, params: Mapping[str, int], states: Mapping[str, int], dims: Mapping[str, int],
        step: StepInputs, windows: Sequence[int | None],
    ) -> Values:  # fmt: skip
        """Every value that has memory, views included, copied."""
        cpu, offsets = self._planned(dims)
        cpu.bind(params, states)
        graph = self.part.graph
        tables = [step.block_tables[windows.index(w)] for w in self.windows]
        own = replace(step, block_tables=_stack(tables, step))
        given = [inputs[v].contiguous() for v in graph.inputs if isinstance(v.type, TensorType)]
        results = [
            torch.full([number(d, dims) for d in v.shape], -77, dtype=TORCH_DTYPES[v.dtype])
            for v in graph.outputs
        ]
        ctypes.memset(cpu.arena.address, 0xFF, cpu.arena_bytes)  # NaN: what is never written shows
        sizes = {n: dims[n] for n in self.program.dims}
        cpu.run(0, sizes, [t.data_ptr() for t in given], [t.data_ptr() for t in results], own)
        values: Values = dict(zip(graph.outputs, results, strict=True))
        for (_, value), offset in zip(self.program.slots, offsets, strict=True):
            shape = tuple(number(d, dims) for d in value.shape)
            values.setdefault(value, tensor_at(cpu.arena.address + offset, value.dtype, shape).clone())
        for node in graph.nodes:
            source = node.input(0)
            if (
                node.op in VIEW_OPS
                and node.outputs[0] not in values
                and (source in values or source in inputs)
            ):
                assert source is not None
                values[node.outputs[0]] = run_node(
                    node, [values.get(source, inputs.get(source))], dims, False
                )[0]
        return values

    def has_code(self, node: Node) -> bool:
        """Whether a kernel computes it: not a view, not one of main's put in front."""
        return (
            node.op != "call"
            and node not in self.part.before
            and not (node.op in VIEW_OPS and node.outputs[0] in self._views)
        )


def _stack(tables: Sequence[Any], step: StepInputs) -> Any:
    return np.ascontiguousarray(np.stack(tables)) if tables else step.block_tables[:0]


class CpuNodes:
    """A served module with its weights' layouts, run for ``target`` a function at a time. A ``NodeRunner``."""

    def __init__(
        self, module: Module, params: Parameters, target: CpuTarget, cache: Path, threads: int
    ) -> None:
        self.module, self.params, self.target = module, params, target
        self.cache, self.threads = cache, threads
        self.logits: list[Tensor] = []
        self.layers: dict[str, list[list[Tensor]]] = {}  # by call: of each step its results
        self._programs: dict[tuple[Any, ...], PartProgram] = {}
        self.windows = paged_windows(module)

    @property
    def total(self) -> int:
        """Calls of layers, and main's two ends."""
        return sum(1 for _ in self.module.calls()) + 2

    def _program(self, part: Part, key: tuple[Any, ...]) -> PartProgram:
        if key not in self._programs:
            self._programs[key] = PartProgram(part, self.module, self.target, self.cache, self.threads)
        return self._programs[key]

    def run(self, work: Workload) -> Iterator[Seen]:
        """Main up to its first call, the layers one by one over all steps, the rest of main."""
        steps = work.steps(len(self.windows))
        program = self._program(main_part(self.module), ("main",))
        weights = self._weights(program, "")
        calls = [n for n in self.module.main.nodes if n.op == "call"]
        late = self._after_calls()
        known: list[Values] = [{} for _ in steps]  # results of calls
        outer: list[Values] = [{} for _ in steps]
        stale = True
        told: set[Node] = set()
        for call in (*calls, None):
            wanted = self.module.main.nodes if call is None else self._needed(call)
            if stale and (call is None or any(n in late or n not in told for n in wanted)):
                for at, step in enumerate(steps):
                    outer[at] = self._run_main(program, weights[1], step, known[at])
                ready = [n for n in wanted if n not in told and n.op != "call"]
                for node in ready:
                    for at, step in enumerate(steps):
                        seen = self._seen(program, node, "", "", outer[at] | known[at], {}, {}, at, step)
                        if seen is not None:
                            yield seen
                told.update(ready)
            if call is not None:
                yield from self._run_call(call, steps, outer, known, work)
                stale = True
        self.logits = [o[self.module.main.outputs[0]].float() for o in outer]
        del weights

    def _after_calls(self) -> set[Node]:
        """Main's nodes that depend on a call."""
        made, found = self.module.main.producers(), set[Node]()
        for node in self.module.main.nodes:
            if any(v in made and (made[v].op == "call" or made[v] in found) for v in node.operands):
                found.add(node)
        return found

    def _needed(self, call: Node) -> list[Node]:
        """Main's nodes that a call's operands come from, calls left out, in order."""
        made, found = self.module.main.producers(), set[Node]()
        pending = list(call.operands)
        while pending:
            node = made.get(pending.pop())
            if node is not None and node.op != "call" and node not in found:
                found.add(node)
                pending += node.operands
        return [n for n in self.module.main.nodes if n in found]

    def _dims(self, graph: Graph, step: StepInputs) -> dict[str, int]:
        dims = {"T": len(step.token_ids), "S": len(step.seq_lens), "R": len(step.sample_rows)}
        if other := {d.name for d in graph.dims} - dims.keys():
            raise CannotCompare(f"@{graph.name} has the dimension {min(other)}, which no step tells")
        return dims

    def _weights(self, program: PartProgram, prefix: str) -> tuple[Region, dict[str, int]]:
        """A part's parameters in the kernels' layouts, by local name."""
        graph, outer = program.part.graph, program.part.outer
        specs, names = [], {}
        for param in graph.params:
            bound = self.params.bound(instance(graph, param.name, "" if param.name in outer else prefix))
            names[param.name] = bound.name
            shape = tuple(int(d) for d in bound.type.shape)
            specs.append(ParameterSpec(bound.name, bound.type.dtype, shape, bound.recipe))
        region, addresses = load_parameters(specs, self.params.execute, program.library)
        return region, {local: addresses[name] for local, name in names.items()}

    def _run_main(
        self, program: PartProgram, weights: Mapping[str, int], step: StepInputs, known: Values
    ) -> Values:
        graph = program.part.graph
        dims = self._dims(graph, step)
        inputs = {
            v: known[v]
            if v in known
            else torch.zeros([number(d, dims) for d in v.shape], dtype=TORCH_DTYPES[v.dtype])
            for v in graph.inputs
            if isinstance(v.type, TensorType)
        }
        return program.run(inputs, weights, {}, dims, step, self.windows)

    def _run_call(
        self, call: Node, steps: Sequence[StepInputs], outer: Sequence[Values], known: Sequence[Values], work: Workload
    ) -> Iterator[Seen]:  # fmt: skip
        callee = self.module.functions[call.fn]
        made = self.module.main.producers()
        tables = tuple(v for v in call.operands if v in made and made[v].op == "rotary_table")
        program = self._program(layer_part(self.module, call), (call.fn, *tables))
        prefix, suffix = call.text("params", ""), call.text("states", "")
        region, weights = self._weights(program, prefix)
        caches = {v: _Cache(v.state, work.num_blocks, self.windows) for v in callee.states}
        addresses = {v.name: c.region.address for v, c in caches.items()}
        seen: dict[Node, list[Seen]] = {}
        self.layers[prefix] = []
        for at, step in enumerate(steps):
            dims = self._dims(program.part.graph, step)
            given = {
                inner: (known[at] | outer[at])[value]
                for inner, value in zip(callee.inputs, call.inputs, strict=True)
                if value is not None
                and isinstance(value.type, TensorType)
                and inner in program.part.graph.inputs
            }
            before = {v: c.state() for v, c in caches.items()}
            values = given | program.run(given, weights, addresses, dims, step, self.windows)
            after = {v: c.state() for v, c in caches.items()}
            for node in callee.nodes:
                found = self._seen(program, node, prefix, suffix, values, before, after, at, step)
                if found is not None:
                    seen.setdefault(node, []).append(found)
            results = [values[v] for v in callee.outputs]
            known[at].update(zip(call.outputs, results, strict=True))
            self.layers[prefix].append(results)
        for items in seen.values():
            yield from items
        del region

    def _seen(
        self, program: PartProgram, node: Node, prefix: str, suffix: str, values: Values,
        before: Mapping[Value, State], after: Mapping[Value, State], at: int, step: StepInputs,
    ) -> Seen | None:  # fmt: skip
        """What a node took and gave; None for one without code, or whose values lie in a form of the kernels' own."""
        if not program.has_code(node) or not all(v in values for v in node.outputs):
            return None
        graph = program.part.graph
        dims = self._dims(graph, step)
        ready = Step(step)
        operands: list[Any] = []
        for value in node.inputs:
            if value is None:
                operands.append(None)
            elif isinstance(value.type, StateType):
                operands.append(
                    before[value] if writes_state(node.op) or not reads_state(node.op) else after[value]
                )
            elif isinstance(value.type, StepType):
                operands.append(ready)
            else:
                part = program.part
                operands.append(
                    operand_of(part.graph, value, values, self.params, prefix, dims, ready, part.outer)
                )
        written = [after[v] for v in node.operands if v in after] if writes_state(node.op) else []
        specs = tuple(program.specs.get(print_node(node), ()))
        results = [values[v] for v in node.outputs]
        site = Site(replace(graph, name=program.part.name), node, prefix, suffix)
        return Seen(site, specs, operands, results, written, at, ready, dims)


class _Cache:
    """A state's blocks as the CPU's kernels keep them (csrc/kv_cache.h)."""

    def __init__(self, type: StateType, num_blocks: int, windows: Sequence[int | None]) -> None:
        if type.addressing != "paged":
            raise CannotCompare(f"a state {type} is not paged; CPU programs have no kernels for it")
        self.type, self.blocks, self.group = type, num_blocks, windows.index(type.get("window"))
        size = kv_block_bytes(type.dtype, type["heads"], type["dim"])
        self.region = Region(size * num_blocks, "KV blocks")

    def state(self) -> State:
        """A copy in the reference's layout [blocks, 32, 2, heads, dim]."""
        heads, dim = self.type["heads"], self.type["dim"]
        wide = -(-dim // 32) * 32
        half = heads * BLOCK_SIZE * wide
        raw = tensor_at(self.region.address, self.type.dtype, (self.blocks, 2 * half))
        if self.type.dtype == "bf16":  # pairs of d side by side in K, pairs of tokens in V
            k = raw[:, :half].reshape(-1, heads, 2, wide // 2, 16, 2).permute(0, 2, 4, 1, 3, 5)
            v = raw[:, half:].reshape(-1, heads, 16, wide // 16, 16, 2).permute(0, 2, 5, 1, 3, 4)
        else:
            k = raw[:, :half].reshape(-1, heads, 2, wide, 16).permute(0, 2, 4, 1, 3)
            v = raw[:, half:].reshape(-1, heads, BLOCK_SIZE, wide).permute(0, 2, 1, 3)
        parts = [t.reshape(self.blocks, BLOCK_SIZE, heads, wide)[..., :dim] for t in (k, v)]
        return State(self.type, torch.stack(parts, 2).contiguous(), self.group)
