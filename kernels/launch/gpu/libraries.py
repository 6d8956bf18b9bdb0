"""Library calls among a program's launches: cuBLAS through torch, opaque torch operators, CUTLASS instances.

A maker turns a call's arguments into a closure once; the closure is what a step runs, or a graph captures.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import torch

from compilerllm.kernels.errors import ArtifactError
from compilerllm.kernels.launch.dtypes import TORCH_DTYPES, TRITON_TYPES
from compilerllm.kernels.launch.gpu.program import Kernel

# By Triton's names, which a kernel's ABI has.
TORCH_TYPES: dict[str, torch.dtype] = {TRITON_TYPES[name]: dtype for name, dtype in TORCH_DTYPES.items()}


class TensorMaker(Protocol):
    """Tensors over memory that a program owns."""

    def __call__(self, address: int, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor: ...


@dataclass(frozen=True)
class LibraryCall:
    """One call: ``values`` are its arguments, pointers as addresses; ``dims`` the step's T, S, R.

    stream: the stream's handle, for libraries that are told it; torch's current stream is the same one.
    """

    kernel: Kernel
    values: tuple[int | float, ...]
    dims: Mapping[str, int]
    tensor: TensorMaker
    folder: Path
    stream: int

    @property
    def fixed(self) -> dict[str, Any]:
        """What the compiler fixed, by name."""
        return dict(self.kernel.constexprs)

    def operand(self, index: int, shape: Sequence[int]) -> torch.Tensor:
        """Argument ``index``, a pointer, as a dense tensor of the type that the kernel's ABI gives it."""
        return self.tensor(int(self.values[index]), TORCH_TYPES[self.kernel.types[index][1:]], shape)


Maker = Callable[[LibraryCall], Callable[[], object]]
MAKERS: dict[str, Maker] = {}
_PROVIDERS = {"cutlass_gemm": "cutlass", "cutlass_grouped_gemm": "cutlass", "aten": "aten_calls"}


def library(name: str) -> Callable[[Maker], Maker]:
    """Register the function below as what makes calls of ``library:<name>``."""

    def register(maker: Maker) -> Maker:
        MAKERS[name] = maker
        return maker

    return register


def find_maker(name: str) -> Maker:
    """The maker of ``library:<name>``. Raises ``ArtifactError`` for one that this version does not have."""
    if name not in MAKERS and name in _PROVIDERS:
        import_module(f"compilerllm.kernels.launch.gpu.{_PROVIDERS[name]}")
    if name not in MAKERS:
        raise ArtifactError(
            f"the artifact calls the library function {name!r}, which this version does not have. Build the artifact again."
        )
    return MAKERS[name]


def nothing() -> None:
    """What a call on no rows does."""


@library("matmul")
def matmul(call: LibraryCall) -> Callable[[], object]:
    """out [M, N] = x [M, K] @ w [N, K].T, accumulated in f32. Arguments x, w, out, M; fixed k, n."""
    k, n, m = int(call.fixed["k"]), int(call.fixed["n"]), int(call.values[3])
    if m == 0:
        return nothing
    x, w, out = call.operand(0, (m, k)), call.operand(1, (n, k)), call.operand(2, (m, n))
    if out.dtype == x.dtype:
        return partial(torch.mm, x, w.t(), out=out)
    if x.is_cuda:
        return partial(torch.ops.aten.mm.dtype_out, x, w.t(), out.dtype, out=out)
    return lambda: out.copy_(x.float() @ w.float().t())
