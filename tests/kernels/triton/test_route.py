"""The largest of a row, routing, and routing behind its norm and product, against the ATen reference."""

import pytest
import torch
from torch import Tensor

from compilerllm.ir.text import parse_module
from compilerllm.kernels.errors import UnsupportedByTarget
from compilerllm.kernels.reference import fused_ops
from compilerllm.kernels.reference.interpreter import Interpreter
from compilerllm.kernels.triton.emit_experts import power_of_two
from tests.kernels.triton.harness import Guarded, assert_close, cross_compile, device, launch, run_module


def seeded(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device(), dtype)


def first_largest(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Top-k with ties to the lower index."""
    values, indices = torch.sort(x, dim=-1, descending=True, stable=True)
    return values[:, :k], indices[:, :k]


def run_topk(x: Tensor, k: int, rows: int = 1) -> tuple[Tensor, Tensor]:
    count, n = x.shape
    values, indices = Guarded((count, k), x.dtype), Guarded((count, k), torch.int64)
    launch(
        "route:topk", (-(-count // rows),),
        {"x": x, "values": values.tensor, "indices": indices.tensor, "rows": count, "STRIDE": n, "N": n,
         "N2": power_of_two(n), "TOP": k, "TOP2": power_of_two(k), "ROWS": rows},
    )  # fmt: skip
    return values.check(), indices.check()


@pytest.mark.parametrize(("n", "k", "rows"), [(128, 8, 1), (60, 4, 2), (512, 16, 1), (5, 5, 4), (2, 1, 1)])
def test_topk(n: int, k: int, rows: int) -> None:
    x = seeded(3, n)
    x[0] = 0.0
    x[0, 1] = -0.0
    x[1, 0], x[1, -1] = float("inf"), -float("inf")
    for dtype in (torch.float32, torch.bfloat16):  # bf16 has ties
        values, indices = run_topk(x.to(dtype), k, rows)
        want_values, want = first_largest(x.to(dtype), k)
        assert torch.equal(values, want_values)
        assert torch.equal(indices, want)


def test_topk_of_infinities_and_nan() -> None:
    low = torch.full((1, 6), -float("inf"), device=device())
    assert run_topk(low, 3)[1].tolist() == [[0, 1, 2]]
    low[0, 4] = float("nan")
    assert run_topk(low, 2)[1].tolist() == [[4, 0]]


@pytest.mark.parametrize("softmax", ["before", "after"])
@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize(("source", "result"), [("f32", "f32"), ("bf16", "bf16"), ("bf16", "f32")])
def test_route(softmax: str, normalise: bool, source: str, result: str) -> None:
    attrs = f'k=3, softmax="{softmax}", dtype="{result}"' + (", normalise=true" if normalise else "")
    text = f"""func @main(%x: {source}[T, 12]) {{
  dim T in [1, 64]
  %w, %i = route(%x, {attrs}) : {result}[T, 3], i64[T, 3]
  return %w, %i
}}"""
    x = (
        torch.stack([torch.randperm(12) for _ in range(5)])
        .div(4)
        .to(getattr(torch, {"f32": "float32", "bf16": "bfloat16"}[source]))
    )
    weights, ids = run_module(text, inputs=[x])
    want, want_ids = fused_ops.route(x, k=3, softmax=softmax, dtype=result, normalise=normalise)
    assert torch.equal(ids, want_ids)
    assert_close(weights, want)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize(
    ("operands", "attrs"),
    [
        ("%g", 'eps=1e-06, round_first=true, softmax="before", normalise=true'),
        ("%g, %b", 'eps=1e-06, offset=1.0, softmax="after"'),
    ],
)
def test_norm_route(dtype: str, operands: str, attrs: str) -> None:
    text = f"""func @main(%x: {dtype}[T, 40], %r: {dtype}[T, 40]) {{
  dim T in [1, 64]
  param %n : {dtype}[40]
  param %g : {dtype}[6, 40]
  param %b : {dtype}[6]
  %y, %s, %w, %i = norm_route(%x, %r, %n, {operands}, {attrs}, k=3, dtype="{dtype}") : {dtype}[T, 40], {dtype}[T, 40], {dtype}[T, 3], i64[T, 3]
  return %y, %s, %w, %i
}}"""
    kind = torch.float32 if dtype == "f32" else torch.bfloat16
    x, residual, norm = (seeded(*s, seed=i, dtype=kind) for i, s in enumerate(((3, 40), (3, 40), (40,))))
    params = {"n": norm, "g": seeded(6, 40, seed=3, dtype=kind), "b": seeded(6, seed=4, dtype=kind)}
    got = run_module(text, params, [x, residual])
    want = Interpreter(parse_module(text), {n: p.cpu() for n, p in params.items()}).run(
        x.cpu(), residual.cpu()
    )
    assert torch.equal(got[3].cpu(), want[3])
    for a, b in zip(got[:3], want[:3], strict=True):
        assert_close(a, b)


def test_too_wide_rows_are_refused() -> None:
    text = """func @main(%x: f32[T, 20000]) {
  dim T in [1, 64]
  %v, %i = topk(%x, k=2) : f32[T, 2], i64[T, 2]
  return %v, %i
}"""
    with pytest.raises(UnsupportedByTarget, match="at most 16384"):
        run_module(text, inputs=[torch.zeros(1, 20000)])


def test_cross_compiles() -> None:
    pointers = ("x", "residual", "norm_weight", "weight", "normed", "total", "logits", "weights")
    args = dict.fromkeys(pointers, "*bf16") | {
        "ids": "*i64", "counters": "*i32", "X_STRIDE": 2048, "RESIDUAL_STRIDE": 2048, "COLUMNS": 2048, "BLOCK": 2048,
        "EPS": 1e-6, "OFFSET": 0.0, "ROUND_FIRST": True, "N": 128, "N2": 128, "TOP": 8, "TOP2": 8, "BEFORE": True,
        "NORMALISE": True, "PART": 2, "bias": None,
    }  # fmt: skip
    assert cross_compile("route:norm_route", args, pdl=True)["shared"] <= 101_376
    assert cross_compile("route:norm_route", args, capability=80)["shared"] <= 101_376
