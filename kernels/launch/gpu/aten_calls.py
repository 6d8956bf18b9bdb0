"""Opaque torch operators among a program's launches, on tensors over the program's memory."""

import json
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

from compilerllm.kernels.launch.aten import HostProgram
from compilerllm.kernels.launch.dims import evaluate
from compilerllm.kernels.launch.dtypes import TORCH_DTYPES
from compilerllm.kernels.launch.gpu.libraries import LibraryCall, library


@lru_cache(maxsize=256)
def _program(text: str) -> tuple[HostProgram, tuple[str, ...]]:
    spec: dict[str, Any] = json.loads(text)
    return HostProgram(spec), tuple(spec["dims"])


@library("aten")
def aten(call: LibraryCall) -> Callable[[], None]:
    """Arguments: operands, results, then the sizes that shapes depend on. fixed: ``call``, a host call as JSON text."""
    program, names = _program(call.fixed["call"])
    tensors = [*program.inputs, *program.outputs]
    dims = dict(zip(names, map(int, call.values[len(tensors) :]), strict=True))
    made = [
        call.tensor(int(address), TORCH_DTYPES[dtype], [evaluate(d, dims) for d in shape])
        for address, (dtype, shape) in zip(call.values, tensors, strict=False)
    ]
    return partial(program.run_on, made, dims)
