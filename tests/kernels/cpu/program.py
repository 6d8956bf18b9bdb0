"""Runs a module, given as text, as a CPU program and in the reference, over the same random weights and inputs."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from compilerllm.cpu_artifact import program_entries
from compilerllm.ir.recipe import Read, Recipe, print_recipe
from compilerllm.ir.step import Bucket
from compilerllm.ir.text import parse_module
from compilerllm.ir.verify import verify
from compilerllm.kernels.cpu.build import build_library
from compilerllm.kernels.cpu.emit import emit_program
from compilerllm.kernels.cpu.select import select_layouts
from compilerllm.kernels.cpu.target import host_target
from compilerllm.kernels.launch.dtypes import TORCH_DTYPES
from compilerllm.kernels.launch.library import Library
from compilerllm.kernels.launch.packing import ParameterSpec, load_parameters
from compilerllm.kernels.launch.program import CpuProgram
from compilerllm.kernels.reference.interpreter import Interpreter
from compilerllm.passes.pipeline import Options, run_pipeline

THREADS = 2


@dataclass(frozen=True)
class Outcome:
    """got: the program's results. want: the reference's, of the module before any pass. kernels: templates that ran."""

    got: list[Tensor]
    want: list[Tensor]
    kernels: tuple[str, ...]


def run_text(text: str, folder: Path, *, T: int, fuse: bool = True, seed: int = 0) -> Outcome:
    """Build ``text`` (no states, one dimension T at most) in ``folder`` and run it once with ``T`` rows."""
    module = parse_module(text)
    verify(module)
    generator = torch.Generator().manual_seed(seed)

    def random(shape: Sequence[object], dtype: str) -> Tensor:
        extents = [T if str(d) == "T" else int(str(d)) for d in shape]
        return torch.randn(extents, generator=generator).to(TORCH_DTYPES[dtype])

    weights = {p.name: random(p.type.shape, p.type.dtype) for p in module.param_instances()}
    inputs = [random(v.shape, v.dtype) for v in module.main.inputs]
    want = list(Interpreter(module, weights).run(*inputs))

    if fuse:
        module, _ = run_pipeline(module, Options(serve=False, verify=True))
    target = host_target()
    module = select_layouts(module, target)
    program = emit_program(module, target)
    library = Library(build_library(program.source, target, folder))
    spec = program_entries(module, program, (Bucket(T, 1, 1, T),))["program"]

    def read(recipe: Recipe) -> Tensor:
        assert isinstance(recipe, Read), f"this helper reads whole weights, not {print_recipe(recipe)}"
        return weights[recipe.name]

    specs = [
        ParameterSpec(p.name, p.type.dtype, tuple(int(d) for d in p.type.shape), p.recipe)
        for p in module.param_instances()
    ]
    region, addresses = load_parameters(specs, read, library)
    cpu = CpuProgram(library, spec, THREADS)
    cpu.bind(addresses, {})
    got = [torch.full_like(t, -7) for t in want]  # a value that no kernel leaves by chance
    cpu.run(0, dict.fromkeys(spec["dims"], T), [t.data_ptr() for t in inputs], [t.data_ptr() for t in got])
    del region  # alive until here: the program reads it
    return Outcome(got, want, tuple(use.spec.template for use in program.kernels))
