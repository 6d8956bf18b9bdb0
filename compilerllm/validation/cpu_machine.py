"""Runs the CPU program of a module: emitted, compiled and loaded here, over poisoned results, caches and surroundings."""

import ctypes
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from torch import Tensor

from compilerllm.cpu_artifact import program_entries
from compilerllm.ir.dims import substitute
from compilerllm.ir.graph import Module
from compilerllm.ir.recipe import Recipe
from compilerllm.ir.step import Bucket, StepInputs
from compilerllm.kernels.cpu.build import build_library
from compilerllm.kernels.cpu.emit import emit_program
from compilerllm.kernels.cpu.select import select_layouts
from compilerllm.kernels.cpu.target import CpuTarget, host_target
from compilerllm.kernels.launch.dtypes import TORCH_DTYPES
from compilerllm.kernels.launch.library import Library
from compilerllm.kernels.launch.memory import Region
from compilerllm.kernels.launch.packing import ParameterSpec, load_parameters
from compilerllm.kernels.launch.program import CpuProgram
from compilerllm.validation.machine import Guarded, surrounded

THREADS = 2


class CpuMachine:
    """A module's program with its weights packed and ``num_blocks`` blocks in every state, all of them NaN.

    ``read`` carries a recipe out. ``largest`` bounds a run's dims. The library is built in ``folder``. Raises
    ``UnsupportedByTarget`` and ``BuildFailed``.
    """

    def __init__(
        self, module: Module, read: Callable[[Recipe], Tensor], folder: Path, largest: Bucket, *,
        target: CpuTarget | None = None, num_blocks: int = 16,
    ) -> None:  # fmt: skip
        target = target or host_target()
        self.module = module = select_layouts(module, target)
        program = emit_program(module, target)
        self.kernels = tuple(use.spec.template for use in program.kernels)
        self.headers = frozenset(program.headers)
        self.source = program.source
        self.library = Library(build_library(program.source, target, folder))
        entries = program_entries(module, program, (largest,))
        self._spec = entries["program"]

        specs = [
            ParameterSpec(p.name, p.type.dtype, tuple(int(d) for d in p.type.shape), p.recipe)
            for p in module.param_instances()
        ]
        self._weights, addresses = load_parameters(specs, read, self.library)
        self._states: dict[str, Region] = {}
        for entry in entries["states"]:
            size = self.library.kv_block_bytes(entry["dtype"], entry["heads"], entry["dim"]) * num_blocks
            region = Region(size, f"blocks of {entry['name']}")
            ctypes.memset(region.address, 0xFF, size)
            self._states[entry["name"]] = region
        self._program = CpuProgram(self.library, self._spec, THREADS)
        self._program.bind(addresses, {n: r.address for n, r in self._states.items()})
        self.outputs: list[Guarded] = []

    def run(
        self, dims: Mapping[str, int], step: StepInputs | None, inputs: Sequence[Tensor] = ()
    ) -> list[Tensor]:
        """Main's results at these sizes; ``outputs`` has them with their guards."""
        given = [surrounded(t.contiguous()) for t in inputs]
        sizes: dict[str, int] = dict(dims)
        self.outputs = [
            Guarded([int(substitute(d, dict(sizes))) for d in v.shape], TORCH_DTYPES[v.dtype])
            for v in self.module.main.outputs
        ]
        named = {n: sizes[n] for n in self._spec["dims"]}
        results = [o.tensor for o in self.outputs]
        self._program.run(0, named, [t.data_ptr() for t in given], [t.data_ptr() for t in results], step)
        return results
