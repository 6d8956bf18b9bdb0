"""Validation of kernels: cases find nothing in kernels as they are, cover every template, and find what is wrong."""

import ctypes
import os
import signal

import pytest
import torch

from compilerllm.ir.step import Bucket
from compilerllm.ir.text import parse_module
from compilerllm.kernels.cpu.target import CpuTarget, host_target
from compilerllm.kernels.reference.interpreter import Interpreter
from compilerllm.kernels.triton.target import CudaTarget, find_cuda_target
from compilerllm.validation import kernels
from compilerllm.validation.cpu_machine import Fenced
from compilerllm.validation.kernel_cases import CPU, CUDA, cases
from compilerllm.validation.kernels import compare, run_cpu, run_cuda, validate_kernels
from compilerllm.validation.late import scaled_late
from compilerllm.validation.machine import Guarded, surrounded
from compilerllm.validation.module_kernels import verify_kernels
from compilerllm.validation.mutants import ROOT
from compilerllm.validation.mutate import NO_TEMPLATE
from compilerllm.validation.reach import blocks
from compilerllm.validation.sampling import SAMPLING, run_sampling
from compilerllm.validation.trying import CSRC, TEMPLATES
from compilerllm.validation.units import all_units
from compilerllm.validation.weights import Weights

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
QUICK = {
    CUDA: (
        "norm/rows f32", "embed/a step bf16", "linear/matmul f32", "linear/norm, skinny, swapped bf16", "rope/turns f32, 1",
        "route/norm and bias f32", "groups/special values", "attention/dense f32, 37", "experts/sorted rows, 4 at once",
    ),
    CPU: ("norm/rows bf16",),
}  # fmt: skip


@pytest.mark.parametrize("title", QUICK[CUDA])
def test_cuda_kernels_are_valid(title: str) -> None:
    (case,) = [c for c in cases() if c.title == title]
    assert run_cuda(case) == []


