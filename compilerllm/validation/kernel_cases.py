"""What kernels are tried on: the cases of every family."""

from functools import cache

from compilerllm.validation.cases_attention import attentions
from compilerllm.validation.cases_linear import experts, linears
from compilerllm.validation.cases_rows import embeddings, groups, norms, rotations, routes
from compilerllm.validation.kernel_case import CPU, CUDA, KernelCase, Lengths


@cache
def cases() -> tuple[KernelCase, ...]:
    """All of them, by family."""
    return (
        *norms(), *embeddings(), *linears(), *rotations(), *attentions(), *experts(), *routes(), *groups(),
    )  # fmt: skip


__all__ = ["CPU", "CUDA", "KernelCase", "Lengths", "cases"]
