"""A kernel whose weights are on their way before its predecessor has ended still waits for what that one writes."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from compilerllm.ir.step import Bucket
from compilerllm.ir.text import parse_module
from compilerllm.kernels.launch.gpu.program import Addresses, Kernel, Launch, Pointer, Program
from compilerllm.kernels.triton.build import compile_source
from compilerllm.kernels.triton.emit import build_program, draft_program
from compilerllm.kernels.triton.source import KernelSource, generated
from compilerllm.kernels.triton.target import find_cuda_target

pytestmark = pytest.mark.gpu
ROWS, N, K = 1, 4096, 2048
SPINS = 200_000  # of the slow kernel: about a millisecond, a hundred times what the next one takes
OLD, NEW = 1.0, 3.0
TEXT = f"""func @main(%x: bf16[T, {K}]) {{
  dim T in [1, 64]
  param %w : bf16[{N}, {K}]
  %y = linear(%x, %w) : bf16[T, {N}]
  return %y
}}"""
KERNELS = """
import triton
import triton.language as tl


@triton.jit
def slow(x, value, spins, BLOCK: tl.constexpr):
    tl.extra.cuda.gdc_launch_dependents()
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    state = n
    for _ in range(spins):
        state = state * 1664525 + 1013904223
    tl.store(x + n, tl.where(state == 12345, 0.0, value).to(x.dtype.element_ty))


@triton.jit
def impatient(x, y, BLOCK: tl.constexpr):
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    early = tl.load(x + n)
    tl.extra.cuda.gdc_wait()
    tl.store(y + n, early)
"""
TYPES = {"slow": {"x": "*bf16", "value": "fp32", "spins": "i32"}, "impatient": {"x": "*bf16", "y": "*bf16"}}
CANDIDATES: dict[str, dict[str, Any]] = {
    "gemv": {"path": "gemv", "bn": 4, "bk": 1024, "pre": 2, "warps": 4},
    "gemv_rows": {"path": "gemv_rows", "bn": 4, "steps": 2, "warps": 4},
    "skinny": {"path": "skinny", "bm": 1, "bn": 4, "bk": 1024, "pre": 2, "swap": True, "warps": 4, "stages": 1},
    "matmul": {"path": "matmul", "bm": 16, "bn": 64, "bk": 128, "split": 1, "swap": True, "ahead": 4, "group": 8,
               "warps": 4, "stages": 4},
}  # fmt: skip


class Take:
    def __init__(self, candidate: dict[str, Any]) -> None:
        self.candidate = candidate

    def choose(
        self, family: str, problem: Mapping[str, int | str], found: Sequence[dict[str, Any]]
    ) -> dict[str, Any]:
        return self.candidate


def kernel(folder: Path, name: str, pdl: bool) -> Kernel:
    """One of the test's own, compiled into the folder."""
    template = f"{generated(KERNELS)}:{name}"
    source = KernelSource.of(template, TYPES[name], {"BLOCK": K // 16}, num_warps=4, pdl=pdl)
    code, meta = compile_source(source, 90)
    (folder / f"{source.key()}.cubin").write_bytes(code)
    return Kernel(meta["name"], source.key(), name, tuple(TYPES[name].values()), 4, meta["shared"], pdl)


def linear(folder: Path, candidate: dict[str, Any]) -> Program:
    """The linear alone at the level that loads weights early."""
    draft = draft_program(
        parse_module(TEXT), [Bucket(ROWS, 1, 1, 1)], find_cuda_target("sm_90"), 3, Take(candidate)
    )
    built = build_program(draft, folder / "cache")
    for cubin in built.cubins.values():
        (folder / "kernels" / f"{cubin.key}.cubin").write_bytes(cubin.file.read_bytes())
    return built.program


@pytest.mark.parametrize("path", CANDIDATES)
def test_a_slow_predecessor_is_waited_for(path: str, tmp_path: Path) -> None:
    from compilerllm.kernels.launch.gpu.backend import CudaBackend

    (tmp_path / "kernels").mkdir()
    program = linear(tmp_path, CANDIDATES[path])
    assert all(k.pdl for k in program.kernels), "nothing would start early"
    own = [kernel(tmp_path / "kernels", name, pdl) for name, pdl in (("slow", False), ("impatient", True))]
    whole = Program((*own, *program.kernels), program.plans, program.counters)
    backend = CudaBackend(90)
    loaded = backend.load(whole, tmp_path)
    w = backend.allocate(2 * N * K, "weights").view(torch.bfloat16).view(N, K)
    x, out, seen = (backend.allocate(2 * n, "values").view(torch.bfloat16) for n in (K, N, K))
    w.copy_(torch.randn(N, K, device="cuda", dtype=torch.bfloat16) * 0.02)
    where = Addresses(
        {"w": w.data_ptr()}, {}, {"input_0": x.data_ptr(), "seen": seen.data_ptr()},
        backend.allocate(max(256, program.plans[0].arena_bytes), "values").data_ptr(), out.data_ptr(),
        backend.allocate(4 * max(1, program.counters), "values").zero_().data_ptr(),
    )  # fmt: skip
    at = Pointer("table", "input_0")
    slow = Launch(0, (16, 1, 1), (at, NEW, SPINS), "slow")
    hasty = Launch(1, (16, 1, 1), (at, Pointer("table", "seen")), "impatient")
    real = tuple(replace(launch, kernel=launch.kernel + 2) for launch in program.plans[0].launches)

    def run(*launches: Launch) -> None:
        x.fill_(OLD)
        out.fill_(float("nan"))
        torch.cuda.synchronize()
        bound = loaded.bind(replace(program.plans[0], launches=launches), where)
        bound.run()
        backend.synchronize()
        x.fill_(OLD)
        torch.cuda.synchronize()
        backend.capture(bound.run)()
        backend.synchronize()

    run(slow, hasty)
    assert (seen == OLD).all(), (
        "a read before the wait came after the write: the test could not see a wrong order"
    )
    run(slow, *real)
    torch.testing.assert_close(out.float(), NEW * w.float().sum(1), rtol=2e-2, atol=2e-2)
