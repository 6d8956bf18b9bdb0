"""Compiles host calls ahead of time with AOTInductor; packages are kept by content, as libraries are.

Build time only: what comes out is loaded by torch's C++ loader. A call that Inductor cannot compile, or computes
differently from torch, stays with torch, and the ``Outcome`` says why.
"""

import ast
import dataclasses
import hashlib
import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compilerllm.kernels.cpu.build import compiler
from compilerllm.kernels.cpu.opaque import HostCall
from compilerllm.kernels.cpu.target import CpuTarget
from compilerllm.kernels.errors import KernelError
from compilerllm.kernels.kept import is_whole, keep
from compilerllm.kernels.launch.aten import Steps, load_package
from compilerllm.kernels.launch.dims import evaluate
from compilerllm.kernels.launch.dtypes import TORCH_DTYPES

# What g++ may use for the code around the loops; the generic target gets the compiler's own default.
_MARCH = {"cpu-avx512bf16-amx": "x86-64-v4", "cpu-avx512": "x86-64-v4", "cpu-avx2": "x86-64-v3"}
_LANES = {"cpu-avx512bf16-amx": 512, "cpu-avx512": 512, "cpu-avx2": 256}
_SCALAR = 1  # no instruction set of Inductor's own: the compiler vectorises the loops
_TRACED = (5, 7, 11, 13)  # sizes to trace with: distinct, and neither 0 nor 1, which stand for themselves
_CHECKED = (1, 2, 9)  # sizes at which the result is compared with torch's
_TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


class NotCompiled(KernelError):
    """A host call that stays with torch; the message is the reason."""


@dataclass(frozen=True)
class Outcome:
    """package: the compiled call, or None, and then ``reason``. seconds: what this build spent on it."""

    package: Path | None
    reason: str
    seconds: float


def compile_host_calls(calls: Sequence[HostCall], target: CpuTarget, cache_dir: Path) -> list[Outcome]:
    """Every call compiled into ``cache_dir``, or the reason why not. Equal calls are compiled once."""
    outcomes: dict[str, Outcome] = {}
    keys = [package_key(call, target) for call in calls]
    for key, call in zip(keys, calls, strict=True):
        if key not in outcomes:
            start = time.perf_counter()
            path = cache_dir / f"{key}.pt2"
            reason = ""
            if not is_whole(path):
                try:
                    compile_host_call(call, target, path)
                # Inductor raises whatever its parts raise; each of them means that this call stays with torch.
                except Exception as error:  # noqa: BLE001
                    reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:300] if str(error).strip() else 'no message'}"
            outcomes[key] = Outcome(None if reason else path, reason, time.perf_counter() - start)
    return [outcomes[key] for key in keys]


