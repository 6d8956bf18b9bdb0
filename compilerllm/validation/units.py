"""What kernel templates are validated with, as units: a case on one target, and the template files its kernels are made of."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from compilerllm.kernels.cpu.build import SOURCE_DIR
from compilerllm.validation.kernel_cases import CPU, CUDA, KernelCase, cases
from compilerllm.validation.kernels import (
    KernelFinding,
    cpu_program,
    cuda_machine,
    narrowed,
    run_cpu,
    run_cuda,
    torch_products,
)
from compilerllm.validation.sampling import SAMPLING, SamplingCase, run_sampling


@dataclass(frozen=True, eq=False)
class Unit:
    """A case on a target. files: template files behind it, by stem; own: those that its kernels are directly in."""

    case: KernelCase | SamplingCase
    target: str
    files: frozenset[str]
    own: frozenset[str]

    @property
    def title(self) -> str:
        return f"{self.target} {self.case.title}"

    def run(self, folder: Path) -> list[KernelFinding]:
        """What validation finds; CPU libraries are built in ``folder``."""
        if isinstance(self.case, SamplingCase):
            return run_sampling(self.case, self.target, folder)
        return run_cuda(self.case) if self.target == CUDA else run_cpu(self.case, folder)


def units(target: str) -> Iterator[Unit]:
    """All of a target. Templates are imported on the way."""
    for case in (*cases(), *SAMPLING):
        if target not in case.targets:
            continue
        own = frozenset(_cuda_files(case) if target == CUDA else _cpu_files(case))
        files = frozenset(
            f for stem in own for f in (_triton_closure(stem) if target == CUDA else _includes(stem))
        )
        yield Unit(case, target, files, own)


def _cuda_files(case: KernelCase | SamplingCase) -> Iterator[str]:
    if isinstance(case, SamplingCase):
        yield from ("sampling", "penalties", "logprobs")
        return
    with narrowed(case.limits), torch_products():
        for kernel in cuda_machine(case).program.kernels:
            stem = kernel.template.partition(":")[0]
            if stem.startswith("generated_"):
                yield from _triton_imports(stem)
            elif stem != "library":
                yield stem


def _cpu_files(case: KernelCase | SamplingCase) -> Iterator[str]:
    if isinstance(case, SamplingCase):
        yield from ("sample", "sampler")
        return
    yield from (Path(h).stem for h in cpu_program(case).headers)
    yield "pack"  # the loader's, of every program


@cache
def _triton_imports(stem: str) -> tuple[str, ...]:
    from compilerllm.kernels.triton.source import _IMPORT, source_text

    return tuple(_IMPORT.findall(source_text(stem).partition("\0")[0]))


@cache
def _triton_closure(stem: str) -> frozenset[str]:
    found, wanted = set[str](), [stem]
    while wanted:
        name = wanted.pop()
        if name not in found:
            found.add(name)
            wanted += _triton_imports(name)
    return frozenset(found)


@cache
def _includes(stem: str) -> frozenset[str]:
    """A header and all that it includes."""
    found, wanted = set[str](), [stem]
    while wanted:
        name = wanted.pop()
        if name in found:
            continue
        found.add(name)
        for file in (SOURCE_DIR / f"{name}.h", SOURCE_DIR / f"{name}.cpp"):
            if file.exists():
                wanted += re.findall(r'^#include "(\w+)\.h"', file.read_text(), re.M)
    return frozenset(found)


def all_units() -> list[Unit]:
    """Of both targets."""
    return [*units(CUDA), *units(CPU)]
