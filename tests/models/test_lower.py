"""Lowering any FX graph: what it computes, what stays opaque, and what is refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from compilerllm.ir.graph import Module
from compilerllm.ir.text import parse_module, print_module
from compilerllm.ir.verify import verify
from compilerllm.kernels.reference.interpreter import Interpreter
from compilerllm.models.errors import UnsupportedOperator
from compilerllm.models.lower import LoweredFx, OutputSlot, lower_fx


def traced(function: Callable[..., Any], *inputs: Tensor) -> torch.fx.GraphModule:
    """The functionalised graph of a function whose first input's first axis is dynamic."""

    class Wrapper(nn.Module):
        def forward(self, *args: Tensor) -> Any:
            return function(*args)

    size = torch.export.Dim("T", min=3, max=64)
    dynamic = ({0: size}, *(None for _ in inputs[1:]))
    exported = torch.export.export(Wrapper(), inputs, dynamic_shapes={"args": dynamic}, strict=False)
    graph_module: torch.fx.GraphModule = exported.run_decompositions({}).graph_module
    return graph_module


def lowered(function: Callable[..., Any], *inputs: Tensor, opaque: bool = True) -> LoweredFx:
    return lower_fx(traced(function, *inputs), opaque=opaque)


def check(function: Callable[..., Any], *inputs: Tensor, opaque: int = 0) -> LoweredFx:
    """Lower, verify, print and read back, and run at the traced size and another one."""
    found = lowered(function, *inputs)
    module = Module({"main": found.graph})
    verify(module)
    text = print_module(module)
    assert print_module(parse_module(text)) == text
    assert sum(n.op == "aten" for n in found.graph.nodes) == opaque, text
    for given in (inputs, (torch.cat([inputs[0]] * 2), *inputs[1:])):
        want = function(*given)
        results = Interpreter(module, {}).run(*given)
        wanted = [want] if isinstance(want, Tensor) else list(want)
        assert len(results) == len(wanted)
        for got, expected in zip(results, wanted, strict=True):
            assert got.dtype == expected.dtype
            torch.testing.assert_close(got, expected)
    return found


X = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
W = torch.randn(5, 8, generator=torch.Generator().manual_seed(1))
LOWERED: dict[str, Callable[[Tensor], Any]] = {
    "arithmetic": lambda x: (2 - x) * x / 3 + x**2 - 1 / (x.abs() + 1),
    "activations": lambda x: F.silu(x) + F.gelu(x) + F.gelu(x, approximate="tanh") + F.relu(x) + x.sigmoid() + x.tanh(),
    "unary": lambda x: x.exp() + x.abs().log1p() + x.abs().sqrt() + x.sin() * x.cos() + x.erf() + x.floor() - (-x),
    "comparisons": lambda x: torch.where((x > 0) & ~(x >= 1) | (x == 2), x, x * 0.5),
    "clamps": lambda x: x.clamp(-1, 1) + x.clamp(min=0) + x.clamp_max(0.5) + F.hardtanh(x),
    "casts": lambda x: (x.to(torch.bfloat16) * 1.5).float() + x.double().float() + (x > 0).float(),
    "whole numbers": lambda x: (x * 10).to(torch.int64) // 3 + (x * 7).to(torch.int64) % 4,
    "shapes": lambda x: x.reshape(-1, 2, 4).transpose(1, 2).permute(2, 0, 1).flatten(1).unsqueeze(0).squeeze(0),
    "slices": lambda x: torch.cat([x[:, 4:], x[:, :4], x[:, ::2], x[:, -1:]], dim=1) + x[0, 0],
    "splits": lambda x: torch.stack([*x.chunk(2, dim=1), *torch.split(x, [4, 4], dim=1)], dim=1),
    "unbind": lambda x: sum(x.unbind(1)),
    "tail of a dynamic axis": lambda x: x[1:] * x[:-1],
    "expand": lambda x: x[:, None, :].expand(-1, 3, -1) + x[:, None, :],
    "reductions": lambda x: x.sum(-1) + x.mean(1) + x.amax(1) - x.amin(1) + x.prod(1) + x.argmax(1),
    "softmax": lambda x: x.softmax(-1) + F.softmax(x.bfloat16(), dim=-1, dtype=torch.float32) + x.cumsum(1),
    "made": lambda x: torch.zeros_like(x) + torch.ones(8) + torch.full((8,), 2.5) + torch.arange(8) + torch.arange(1, 17, 2),
    "sizes": lambda x: torch.arange(x.shape[0]) + torch.zeros(x.shape[0]),
    "topk": lambda x: (x * 3).topk(3),
    "norms": lambda x: F.layer_norm(x, (8,), x[0], None, 1e-5) + F.layer_norm(x, (8,)),
    "masked fill": lambda x: x.masked_fill(x > 0, -1.0),
}  # fmt: skip


