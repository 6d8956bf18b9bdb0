"""Runs a module, given as text, as a CPU program and in the reference, over the same random weights and inputs."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from compilerllm.ir.step import Bucket
from compilerllm.ir.text import parse_module
from compilerllm.ir.verify import verify
from compilerllm.kernels.launch.dtypes import TORCH_DTYPES
from compilerllm.kernels.reference.interpreter import Interpreter
from compilerllm.passes.pipeline import Options, run_pipeline
from compilerllm.validation.cpu_machine import CpuMachine
from compilerllm.validation.weights import evaluate


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
    machine = CpuMachine(module, lambda recipe: evaluate(recipe, weights), folder, Bucket(T, 1, 1, T))
    got = machine.run({"T": T}, None, inputs)
    assert not any(out.broken() for out in machine.outputs)
    return Outcome(got, want, machine.kernels)
