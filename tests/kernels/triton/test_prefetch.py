"""What a kernel may do before it waits for its predecessor is proven from its PTX, and a wrong order is refused."""

from pathlib import Path

import pytest

from compilerllm.ir.step import Bucket
from compilerllm.kernels.launch.gpu.program import Kernel, Launch, Pointer
from compilerllm.kernels.spec import KernelSpec
from compilerllm.kernels.triton.build import KernelBuildError, build_kernels, compile_source
from compilerllm.kernels.triton.calls import Call, Emitted, Memory
from compilerllm.kernels.triton.emit import ProgramDraft, finish_program
from compilerllm.kernels.triton.prefetch import UnsafePrefetch, check_launches, early_arguments
from compilerllm.kernels.triton.source import KernelSource, generated
from compilerllm.kernels.triton.target import find_cuda_target

_HEAD = "import triton\nimport triton.language as tl\n\n\n@triton.jit\n"
_SAFE = generated(
    _HEAD
    + """def scale(x, w, out, T, K: tl.constexpr, PDL: tl.constexpr):
    tl.extra.cuda.gdc_launch_dependents()
    k = tl.arange(0, K)
    weight = tl.load(w + k + tl.program_id(0) * K)
    tl.extra.cuda.gdc_wait()
    tl.store(out + k, tl.load(x + k) * weight)
"""
)
_READS = generated(
    _HEAD
    + """def scale(x, w, out, T, K: tl.constexpr, PDL: tl.constexpr):
    k = tl.arange(0, K)
    v = tl.load(x + k)
    tl.extra.cuda.gdc_wait()
    tl.store(out + k, v * tl.load(w + k))
"""
)
_WRITES = generated(
    _HEAD
    + """def scale(x, w, out, T, K: tl.constexpr, PDL: tl.constexpr):
    k = tl.arange(0, K)
    tl.store(out + k, tl.load(w + k))
    tl.extra.cuda.gdc_wait()
    tl.store(out + k, tl.load(x + k))
"""
)
_NEVER = generated(
    _HEAD
    + """def scale(x, w, out, T, K: tl.constexpr, PDL: tl.constexpr):
    k = tl.arange(0, K)
    tl.store(out + k, tl.load(x + k) * tl.load(w + k))
"""
)
_LEAVES = generated(
    _HEAD
    + """def scale(x, w, out, T, K: tl.constexpr, PDL: tl.constexpr):
    if tl.program_id(0) < T:
        tl.extra.cuda.gdc_wait()
        k = tl.arange(0, K)
        tl.store(out + k, tl.load(x + k) * tl.load(w + k))
"""
)


def _source(module: str) -> KernelSource:
    types = {"x": "*bf16", "w": "*bf16", "out": "*bf16", "T": "i32"}
    return KernelSource.of(f"{module}:scale", types, {"K": 1024, "PDL": True}, pdl=True)


def test_early_reads_are_found() -> None:
    _, facts = compile_source(_source(_SAFE), 90)
    assert facts["early"] == [1]


def test_early_activation_reads_are_refused_at_the_launch() -> None:
    _, facts = compile_source(_source(_READS), 90)
    assert facts["early"] == [0]
    kernel = Kernel("scale", "k", "t:scale", ("*bf16", "*bf16", "*bf16", "i32"), early=(0,))
    args = (Pointer("arena"), Pointer("param", "w"), Pointer("arena", "", 64), 4)
    with pytest.raises(UnsafePrefetch, match="reads arena"):
        check_launches([Launch(0, (1, 1, 1), args, "%y = scale(%x)")], [kernel])
    check_launches([Launch(0, (1, 1, 1), (Pointer("param", "x"), *args[1:]), "")], [kernel])


def test_a_program_is_finished_only_where_the_proof_holds(tmp_path: Path) -> None:
    """What the PTX says of a kernel reaches the check of its launches."""

    def draft(module: str) -> ProgramDraft:
        source = _source(module)
        args = (Pointer("arena", "x"), Pointer("param", "w"), Pointer("arena", "out"), 4)
        types = tuple(t for _, t in source.signature)
        spec = KernelSpec("mul", (), (), "sm_90", source.template, ())
        call = Call(source, "", types, (), (1, 1, 1), args, 0, "%y = scale(%x)", spec)
        memory = {name: Memory(name, 2048, 0, 0) for name in ("x", "out")}
        return ProgramDraft(target, (Emitted(Bucket(1, 1, 1, 1), [call], memory),))

    target = find_cuda_target("sm_90")
    safe, reads = draft(_SAFE), draft(_READS)
    cubins = build_kernels([*safe.sources(), *reads.sources()], target, tmp_path, workers=1)
    assert finish_program(safe, cubins).kernels[0].early == (1,)
    with pytest.raises(UnsafePrefetch, match="reads arena"):
        finish_program(reads, cubins)


@pytest.mark.parametrize(
    ("module", "reason"), [(_WRITES, "writes before"), (_NEVER, "never waits"), (_LEAVES, "may branch")]
)
def test_wrong_orders_are_refused(module: str, reason: str) -> None:
    with pytest.raises((UnsafePrefetch, KernelBuildError), match=reason):
        compile_source(_source(module), 90)


def test_a_load_from_nowhere_is_refused() -> None:
    with pytest.raises(UnsafePrefetch, match="unknown origin"):
        early_arguments("ld.global.b32 %r1, [ %rd9 + 0 ];\ngriddepcontrol.wait;", "k")
