"""Runs opaque torch operators in the middle of a step, on memory the program owns: in torch, or as compiled ahead."""

import ctypes
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from compilerllm.kernels.errors import ArtifactError
from compilerllm.kernels.launch.dims import evaluate
from compilerllm.kernels.launch.dtypes import TORCH_DTYPES

Results = Sequence[Sequence[Any]]  # of each step done so far, the values it gave


def tensor_at(address: int, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """A dense tensor over memory at ``address``; it owns nothing."""
    kind = TORCH_DTYPES[dtype]
    count = 1
    for extent in shape:
        count *= extent
    if count == 0:
        return torch.empty(shape, dtype=kind)
    buffer = (ctypes.c_char * (count * kind.itemsize)).from_address(address)
    return torch.frombuffer(buffer, dtype=kind, count=count).view(shape)


@cache
def find_operator(target: str) -> Any:
    """``aten.topk.default`` as torch has it. Raises ``ArtifactError``."""
    found: Any = torch.ops
    try:
        for part in target.split("."):
            found = getattr(found, part)
    except AttributeError as error:
        raise ArtifactError(
            f"torch {torch.__version__} has no operator {target!r}; rebuild the artifact with it"
        ) from error
    return found


def decode(
    item: Any, operands: Sequence[Any], results: Results = (), dims: Mapping[str, int] | None = None
) -> Any:
    """One argument from its template. Raises ``ArtifactError`` for what is none.

    ``"%2"`` is operand 2, ``"@1.0"`` the first result of step 1, ``"none"`` None, ``"dtype:f32"`` a dtype,
    ``"text:floor"`` a string, ``"dim:T + 1"`` a size; numbers stand for themselves, a list for a list.
    """
    if isinstance(item, list | tuple):
        return [decode(i, operands, results, dims) for i in item]
    if not isinstance(item, str):
        return item
    if item.startswith("%"):
        return operands[int(item[1:])]
    if item.startswith("@"):
        step, _, index = item[1:].partition(".")
        return results[int(step)][int(index)]
    if item == "none":
        return None
    kind, _, value = item.partition(":")
    match kind:
        case "dim":
            return evaluate(value, dims or {})
        case "dtype":
            return TORCH_DTYPES[value]
        case "text":
            return value
    raise ArtifactError(f"unknown argument {item!r} of an opaque operator; rebuild the artifact")


class Steps:
    """A straight run of operators, resolved once: each step is a target with argument templates.

    ``results`` names what comes out, as ``"@j.k"``.
    """

    def __init__(self, steps: Sequence[Sequence[Any]], results: Sequence[str]) -> None:
        self.steps = [(find_operator(target), args, kwargs) for target, args, kwargs in steps]
        self.results = results

    def __call__(
        self, operands: Sequence[Any], dims: Mapping[str, int], device: torch.device | None = None
    ) -> list[Any]:
        """Run them. ``device``: where operators that make tensors of nothing make them (the CPU without it)."""
        done: list[Sequence[Any]] = []
        for operator, args, kwargs in self.steps:
            given = [decode(a, operands, done, dims) for a in args]
            named = {str(k): decode(v, operands, done, dims) for k, v in kwargs}
            if device is not None and any(a.name == "device" for a in operator._schema.arguments):
                named["device"] = device
            result = operator(*given, **named)
            done.append(result if isinstance(result, tuple | list) else (result,))
        return [decode(name, (), done) for name in self.results]


class HostProgram:
    """One host call of a program: opaque operators in a row, from operands to results in the program's memory.

    A call that was compiled ahead (``package``, a file in ``folder``) runs so, unless an operand or result is empty;
    the others run operator by operator in torch. Raises ``ArtifactError`` for a package that does not load.
    """

    def __init__(self, spec: Mapping[str, Any], folder: Path | None = None) -> None:
        self.steps = Steps(spec["steps"], spec["results"])
        self.inputs: Sequence[tuple[str, Sequence[str]]] = spec["inputs"]
        self.outputs: Sequence[tuple[str, Sequence[str]]] = spec["outputs"]
        self.where: str = spec["where"]
        name = spec.get("package")
        self.package = None if name is None or folder is None else load_package(folder / name)

    def run(self, addresses: Sequence[int], dims: Mapping[str, int]) -> None:
        """Read operands and write results at ``addresses``, inputs first."""
        tensors = [
            tensor_at(address, dtype, tuple(evaluate(d, dims) for d in shape))
            for address, (dtype, shape) in zip(addresses, [*self.inputs, *self.outputs], strict=True)
        ]
        self.run_on(tensors, dims)

    def run_on(self, tensors: Sequence[torch.Tensor], dims: Mapping[str, int]) -> None:
        """The same on tensors of any one device, operands first, then results."""
        operands, targets = tensors[: len(self.inputs)], tensors[len(self.inputs) :]
        for target, result in zip(targets, self.compute(operands, dims, tensors[0].device), strict=True):
            if result.shape != target.shape or result.dtype != target.dtype:
                raise ArtifactError(
                    f"an opaque operator gave {result.dtype} {list(result.shape)}, where the program expects "
                    f"{target.dtype} {list(target.shape)}; rebuild the artifact with torch {torch.__version__}"
                )
            target.copy_(result)

    def compute(
        self, operands: Sequence[torch.Tensor], dims: Mapping[str, int], device: torch.device | None = None
    ) -> Sequence[torch.Tensor]:
        """The results for these operands."""
        # Compiled code may assume that an extent is not zero: the sampled rows of a prefill's chunk can be none.
        if self.package is not None and all(t.numel() for t in operands):
            results: Sequence[torch.Tensor] = self.package.run(list(operands))
            return results
        with torch.no_grad():
            return self.steps(operands, dims, device)


def load_package(path: Path) -> Any:
    """Code that AOTInductor compiled, by torch's C++ loader: neither Inductor nor a compiler is needed."""
    try:
        return torch._C._aoti.AOTIModelPackageLoader(str(path), "model", True, 1, -1)
    except RuntimeError as error:
        raise ArtifactError(
            f"{path.name} of the artifact cannot be loaded: {error}. Delete {path.parent} to build it again."
        ) from error
