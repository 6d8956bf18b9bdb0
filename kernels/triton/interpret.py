"""Runs a program's kernels in Triton's interpreter on CPU memory: the proof of a program where there is no GPU."""

import ctypes
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from compilerllm.kernels.errors import ArtifactError
from compilerllm.kernels.launch.gpu.program import Kernel
from compilerllm.kernels.triton.source import function

_TORCH: dict[str, torch.dtype] = {
    "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64, "i64": torch.int64,
    "i32": torch.int32, "i16": torch.int16, "i8": torch.int8, "u8": torch.uint8, "i1": torch.bool,
}  # fmt: skip
LibraryCall = Callable[[Mapping[str, Any], Sequence[tuple[str, int | float]]], None]


def tensor_at(address: int, type: str, count: int) -> torch.Tensor:
    """``count`` elements at a CPU address, not owned. ``type`` is Triton's name."""
    dtype = _TORCH[type]
    memory = (ctypes.c_char * max(1, count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype, count=count)


def run_kernel(kernel: Kernel, grid: tuple[int, int, int], values: Sequence[int | float]) -> None:
    """One launch. Pointers in ``values`` are CPU addresses, in the order of ``kernel.types``."""
    if kernel.template.startswith("library:"):
        run_library(kernel, values)
        return
    if 0 in grid:
        return
    fn = function(kernel.template, interpreted=True)
    constants = dict(kernel.constexprs)
    given = iter(zip(kernel.types, values, strict=True))
    args: dict[str, Any] = {}
    for name in fn.arg_names:
        if name in constants:
            args[name] = False if name == "PDL" else constants[name]
            continue
        type, value = next(given)
        args[name] = tensor_at(int(value), type[1:], 1) if type.startswith("*") else value
    fn[grid](**args)


def run_library(kernel: Kernel, values: Sequence[int | float]) -> None:
    """A library call on CPU tensors. Raises ``ArtifactError`` for one that has no CPU form."""
    name = kernel.template.partition(":")[2]
    fixed = dict(kernel.constexprs)
    if name == "matmul":
        x, w, out, m = values
        k, n = int(fixed["k"]), int(fixed["n"])
        xt, wt, ot = (t[1:] for t in kernel.types[:3])
        a = tensor_at(int(x), xt, int(m) * k).view(int(m), k)
        b = tensor_at(int(w), wt, n * k).view(n, k)
        tensor_at(int(out), ot, int(m) * n).view(int(m), n).copy_(a.float() @ b.float().t())
        return
    if name == "aten":
        from compilerllm.kernels.triton.interpret_aten import run_aten

        run_aten(kernel, values)
        return
    raise ArtifactError(f"library call {name!r} cannot be interpreted on a CPU; leave its candidates out")
