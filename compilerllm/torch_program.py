"""A compiled torch function: the CPU program of its graph, weights packed when first seen, memory planned per shape."""

import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from compilerllm.ir.graph import DimDecl, Module, ParamInstance
from compilerllm.ir.recipe import Read, Recipe, reads
from compilerllm.ir.step import Bucket
from compilerllm.kernels.cpu.build import build_library
from compilerllm.kernels.cpu.emit import emit_program
from compilerllm.kernels.cpu.refs import C_TYPES
from compilerllm.kernels.cpu.select import select_layouts
from compilerllm.kernels.cpu.target import find_target
from compilerllm.kernels.errors import UnsupportedByTarget
from compilerllm.kernels.launch.dims import evaluate
from compilerllm.kernels.launch.dtypes import IR_DTYPES, TORCH_DTYPES
from compilerllm.kernels.launch.library import Library
from compilerllm.kernels.launch.memory import Region
from compilerllm.kernels.launch.packing import ParameterSpec, store, stored_bytes
from compilerllm.kernels.launch.program import CpuProgram
from compilerllm.kernels.launch.weights import execute
from compilerllm.kernels.reference.interpreter import Interpreter
from compilerllm.planning import alias_table, plan_program
from compilerllm.torch_prepare import dtypes

PLANS_KEPT = 16  # shapes whose memory stays reserved; the one used longest ago goes first


class Runner(Protocol):
    """Runs a module's ``main`` on tensors."""

    def run(
        self, inputs: Sequence[Tensor], params: Mapping[str, Tensor], dims: Mapping[str, int]
    ) -> list[Tensor]:
        """``params`` are the tensors that recipes read, by name; ``dims`` the numbers of this call."""
        ...


class ReferenceRunner:
    """Level 0: the interpreter, node by node in torch."""

    def __init__(self, module: Module) -> None:
        self.module = module

    def run(
        self, inputs: Sequence[Tensor], params: Mapping[str, Tensor], dims: Mapping[str, int]
    ) -> list[Tensor]:
        source = TensorSource(params)
        ready = {p.name: execute(p.recipe, source, name=p.name) for p in self.module.param_instances()}
        results = Interpreter(self.module, ready).run(*inputs)
        # A copy in the graph may have become the identity; the caller may write to what it gets.
        taken = {t.untyped_storage().data_ptr() for t in (*inputs, *params.values())}
        own: list[Tensor] = []
        for result in results:
            fresh = result.clone() if result.untyped_storage().data_ptr() in taken else result
            taken.add(fresh.untyped_storage().data_ptr())
            own.append(fresh)
        return own


@dataclass(frozen=True, eq=False)
class TensorSource:
    """Live tensors as a weight source: a recipe's ``read`` finds them by name."""

    tensors: Mapping[str, Tensor]

    def names(self) -> Iterable[str]:
        return self.tensors

    def describe(self, name: str) -> tuple[str, tuple[int, ...]]:
        tensor = self.tensors[name]
        return IR_DTYPES[tensor.dtype], tuple(tensor.shape)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        tensor = self.tensors[name].detach()
        return tensor if tensor.dim() == 0 else tensor[start:stop]


