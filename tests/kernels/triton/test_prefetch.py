"""What a kernel may do before it waits for its predecessor is proven from its PTX, and a wrong order is refused."""

import pytest

from compilerllm.kernels.launch.gpu.program import Kernel, Launch, Pointer
from compilerllm.kernels.triton.build import KernelBuildError, compile_source
from compilerllm.kernels.triton.prefetch import UnsafePrefetch, check_launches, early_arguments
from compilerllm.kernels.triton.source import KernelSource, generated

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


@pytest.mark.parametrize(
    ("module", "reason"), [(_WRITES, "writes before"), (_NEVER, "never waits"), (_LEAVES, "may branch")]
)
def test_wrong_orders_are_refused(module: str, reason: str) -> None:
    with pytest.raises((UnsafePrefetch, KernelBuildError), match=reason):
        compile_source(_source(module), 90)


def test_a_load_from_nowhere_is_refused() -> None:
    with pytest.raises(UnsafePrefetch, match="unknown origin"):
        early_arguments("ld.global.b32 %r1, [ %rd9 + 0 ];\ngriddepcontrol.wait;", "k")