def package_key(call: HostCall, target: CpuTarget) -> str:
    """What a package depends on: the call, the target, the tools and this file. No path, host or user."""
    described = dataclasses.asdict(call) | {"where": ""}
    own = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
    text = json.dumps([described, target.name, torch.__version__, compiler()[1], own], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


class Region(torch.nn.Module):
    """The steps of a host call over its operands; sizes are read off the operands' shapes."""

    def __init__(self, call: HostCall) -> None:
        super().__init__()
        self.steps = Steps(call.steps, call.results)
        self.sizes = size_places(call)

    def forward(self, *operands: Tensor) -> tuple[Tensor, ...]:
        dims: dict[str, Any] = {name: operands[i].shape[axis] for name, (i, axis) in self.sizes.items()}
        return tuple(self.steps(operands, dims))


def size_places(call: HostCall) -> dict[str, tuple[int, int]]:
    """For each dimension, an operand and its axis that have just that extent."""
    places: dict[str, tuple[int, int]] = {}
    for index, (_, shape) in enumerate(call.inputs):
        for axis, extent in enumerate(shape):
            if extent.isidentifier():
                places.setdefault(extent, (index, axis))
    return places


def compile_host_call(call: HostCall, target: CpuTarget, path: Path) -> None:
    """Export, compile, compare with torch, and put the package at ``path``.

    Raises ``NotCompiled`` for a call that cannot be, and what torch raises where it fails.
    """
    from torch._inductor import aoti_compile_and_package
    from torch.export import Dim, export

    places = size_places(call)
    used = {name for _, shape in (*call.inputs, *call.outputs) for extent in shape for name in _names(extent)}
    used |= {name for text in _sizes([call.steps]) for name in _names(text)}
    if missing := sorted(used - places.keys()):
        raise NotCompiled(f"no operand has an axis of extent {missing[0]}")
    region = Region(call)
    for operator, _, _ in region.steps.steps:
        if torch.Tag.nondeterministic_seeded in getattr(operator, "tags", ()):
            raise NotCompiled(f"{operator} draws random numbers, and Inductor would draw others")
    names = sorted(places)
    if len(names) > len(_TRACED):
        raise NotCompiled(f"it depends on {len(names)} dimensions")
    symbols = {name: Dim(name, min=1) for name in names}
    shapes = tuple(
        {axis: evaluate(extent, symbols) for axis, extent in enumerate(shape) if _names(extent)}  # type: ignore[arg-type]
        for _, shape in call.inputs
    )
    example = _operands(call, dict(zip(names, _TRACED, strict=False)))
    path.parent.mkdir(parents=True, exist_ok=True)
    with torch.no_grad(), tempfile.TemporaryDirectory(dir=path.parent, prefix=".build-") as scratch:
        exported = export(region, example, dynamic_shapes={"operands": shapes}, strict=False)
        made = Path(scratch) / "region.pt2"
        aoti_compile_and_package(exported, package_path=str(made), inductor_configs=settings(target))
        _compare(call, region, load_package(made), names)
        keep(made, path)


def settings(target: CpuTarget) -> dict[str, Any]:
    """Inductor's configuration: this target's instructions and no others, on the one thread that calls."""
    return {
        "cpp.march": _MARCH.get(target.name, ""),
        "cpp.simdlen": _lanes(target),
        "cpp.threads": 1,
    }


def _lanes(target: CpuTarget) -> int:
    """The width Inductor vectorises for; ``_SCALAR`` where what it would use here is not in the target."""
    from torch._inductor import config
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    lanes = _LANES.get(target.name, _SCALAR)
    with config.patch({"cpp.simdlen": lanes}):
        flags = set(pick_vec_isa().build_arch_flags().split())
    return lanes if flags <= set(target.flags) else _SCALAR


def _compare(call: HostCall, region: Region, package: Any, names: Sequence[str]) -> None:
    """Raises ``NotCompiled`` where the package and torch differ by more than rounding."""
    for size in _CHECKED:
        operands = _operands(call, dict.fromkeys(names, size))
        want, got = region(*operands), package.run(list(operands))
        for index, (a, b) in enumerate(zip(want, got, strict=True)):
            same = a.shape == b.shape and a.dtype == b.dtype
            tolerance = _TOLERANCE.get(a.dtype, 0.0)
            if not same or not torch.allclose(a, b, rtol=tolerance, atol=tolerance, equal_nan=True):
                sizes = ", ".join(f"{name} = {size}" for name in names) or "the call's sizes"
                raise NotCompiled(f"result {index} of Inductor's code differs from torch's at {sizes}")


def _operands(call: HostCall, dims: Mapping[str, int]) -> tuple[Tensor, ...]:
    """Random numbers; whole ones are 0, which is an index into anything."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for dtype, shape in call.inputs:
        extents, kind = [evaluate(e, dims) for e in shape], TORCH_DTYPES[dtype]
        random = kind.is_floating_point
        made.append(
            torch.randn(extents, generator=generator).to(kind) if random else torch.zeros(extents, dtype=kind)
        )
    return tuple(made)


def _names(text: str) -> set[str]:
    """The dimensions in an extent's text."""
    return {n.id for n in ast.walk(ast.parse(text, mode="eval")) if isinstance(n, ast.Name)} - {"FloorDiv"}


def _sizes(item: Any) -> list[str]:
    """The symbolic sizes in argument templates."""
    if isinstance(item, list | tuple):
        return [text for i in item for text in _sizes(i)]
    return [item[4:]] if isinstance(item, str) and item.startswith("dim:") else []
