"""Generated kernels: every tensor op's samples, and groups, through emitters and interpreter, against the reference."""

import math
from typing import Any

import pytest
import torch

from compilerllm.ir.step import Bucket
from compilerllm.ir.text import parse_module
from compilerllm.kernels.errors import UnsupportedByTarget
from compilerllm.kernels.reference.interpreter import Interpreter
from compilerllm.kernels.refs import Ref, dense_strides
from compilerllm.kernels.triton import emit_groups, groups
from compilerllm.kernels.triton.build import compile_source
from compilerllm.kernels.triton.emit import draft_program
from compilerllm.kernels.triton.emit_groups import launch_nest
from compilerllm.kernels.triton.emitter import BucketEmitter
from compilerllm.kernels.triton.expressions import POINTWISE_OPS
from compilerllm.kernels.triton.groups import ROW_OPS, Nest, size_text
from compilerllm.kernels.triton.source import source_text
from compilerllm.kernels.triton.target import TARGETS
from compilerllm.passes.inline_calls import inline_calls
from tests.ir.op_samples import ALL, IDS, function
from tests.kernels.reference.steps import random_inputs, random_params
from tests.kernels.triton.harness import assert_close, assert_same, run_module

MOVES = {
    "reshape",
    "permute",
    "expand",
    "slice",
    "concat",
    "iota",
    "gather_rows",
    "aten",
    "group",
    "matmul",
    "call",
}
NORMS = {"rms_norm", "layer_norm", "add_rms_norm", "add_layer_norm"}
HERE = POINTWISE_OPS | ROW_OPS | MOVES | NORMS
SAMPLES = [pytest.param(text, id=name) for (op, text), name in zip(ALL, IDS, strict=True) if op in HERE]
# numpy says where an interpreted kernel computes inf or NaN in lanes that it then masks
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
DIMS = {"T": 11, "S": 3, "R": 2}


def check(
    text: str, inputs: list[Any] | None = None, dims: dict[str, int] = DIMS, scale: float = 1.0
) -> None:
    """The module through emitters, on fresh poisoned memory, gives what the reference gives."""
    torch.manual_seed(0)
    module = parse_module(text)
    given = random_inputs(module, dims) if inputs is None else inputs
    params = random_params(module)
    wanted = Interpreter(module, params).run(*given)
    got = run_module(text, params, given, bucket=Bucket(dims["T"], dims["S"], dims["R"], 64))
    for value, out, want in zip(module.main.outputs, got, wanted, strict=True):
        if value in module.main.inputs:
            continue
        if out.dtype == torch.float64:
            torch.testing.assert_close(out.cpu(), want)
        elif out.is_floating_point() and bool(want.isfinite().all()):
            assert_close(out, want, scale)
        else:
            assert torch.equal(out.cpu(), want)


@pytest.mark.parametrize("text", SAMPLES)
def test_samples_match_the_reference(text: str) -> None:
    check(text)


@pytest.mark.parametrize("rows", [1, 5])
def test_a_group_rounds_as_its_ops_do(rows: int) -> None:
    """bf16 in between: the group gives the very bits that node by node gives."""
    body = """%v = mul(%a, scalar=0.5) : bf16[T, 96]
        %u = add(%v, %b) : bf16[T, 96]
        %m = mul(%u, %u) : bf16[T, 96]
        %c = sub(%m, %a) : bf16[T, 96]"""
    text = function(
        "%x: bf16[T, 96], %w: bf16[96]", "%y = group(%x, %w, fn=@fused) : bf16[T, 96]", "%y"
    ) + function("%a: bf16[T, 96], %b: bf16[96]", body, "%c", name="fused")
    torch.manual_seed(1)
    x, w = torch.randn(rows, 96).bfloat16(), torch.randn(96).bfloat16()
    (got,) = run_module(text, {}, [x, w], bucket=Bucket(rows, 1, 1, 64))
    (want,) = Interpreter(parse_module(text), {}).run(x, w)
    assert_same(got, want)


SOFT = function(
    "%x: bf16[T, 5]", "%y, %s = group(%x, fn=@soft) : f32[T, 5], f32[T]", "%y, %s"
) + function(
    "%a: bf16[T, 5]",
    """%c = cast(%a, dtype="f32") : f32[T, 5]
    %e = mul(%c, scalar=3.0) : f32[T, 5]
    %p = softmax(%e, axis=1) : f32[T, 5]
    %q = square(%p) : f32[T, 5]""",
    "%q, %m", name="soft",
).replace("  return %q, %m", "  %m = amax(%c, axis=1) : f32[T]\n  return %q, %m")  # fmt: skip


def test_a_row_reduction_and_what_follows_it() -> None:
    check(SOFT)
    check(SOFT, dims=DIMS | {"T": 1})