@pytest.mark.parametrize("title", QUICK[CPU])
def test_cpu_kernels_are_valid(title: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    (case,) = [c for c in cases() if c.title == title]
    assert run_cpu(case, tmp_path_factory.getbasetemp()) == []


@pytest.mark.parametrize("target", [CUDA, CPU])
def test_samplers_are_valid(target: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    (case,) = [c for c in SAMPLING if c.name == "successive draws"]
    assert run_sampling(case, target, tmp_path_factory.getbasetemp()) == []


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted({c.family for c in cases()}))
def test_whole_families(family: str) -> None:
    assert validate_kernels([family]) == []


@pytest.mark.slow
def test_every_template_is_behind_a_case() -> None:
    found = all_units()
    for folder, target, suffixes in ((TEMPLATES, CUDA, (".py",)), (CSRC, CPU, (".h", ".cpp"))):
        reached = frozenset[str]().union(*(u.functions for u in found if u.target == target))
        for path in (ROOT / folder).iterdir():
            if path.suffix not in suffixes or path.stem in NO_TEMPLATE:
                continue
            own = {f.partition(".")[2] for f in reached if f.startswith(f"{path.stem}.")}
            names = {n for n, _ in blocks(path.read_text())} & reached if target == CPU else own
            assert names, f"no case has a kernel of {path.name}"


def test_operands_of_the_cpu_end_at_a_fence() -> None:
    """In a child: it dies of the first byte behind an operand."""
    text = ctypes.create_string_buffer(b"abcde")
    held = Fenced.copy(ctypes.addressof(text), 5)
    assert ctypes.string_at(held.address - 1, 6) == b"\xffabcde"
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        ctypes.string_at(held.address, 6)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGSEGV


def test_results_are_held_to_the_dtype_and_to_their_row() -> None:
    want = torch.tensor([[1000.0, 1.0], [1.0, 0.5]])
    near, far = want.clone(), want.clone()
    near[0, 1] += 0.01
    far[1, 1] += 0.01
    assert compare(near, want) == ""
    assert "off by" in compare(far, want)
    assert "NaN" in compare(torch.full_like(want, float("nan")), want)
    assert "bfloat16" in compare(want.bfloat16(), want)
    narrow = torch.randn(80).bfloat16()
    off = (narrow.float() * (1 + 2**-8)).bfloat16()
    assert "rounded otherwise" in compare(off, narrow, unlike=0.08)
    assert compare(narrow, narrow, unlike=0.08) == ""


def test_what_lies_around_results_and_operands() -> None:
    out = Guarded((2, 3), torch.float32)
    assert out.broken() == "" and bool(out.tensor.isnan().all())
    torch.as_strided(out.tensor, (1,), (1,), out.tensor.storage_offset() + 6).fill_(0)
    assert out.broken() == "behind"
    x = surrounded(torch.ones(3))
    assert bool(torch.as_strided(x, (1,), (1,), x.storage_offset() + 3).isnan().all())


LATE = """
func @main(%x: bf16[T, 512], %r: bf16[T, 512]) {
  dim T in [1, 64]
  param %n : bf16[512]
  param %w : bf16[64, 512]
  %y, %s = norm_linear(%x, %r, %n, %w, eps=1e-05, offset=1.0, round_first=true, out_dtype="f32") : f32[T, 64], bf16[T, 512]
  return %y, %s
}
"""


def test_a_late_scale_is_as_near_as_an_early_one() -> None:
    """Each rounds the operand of the product, the early one twice: by that many unit roundoffs of the sum of magnitudes."""
    module = parse_module(LATE)
    weights, g = Weights(module, 1), torch.Generator().manual_seed(2)
    params = weights.bind(module)
    x, r = (torch.randn(16, 512, generator=g).bfloat16() for _ in range(2))
    total = (x + r).double()
    factor = (params["n"] + 1.0).double()
    operand = total * (total.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * factor
    exact, magnitude = operand @ params["w"].double().t(), operand.abs() @ params["w"].double().abs().t()
    unit, sums = 2.0**-8, 512 * 2.0**-24
    worst = []
    for meant, roundings in ((module, 2), (scaled_late(module, True), 1), (scaled_late(module, False), 0)):
        got, _ = Interpreter(meant, params).run(x, r)
        bound = ((1 + unit) ** roundings - 1 + sums) * magnitude
        worst.append((got.double() - exact).abs().max())
        assert bool(((got.double() - exact).abs() <= bound).all()), roundings
    early, late, unrounded = worst
    assert early > late > 10 * unrounded


MODULE = """
func @main(%step: step) {
  dim T in [0, 4096]
  dim S in [1, 4096]
  dim R in [0, 4096]
  param %table : f32[30, 24]
  param %w : f32[20, 24]
  %ids = step_field(%step, field="token_ids") : i32[T]
  %rows = step_field(%step, field="sample_rows") : i32[R]
  %x = embedding(%ids, %table) : f32[T, 24]
  %a = gather_rows(%x, %rows) : f32[R, 24]
  %y = linear(%a, %w) : f32[R, 20]
  return %y
}
"""
BUCKETS = (Bucket(512, 64, 64, 512), Bucket(256, 256, 256, 1))


@pytest.mark.parametrize("target", [find_cuda_target("sm_90"), host_target()], ids=["cuda", "cpu"])
def test_kernels_of_a_module_are_verified(
    target: CudaTarget | CpuTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, seen = parse_module(MODULE), list[int]()
    found = verify_kernels(module, target, 2, BUCKETS, lambda done, total, title: seen.append(total))
    assert found == [] and seen
    if isinstance(target, CudaTarget):  # a CPU may sum in the very order of the reference
        monkeypatch.setattr(kernels, "TOLERANCE", dict.fromkeys(kernels.TOLERANCE, 1e-12))
        assert verify_kernels(module, target, 2, BUCKETS)


@pytest.mark.parametrize("dtype", ["q8_0", "q4_1", "bf16"])
def test_a_table_that_no_head_shares_is_read_as_it_is_stored(dtype: str) -> None:
    text = f"""func @main(%ids: i32[T]) {{
      dim T in [0, 64]
      param %table : {dtype}[70, 64]
      %y = embedding(%ids, %table, dtype="bf16") : bf16[T, 64]
      return %y
    }}"""
    assert verify_kernels(parse_module(text), host_target(), 2, BUCKETS) == []