class _Weight:
    """One parameter in the kernels' layout, made anew when a tensor it comes from has changed.

    The sources are held, so that their addresses stay theirs: same address and same version mean same numbers.
    """

    def __init__(self, instance: ParamInstance, library: Library) -> None:
        shape = tuple(int(extent) for extent in instance.type.shape)
        self.spec = ParameterSpec(instance.name, instance.type.dtype, shape, instance.recipe)
        self.library = library
        self.sources = tuple(dict.fromkeys(reads(instance.recipe)))
        self.made_from: list[tuple[Tensor, int]] | None = None
        self.region: Region | None = None

    def address(self, tensors: Mapping[str, Tensor]) -> int:
        """Where the kernels read it, for these tensors."""
        now = [tensors[name] for name in self.sources]
        if self.spec.recipe == Read(self.sources[0] if self.sources else "") and now[0].is_contiguous():
            return now[0].data_ptr()
        if self.region is None:
            self.region = Region(stored_bytes(self.spec), f"weight {self.spec.name}")
            self.made_from = None
        if self.made_from is None or not self._same(now):
            source = TensorSource(tensors)
            store(self.spec, lambda recipe: self._read(recipe, source), self.library, self.region.address)
            self.made_from = [(t.detach(), _version(t)) for t in now]
        return self.region.address

    def _read(self, recipe: Recipe, source: TensorSource) -> Tensor:
        return execute(recipe, source, name=self.spec.name)

    def _same(self, now: list[Tensor]) -> bool:
        assert self.made_from is not None
        return all(
            t.data_ptr() == old.data_ptr() and t.stride() == old.stride() and version == _version(t) != -1
            for t, (old, version) in zip(now, self.made_from, strict=True)
        )


def _version(tensor: Tensor) -> int:
    """How often the tensor was written in place; -1 where torch does not count (inference tensors)."""
    return -1 if tensor.is_inference() else tensor._version


class CpuRunner:
    """The module as a CPU program, built through the cache of libraries in ``cache``.

    Raises ``UnsupportedByTarget`` for an op, dtype or shape without a kernel, ``BuildFailed`` without a C++ compiler.
    """

    def __init__(self, module: Module, cache: Path, threads: int, target: str = "cpu") -> None:
        found = find_target(target)
        if unknown := sorted(d for g in module.functions.values() for d in dtypes(g) if d not in C_TYPES):
            raise UnsupportedByTarget(
                f"{found.name} has no kernels for {unknown[0]} tensors; use bfloat16 or float32, or options={{'level': 0}}"
            )
        self.module = select_layouts(module, found)
        self.program = emit_program(self.module, found)
        self.library = Library(build_library(self.program.source, found, cache))
        self.threads = threads
        self._aliases = alias_table(self.module)
        self._weights = {p.name: _Weight(p, self.library) for p in self.module.param_instances()}
        self._outputs = [(dtype, [str(extent) for extent in shape]) for dtype, shape in self.program.outputs]
        self._ready: OrderedDict[tuple[int, ...], CpuProgram] = OrderedDict()
        self._lock = threading.Lock()

    def run(
        self, inputs: Sequence[Tensor], params: Mapping[str, Tensor], dims: Mapping[str, int]
    ) -> list[Tensor]:
        for tensor in (*inputs, *params.values()):
            if tensor.device.type != "cpu":
                raise UnsupportedByTarget(f"the backend compiles for CPU, but an input is on {tensor.device}")
        with self._lock:
            program = self._planned(dims)
            dense = [t.contiguous() for t in inputs]
            program.bind({name: w.address(params) for name, w in self._weights.items()}, {})
            results = [
                torch.empty([evaluate(e, dims) for e in shape], dtype=TORCH_DTYPES[dtype])
                for dtype, shape in self._outputs
            ]
            program.run(0, dims, [t.data_ptr() for t in dense], [t.data_ptr() for t in results])
        return results

    def _planned(self, dims: Mapping[str, int]) -> CpuProgram:
        """The program with memory planned for these dims."""
        key = tuple(dims[name] for name in self.program.dims)
        if key in self._ready:
            self._ready.move_to_end(key)
            return self._ready[key]
        exact = {
            name: replace(graph, dims=tuple(DimDecl(d.name, dims[d.name], dims[d.name]) for d in graph.dims))
            for name, graph in self.module.functions.items()
        }
        plan = plan_program(Module(exact), self.program, Bucket(0, 0, 0, 0), self._aliases, dims)
        spec: dict[str, Any] = {
            "dims": self.program.dims, "params": self.program.params, "states": [], "plans": [plan],
            "host_calls": [vars(call) for call in self.program.host_calls],
        }  # fmt: skip
        self._ready[key] = CpuProgram(self.library, spec, self.threads)
        while len(self._ready) > PLANS_KEPT:
            self._ready.popitem(last=False)
        return self._ready[key]
