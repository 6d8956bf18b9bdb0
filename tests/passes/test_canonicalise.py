"""Canonicalising random graphs: the same numbers, nothing left to do, and no more nodes than before."""

import itertools

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compilerllm.ir.builder import Builder
from compilerllm.ir.dims import symbol
from compilerllm.ir.graph import Graph, Module, Value
from compilerllm.ir.types import TensorType
from compilerllm.ir.verify import verify_graph
from compilerllm.kernels.reference.interpreter import Interpreter
from compilerllm.passes.canonicalise import canonicalise
from compilerllm.passes.deduplicate import deduplicate
from compilerllm.passes.report import PassReport

T = symbol("T")
SHAPES = ((T, 2, 4), (1, T, 8), (2, 2, T))


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """Views, casts and pointwise ops over one input, any of them feeding any later one."""
    b = Builder("main")
    b.dim("T", 1, 64)
    values: list[Value] = [b.input("x", TensorType("f32", draw(st.sampled_from(SHAPES))))]
    for _ in range(draw(st.integers(1, 12))):
        x = draw(st.sampled_from(values[-4:]))
        rank = x.tensor.rank
        kind = draw(
            st.sampled_from(
                ["permute", "permute", "reshape", "slice", "concat", "cast", "unary", "binary", "norm"]
            )
        )
        match kind:
            case "permute":
                order = draw(st.sampled_from(list(itertools.permutations(range(rank)))))
                y = b.emit("permute", x, order=order)
            case "reshape":
                y = b.emit(
                    "reshape", x, shape=draw(st.sampled_from([(1, *x.shape), (x.tensor.numel,), x.shape]))
                )
            case "slice":
                axis = draw(st.integers(0, rank - 1))
                extent = x.shape[axis]
                start = draw(st.integers(0, extent - 1)) if isinstance(extent, int) else 0
                y = b.emit("slice", x, axis=axis - draw(st.sampled_from([0, rank])), start=start, stop=extent)
            case "concat":
                y = b.emit("concat", *[x] * draw(st.integers(1, 2)), axis=draw(st.integers(0, rank - 1)))
            case "cast":
                y = b.emit("cast", x, dtype=draw(st.sampled_from(["f32", "bf16"])))
            case "unary":
                y = b.emit(draw(st.sampled_from(["neg", "tanh"])), x)
            case "binary":
                same = [v for v in values if v.type == x.type]
                y = b.emit("add", x, draw(st.sampled_from(same)))
            case _:
                y = b.emit("rms_norm", x, eps=1e-6)
        if y.tensor.rank <= 4:
            values.append(y)
    return b.finish(values[-1])


@settings(max_examples=150, deadline=None)
@given(graphs())
def test_same_numbers_and_a_fixed_point(graph: Graph) -> None:
    simple = canonicalise(graph, PassReport("canonicalise"))
    verify_graph(simple)
    x = torch.randn([3 if not isinstance(d, int) else d for d in graph.inputs[0].shape])
    (want,), (got,) = (Interpreter(Module({"main": g}), {}).run(x) for g in (graph, simple))
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
    assert canonicalise(simple, PassReport("canonicalise")) is simple
    live = deduplicate(graph, PassReport("deduplicate"))
    assert len(deduplicate(simple, PassReport("deduplicate")).nodes) <= len(live.nodes)
