"""Runs an opaque torch operator in the middle of a step, on memory the program owns."""

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from compilerllm.kernels.errors import ArtifactError
from compilerllm.kernels.launch.dims import evaluate

DTYPES: dict[str, torch.dtype] = {
    "f64": torch.float64, "f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16, "i64": torch.int64,
    "i32": torch.int32, "i16": torch.int16, "i8": torch.int8, "u8": torch.uint8, "bool": torch.bool,
}  # fmt: skip


def tensor_at(address: int, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """A dense tensor over memory at ``address``; it owns nothing."""
    kind = DTYPES[dtype]
    count = 1
    for extent in shape:
        count *= extent
    if count == 0:
        return torch.empty(shape, dtype=kind)
    buffer = (ctypes.c_char * (count * kind.itemsize)).from_address(address)
    return torch.frombuffer(buffer, dtype=kind, count=count).view(shape)


def find_operator(target: str) -> Any:
    """``aten.topk.default`` as torch has it. Raises ``ArtifactError``."""
    found: Any = torch.ops
    try:
        for part in target.split("."):
            found = getattr(found, part)
    except AttributeError as error:
        raise ArtifactError(f"torch {torch.__version__} has no operator {target!r}; rebuild the artifact with it") from error
    return found


class HostOperator:
    """One opaque node: resolved once, run many times."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        self.operator = find_operator(spec["target"])
        self.args, self.kwargs = spec["args"], spec["kwargs"]
        self.inputs: Sequence[tuple[str, Sequence[str]]] = spec["inputs"]
        self.outputs: Sequence[tuple[str, Sequence[str]]] = spec["outputs"]
        self.where: str = spec["where"]

    def run(self, addresses: Sequence[int], dims: Mapping[str, int]) -> None:
        """Read operands and write results at ``addresses``, inputs first."""
        tensors = [
            tensor_at(address, dtype, tuple(evaluate(d, dims) for d in shape))
            for address, (dtype, shape) in zip(addresses, [*self.inputs, *self.outputs], strict=True)
        ]
        operands, targets = tensors[: len(self.inputs)], tensors[len(self.inputs) :]
        args = [self._decode(a, operands, dims) for a in self.args]
        kwargs = {k: self._decode(v, operands, dims) for k, v in self.kwargs}
        results = self.operator(*args, **kwargs)
        for target, result in zip(targets, results if isinstance(results, tuple | list) else (results,), strict=True):
            target.copy_(result)

    def _decode(self, item: Any, operands: Sequence[torch.Tensor], dims: Mapping[str, int]) -> Any:
        if isinstance(item, list):
            return [self._decode(i, operands, dims) for i in item]
        if not isinstance(item, str):
            return item
        if item.startswith("%"):
            return operands[int(item[1:])]
        if item == "none":
            return None
        kind, _, value = item.partition(":")
        match kind:
            case "dim":
                return evaluate(value, dims)
            case "dtype":
                return DTYPES[value]
            case "text":
                return value
        raise ArtifactError(f"{self.where}: unknown argument {item!r} of an opaque operator; rebuild the artifact")
