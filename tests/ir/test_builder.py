"""Builder, rewriter, prune, inline: names, identities, origins, what is dropped."""

import pytest

from compilerllm.ir.builder import Builder, Rewriter, inline, prune
from compilerllm.ir.errors import InvalidGraph, TypeMismatch
from compilerllm.ir.graph import Module, Node, Origin, Value
from compilerllm.ir.recipe import Read
from compilerllm.ir.text import parse_module, print_graph
from compilerllm.ir.types import TensorType
from compilerllm.ir.verify import verify
from tests.ir.op_samples import function

F32 = TensorType("f32", ("T", 8))


def test_names_are_unique_and_types_inferred() -> None:
    b = Builder("main")
    b.dim("T", 1, 64)
    x = b.input("x", F32)
    first, second = b.emit("neg", x), b.emit("neg", x)
    third = b.emit("neg", x, name="neg_1")
    assert [v.name for v in (first, second, third)] == ["neg", "neg_1", "neg_2"]
    assert third.type == F32
    verify(Module({"main": b.finish(third)}))


def test_params_are_one_value_a_name() -> None:
    b = Builder("main")
    weight = b.param("w", TensorType("f32", (8,)))
    assert b.param("w", TensorType("f32", (8,))) is weight
    b.input("x", F32)
    with pytest.raises(InvalidGraph, match="parameter %x has the name of another value"):
        b.param("x", F32)
    assert b.finish(weight).params[0].recipe == Read("w")


def test_wrong_use_is_refused() -> None:
    b = Builder("main")
    x = b.input("x", F32)
    with pytest.raises(TypeMismatch, match="attribute 'axis' is missing"):
        b.emit("softmax", x)
    with pytest.raises(InvalidGraph, match="topk gives 2 values; use emit_many"):
        b.emit("topk", x, k=2)
    with pytest.raises(InvalidGraph, match="aten does not infer its types; give them"):
        b.emit("aten", x, target="t", args=())
    with pytest.raises(InvalidGraph, match=r"main has no parameter %w"):
        b.finish(x).param("w")


GRAPH = parse_module(function(
    "%x: f32[T, 8]",
    """%a = neg(%x) : f32[T, 8]
    %b = mul(%a, %w) : f32[T, 8]
    %c = exp(%a) : f32[T, 8]
    %y = add(%b, scalar=1.0) : f32[T, 8]""",
    "%y",
    "param %w : f32[8]\nparam %unused : f32[8]",
)).main  # fmt: skip


def test_prune_drops_what_nobody_uses() -> None:
    pruned = prune(GRAPH)
    assert [n.op for n in pruned.nodes] == ["neg", "mul", "add"]
    assert [p.name for p in pruned.params] == ["w"]
    assert prune(pruned) is pruned


def test_prune_keeps_effects() -> None:
    kept = parse_module(function(
        "%step: step, %k: f32[T, 2, 8]", "kv_write(%kv, %k, %k, %step)", "%k",
        "state %kv : paged_kv<f32, heads=2, dim=8>",
    )).main  # fmt: skip
    assert prune(kept) is kept


def test_rewriter_replaces_and_marks_the_origin() -> None:
    def visit(r: Rewriter, node: Node) -> tuple[Value, ...] | None:
        return (r.emit("abs", r.get(node.operands[0])),) if node.op == "neg" else None

    new = Rewriter(GRAPH, by="negs_to_abs").run(visit)
    assert [n.op for n in new.nodes] == ["abs", "mul", "add"]
    assert new.nodes[0].origin == Origin(passes=("negs_to_abs",))
    assert new.inputs == GRAPH.inputs and new.nodes[1].outputs[0].name == "b"
    verify(Module({"main": new}))


def test_rewriter_infers_types_anew() -> None:
    def visit(r: Rewriter, node: Node) -> tuple[Value, ...] | None:
        return (r.emit("cast", r.get(node.operands[0]), dtype="f64"),) if node.op == "neg" else None

    new = Rewriter(GRAPH, by="widen").run(visit)
    assert {v.dtype for v in new.outputs} == {"f64"}


def test_rewriter_that_keeps_all_keeps_identities() -> None:
    new = Rewriter(prune(GRAPH), by="nothing").run(lambda r, node: None)
    assert new.nodes == prune(GRAPH).nodes and print_graph(new) == print_graph(prune(GRAPH))


def test_inline_renames_and_binds() -> None:
    b = Builder("main")
    b.dim("T", 1, 64)
    x, scale = b.input("x", F32), b.input("scale", TensorType("f32", (8,)))
    (y,) = inline(b, prune(GRAPH), [x], {GRAPH.param("w").value: scale})
    (z,) = inline(b, prune(GRAPH), [y], {GRAPH.param("w").value: scale})
    graph = b.finish(z)
    verify(Module({"main": graph}))
    assert [n.op for n in graph.nodes] == ["neg", "mul", "add"] * 2


def test_origins_merge_to_their_common_path() -> None:
    a = Origin("layers.0.mlp.gate", ("aten.mm",), ("lower",))
    b = Origin("layers.0.mlp.up", ("aten.mm", "aten.mul"), ("raise",))
    assert Origin.merge(a, b) == Origin("layers.0.mlp", ("aten.mm", "aten.mul"), ("lower", "raise"))
    assert Origin.merge(a, Origin()) == a