@pytest.mark.parametrize("name", LOWERED)
def test_has_rules(name: str) -> None:
    found = check(LOWERED[name], X)
    assert [type(o) for o in found.outputs] == [OutputSlot] * len(found.graph.outputs)
    assert dict(found.dims) and found.inputs == ("args_0",)


def test_products() -> None:
    def products(x: Tensor, w: Tensor) -> Tensor:
        bias = w[:, 0]
        return F.linear(x, w, bias) + x @ w.T + torch.addmm(bias, x, w.t()) + (x @ x.T) @ (x @ w.T)

    found = check(products, X, W)
    ops = [n.op for n in found.graph.nodes]
    assert ops.count("linear") == 4 and ops.count("matmul") == 2


def test_embedding_and_rows() -> None:
    ids = torch.tensor([3, 1, 4, 1, 0])
    found = check(lambda i, w: F.embedding(i, w) + w.index_select(0, i), ids, W)
    assert {n.op for n in found.graph.nodes} == {"embedding", "gather_rows", "add"}


def test_unknown_operators_stay_opaque_and_run() -> None:
    found = check(lambda x: (x.sort(dim=-1).values, torch.roll(x, 1, dims=1)), X, opaque=2)
    assert dict(found.opaque) == {"aten.sort.default": 1, "aten.roll.default": 1}
    sort = next(n for n in found.graph.nodes if n.text("target", "") == "aten.sort.default")
    assert sort.attrs["args"] == ("%0",) and len(sort.outputs) == 2


def test_opaque_arguments_of_every_kind() -> None:
    def odd(x: Tensor) -> Tensor:
        y = x.new_tensor([1.0]) if False else x
        return (
            torch.var(y, dim=[0, 1], correction=0)
            + torch.div(x, 3, rounding_mode="trunc")
            + torch.flip(x, [1])
        )

    found = check(odd, X, opaque=3)
    kept = {n.text("target"): n.attrs for n in found.graph.nodes if n.op == "aten"}
    assert kept["aten.div.Tensor_mode"]["kwargs"] == (("rounding_mode", "text:trunc"),)


def test_refusal_names_the_operator() -> None:
    with pytest.raises(UnsupportedOperator, match=r"aten\.sort\.default .* has no lowering for f32\[T0, 8\]"):
        lowered(lambda x: x.sort(dim=-1).values, X, opaque=False)


def test_complex_numbers_are_refused() -> None:
    with pytest.raises(UnsupportedOperator, match="complex64 have no place"):
        lowered(lambda x: torch.fft.fft(x).real, X)


def test_results_that_are_no_tensors_keep_their_place() -> None:
    gm = traced(lambda x: (x + 1, x.shape[0], 3, x * 2), X)
    found = lower_fx(gm, dims={str(s): "N" for s in _symbols(gm)})
    assert found.outputs[0] == OutputSlot(0) and found.outputs[2:] == (3, OutputSlot(1))
    assert str(found.outputs[1]) == "N" and found.graph.dim("N").high == 64


def _symbols(gm: torch.fx.GraphModule) -> set[Any]:
    values = [n.meta["val"] for n in gm.graph.find_nodes(op="placeholder")]
    return {s.node.expr for v in values for s in v.shape if isinstance(s, torch.SymInt)}


def test_origin_says_where_a_node_comes_from() -> None:
    from .tiny import captured

    norm = next(n for n in captured("qwen3").module.functions["layer_0"].nodes if n.op == "rms_norm")
    assert norm.origin.path == "input_layernorm" and norm.origin.ops == ("compilerllm.rms_norm.default",)
