"""Runs a program's kernels in Triton's interpreter on CPU memory: the proof of a program where there is no GPU."""

import ctypes
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from compilerllm.kernels.errors import ArtifactError
from compilerllm.kernels.launch.gpu.libraries import TORCH_TYPES, LibraryCall, find_maker
from compilerllm.kernels.launch.gpu.program import Kernel
from compilerllm.kernels.triton.source import function

_ON_CPU = ("matmul", "aten")


def run_kernel(kernel: Kernel, grid: tuple[int, int, int], values: Sequence[int | float]) -> None:
    """One launch. Pointers in ``values`` are CPU addresses, in the order of ``kernel.types``."""
    if kernel.template.startswith("library:"):
        run_library(kernel, values)
        return
    if 0 in grid:
        return
    fn = function(kernel.template, interpreted=True)
    constants = dict(kernel.constexprs)
    widest: dict[
        int, int
    ] = {}  # bytes at each address: the interpreter wants storages there to be of one size
    for type, value in zip(kernel.types, values, strict=True):
        if type.startswith("*"):
            size = TORCH_TYPES[type[1:]].itemsize
            widest[int(value)] = max(size, widest.get(int(value), 0))
    given = iter(zip(kernel.types, values, strict=True))
    args: dict[str, Any] = {}
    for name in fn.arg_names:
        if name in constants:
            args[name] = False if name == "PDL" else constants[name]
            continue
        type, value = next(given)
        if type.startswith("*"):
            memory = _tensor(int(value), torch.uint8, (widest[int(value)],))
            args[name] = memory.view(TORCH_TYPES[type[1:]])
        else:
            args[name] = value
    fn[grid](**args)


def run_library(kernel: Kernel, values: Sequence[int | float]) -> None:
    """A library call on CPU tensors. Raises ``ArtifactError`` for one that has no CPU form."""
    name = kernel.template.partition(":")[2]
    if name not in _ON_CPU:
        raise ArtifactError(f"library call {name!r} cannot be interpreted on a CPU; leave its candidates out")
    find_maker(name)(LibraryCall(kernel, tuple(values), {}, _tensor, Path(), 0))()


def _tensor(address: int, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    count = math.prod(shape)
    memory = (ctypes.c_char * max(1, count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype, count=max(1, count))[:count].view(tuple(shape))