@pytest.mark.parametrize("op", ["sum", "mean", "amax", "amin", "argmax", "softmax"])
def test_rows_too_wide_for_registers(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are then read in pieces, once for every reduction."""
    monkeypatch.setattr(groups, "WIDEST_ROW", 16)
    monkeypatch.setattr(emit_groups, "WIDEST_ROW", 16)
    out = {"argmax": "i64[T]", "softmax": "f32[T, 37]"}.get(op, "f32[T]")
    check(function("%x: f32[T, 37]", f"%y = {op}(%x, axis=1) : {out}", "%y"), dims=DIMS | {"T": 3})


def test_views_are_read_in_place() -> None:
    """A slice of every second column of a permuted tensor, broadcast over rows; no copy is made of it."""
    text = function(
        "%x: f32[T, 4, 8], %r: f32[4, 1]",
        """%p = permute(%x, order=[1, 0, 2]) : f32[4, T, 8]
        %s = slice(%p, axis=2, start=1, stop=8, step=2) : f32[4, T, 4]
        %e = reshape(%r, shape=[4, 1, 1]) : f32[4, 1, 1]
        %y = mul(%s, %e) : f32[4, T, 4]""",
        "%y",
    )
    check(text)
    flat = inline_calls(parse_module(text))
    (emitted,) = draft_program(flat, [Bucket(11, 1, 1, 64)], TARGETS[2]).buckets
    assert len(emitted.calls) == 1


def test_special_values_pass() -> None:
    x = torch.tensor([[float("inf"), float("-inf"), float("nan"), 0.0, -0.5, 3e38, 1e-30, 2.0]])
    for op in ("tanh", "sigmoid", "relu", "log1p", "exp"):
        text = function("%x: f32[T, 8]", f"%y = {op}(%x) : f32[T, 8]", "%y")
        (got,) = run_module(text, {}, [x], bucket=Bucket(1, 1, 1, 64))
        (want,) = Interpreter(parse_module(text), {}).run(x)
        torch.testing.assert_close(got.cpu(), want, equal_nan=True, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("op", ["remainder", "floor_div"])
def test_whole_numbers_divide_towards_minus_infinity(op: str) -> None:
    text = function("%a: i32[T], %b: i32[T]", f"%y = {op}(%a, %b) : i32[T]", "%y")
    check(text, [torch.tensor([7, -7, 7, -7], dtype=torch.int32), torch.tensor([2, 2, -2, -2], dtype=torch.int32)],
          dims=DIMS | {"T": 4})  # fmt: skip


def test_a_packed_operand_is_refused_with_what_to_do() -> None:
    module = parse_module(function("", "%y = neg(%w) : f32[4, 64]", "%y", decls="param %w : f32[4, 64]"))
    value = module.main.params[0].value
    ref = Ref("w", "q4_0", value.shape, dense_strides(value.shape), value)
    emitter = BucketEmitter(module, Bucket(1, 1, 1, 64), TARGETS[2], ())
    with pytest.raises(UnsupportedByTarget, match="dense"):
        launch_nest(emitter, module.main.nodes[0], module.main.nodes, {value: ref}, [])


def test_offsets_over_two_gigabytes_are_wide() -> None:
    module = parse_module(function("%x: f32[T, 8]", "%y = neg(%x) : f32[T, 8]", "%y"))
    (x,), node = module.main.inputs, module.main.nodes[0]
    refs = [Ref(v.name, "f32", v.shape, dense_strides(v.shape), v) for v in (x, node.output)]
    for wide in (False, True):
        made = Nest("neg", [node], {x: refs[0]}, [(node.output, refs[1])], (), wide).generate()
        own = source_text(made.template.partition(":")[0]).partition("\0")[0]
        assert ("tl.int64" in own) == wide
    assert size_text(x.shape[0] * 8) in ("(8 * T)", "(T * 8)")


@pytest.mark.parametrize("target", TARGETS, ids=lambda t: t.name)
def test_groups_compile_for_every_target(target: Any) -> None:
    """With PDL where there is one: a pointwise group, and one with a reduction."""
    text = function(
        "%x: bf16[T, 4096]", "%y = group(%x, %w, fn=@fused) : bf16[T, 4096]\n%z = softmax(%y, axis=1) : bf16[T, 4096]", "%z",
        decls="param %w : bf16[4096]",
    ) + function(
        "%a: bf16[T, 4096], %b: bf16[4096]", "%c = mul(%a, %b) : bf16[T, 4096]\n%d = silu(%c) : bf16[T, 4096]", "%d", name="fused"
    )  # fmt: skip
    draft = draft_program(inline_calls(parse_module(text)), [Bucket(8, 1, 1, 64)], target)
    sources = draft.sources()
    assert len(sources) == 2
    for source in sources:
        assert source.pdl == target.pdl
        early = [1] if target.pdl and len(source.signature) == 4 else []  # the parameter of the group of two
        code, meta = compile_source(source, target.capability)
        assert meta["early"] == early
        assert code and meta["shared"] < 4096 and math.isfinite(meta["num_warps"])
