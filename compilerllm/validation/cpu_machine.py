"""Runs the CPU program of a module: emitted, compiled and loaded here, over poisoned results and caches and fenced operands.

Operands end where memory begins that may not be touched: a kernel that reads beyond one ends the process.
"""

import ctypes
import mmap
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
from compilerllm.kernels.launch.memory import aligned
from compilerllm.kernels.launch.packing import ParameterSpec, load_parameters, stored_bytes
from compilerllm.kernels.launch.program import CpuProgram
from compilerllm.validation.machine import Guarded

THREADS = 2
PROT_NONE = 0  # of <sys/mman.h>, which the module mmap leaves out


class Fenced:
    """``size`` bytes at ``address``, all ones until written; those before them too, and those behind are out of bounds."""

    def __init__(self, size: int) -> None:
        page = mmap.PAGESIZE
        held = page + -(-size // page) * page
        self._map = mmap.mmap(-1, held + page, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        ctypes.memset(start, 0xFF, held)
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        if libc.mprotect(start + held, page, PROT_NONE) != 0:
            raise OSError(ctypes.get_errno(), "a page cannot be put out of bounds")
        self.address = start + held - size

    @staticmethod
    def copy(address: int, size: int, room: int = 0) -> "Fenced":
        """Of ``size`` bytes elsewhere, with ``room`` bytes for them, which decide their alignment."""
        made = Fenced(max(size, room))
        ctypes.memmove(made.address, address, size)
        return made


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
        _held, packed = load_parameters(specs, read, self.library)
        self._weights = {
            s.name: Fenced.copy(packed[s.name], stored_bytes(s), aligned(stored_bytes(s))) for s in specs
        }
        self._states: dict[str, Fenced] = {}
        for entry in entries["states"]:
            size = self.library.kv_block_bytes(entry["dtype"], entry["heads"], entry["dim"]) * num_blocks
            self._states[entry["name"]] = Fenced(size)
        self._program = CpuProgram(self.library, self._spec, THREADS)
        addresses = {n: w.address for n, w in self._weights.items()}
        self._program.bind(addresses, {n: r.address for n, r in self._states.items()})
        self.outputs: list[Guarded] = []

    def run(
        self, dims: Mapping[str, int], step: StepInputs | None, inputs: Sequence[Tensor] = ()
    ) -> list[Tensor]:
        """Main's results at these sizes; ``outputs`` has them with their guards."""
        dense = [t.contiguous() for t in inputs]
        given = [Fenced.copy(t.data_ptr(), t.numel() * t.element_size()) for t in dense]
        sizes: dict[str, int] = dict(dims)
        self.outputs = [
            Guarded([int(substitute(d, dict(sizes))) for d in v.shape], TORCH_DTYPES[v.dtype])
            for v in self.module.main.outputs
        ]
        named = {n: sizes[n] for n in self._spec["dims"]}
        results = [o.tensor for o in self.outputs]
        self._program.run(0, named, [f.address for f in given], [t.data_ptr() for t in results], step)
        return results
