"""What kernel templates are validated with, as units: a case on one target, and the templates' functions behind it."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

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
from compilerllm.validation.reach import cpp_names, triton_functions
from compilerllm.validation.sampling import SAMPLING, SamplingCase, run_sampling, sampling_templates

# What packs weights and serves every program, called from the host.
_HOST = "pack_rows packed_bytes kv_block_bytes"


@dataclass(frozen=True, eq=False)
class Unit:
    """A case on a target. functions: "module.function" of Triton's templates, or names in the C++ ones."""

    case: KernelCase | SamplingCase
    target: str
    functions: frozenset[str]

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
    every: list[KernelCase | SamplingCase] = [*cases(), *SAMPLING]
    for case in every:
        if target in case.targets:
            yield Unit(case, target, _cuda(case) if target == CUDA else _cpu(case))


def _cuda(case: KernelCase | SamplingCase) -> frozenset[str]:
    if isinstance(case, SamplingCase):
        templates = sampling_templates(case)
    else:
        with narrowed(case.limits), torch_products():
            templates = [k.template for k in cuda_machine(case).program.kernels]
    return frozenset(f for t in templates if not t.startswith("library") for f in triton_functions(t))


def _cpu(case: KernelCase | SamplingCase) -> frozenset[str]:
    return cpp_names("cllm_sample" if isinstance(case, SamplingCase) else cpu_program(case).source + _HOST)


def all_units() -> list[Unit]:
    """Of both targets."""
    return [*units(CUDA), *units(CPU)]
