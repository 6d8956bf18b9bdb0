"""Patterns: what matches, and the reason given where it does not."""

import pytest

from compilerllm.ir.graph import Graph, Value
from compilerllm.ir.pattern import Absent, Any, Match, Matcher, Mismatch, P
from compilerllm.ir.text import parse_module
from tests.ir.op_samples import function


def graph_of(body: str, result: str = "%y") -> Graph:
    inputs = "%x: f32[T, 8], %r: f32[T, 8], %w: f32[8, 8], %b: f32[8]"
    return parse_module(function(inputs, body, result)).main


def match(pattern: P, body: str, result: str = "%y") -> Match | Mismatch:
    graph = graph_of(body, result)
    return Matcher(graph).match(pattern, graph.nodes[-1])


LINEAR = "%l = linear(%x, %w) : f32[T, 8]\n"
ADD = P("add", P("linear", Any("x"), Any("w"), name="linear"), Any("r"), commutative=True)


@pytest.mark.parametrize("operands", ["%l, %r", "%r, %l"])
def test_commutative_binds_values_and_nodes(operands: str) -> None:
    found = match(ADD, f"{LINEAR}%y = add({operands}) : f32[T, 8]")
    assert isinstance(found, Match)
    assert [found[n].name for n in ("x", "w", "r")] == ["x", "w", "r"]
    assert found.node("linear").op == "linear" and [n.op for n in found.nodes] == ["add", "linear"]


def narrow(value: Value) -> str | None:
    return None if value.dtype == "bf16" else f"%{value.name} is {value.dtype}, not bf16"


REASONS = {
    "other root": (ADD, f"{LINEAR}%y = mul(%l, %r) : f32[T, 8]", "mul stands where add is needed", 0),
    "other inside": (
        P("add", P(("linear", "linear_add"), Any("x"), Any("w")), Any("r")),
        "%n = neg(%x) : f32[T, 8]\n%y = add(%n, %r) : f32[T, 8]", "neg stands where linear or linear_add is needed", 1,
    ),
    "no producer": (ADD, "%y = add(%x, %r) : f32[T, 8]", "is no node's result, linear is needed", 1),
    "extra operand": (
        ADD, "%l = linear(%x, %w, %b) : f32[T, 8]\n%y = add(%l, %r) : f32[T, 8]", "linear has 3 operands, the pattern 2", 2,
    ),
    "must be absent": (
        P("linear", Any("x"), Any("w"), Absent()), "%y = linear(%x, %w, %b) : f32[T, 8]",
        "linear has operand %b, which must be absent", 1,
    ),
    "lacks": (P("linear", Any("x"), Any("w"), Any("b")), "%y = linear(%x, %w) : f32[T, 8]", "linear lacks an operand", 1),
    "two uses": (
        ADD, f"{LINEAR}%n = neg(%l) : f32[T, 8]\n%y = add(%l, %n) : f32[T, 8]", "%l is also read by neg", 1,
    ),
    "same name": (
        P("mul", Any("x"), Any("x")), "%y = mul(%x, %r) : f32[T, 8]", "%r stands where %x is needed", 1,
    ),
    "where": (P("neg", Any("x", narrow)), "%y = neg(%x) : f32[T, 8]", "%x is f32, not bf16", 1),
    "attribute": (
        P("softmax", Any("x"), attrs={"axis": 1}), "%y = softmax(%x, axis=0) : f32[T, 8]",
        "softmax: attribute axis is 0, 1 is needed", 0,
    ),
    "predicate": (
        P("softcap", Any("x"), attrs={"cap": lambda cap: cap > 1}), "%y = softcap(%x, cap=0.5) : f32[T, 8]",
        "softcap: attribute cap=0.5 is not accepted", 0,
    ),
    "other result": (
        P("neg", P("topk", Any("x"), single_use=False)),
        "%v, %i = topk(%x, k=8) : f32[T, 8], i64[T, 8]\n%y = neg(%i) : i64[T, 8]", "%i is another result of topk than needed", 1,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REASONS)
def test_reasons(name: str) -> None:
    pattern, body, reason, depth = REASONS[name]
    found = match(pattern, body)
    assert isinstance(found, Mismatch) and not found
    assert reason in found.reason and found.depth == depth


def test_a_returned_value_counts_as_a_use() -> None:
    found = match(ADD, f"{LINEAR}%y = add(%l, %r) : f32[T, 8]", "%y, %l")
    assert isinstance(found, Mismatch) and found.reason == "%l is returned"
    kept = P("add", P("linear", Any("x"), Any("w"), single_use=False), Any("r"))
    assert match(kept, f"{LINEAR}%y = add(%l, %r) : f32[T, 8]", "%y, %l")


def test_the_nearer_mismatch_of_a_swap_is_told() -> None:
    pattern = P("add", P("mul", P("exp", Any("a")), Any("b")), Any("r"), commutative=True)
    body = "%n = neg(%x) : f32[T, 8]\n%m = mul(%n, %x) : f32[T, 8]\n%y = add(%r, %m) : f32[T, 8]"
    found = match(pattern, body)
    assert isinstance(found, Mismatch) and found.depth == 2
    assert found.reason == "neg stands where exp is needed"


def test_a_failed_branch_leaves_no_binding() -> None:
    pattern = P("add", P("mul", Any("a"), Any("a")), P("neg", Any("a")), commutative=True)
    body = "%n = neg(%x) : f32[T, 8]\n%m = mul(%x, %x) : f32[T, 8]\n%y = add(%n, %m) : f32[T, 8]"
    found = match(pattern, body)
    assert isinstance(found, Match) and found["a"].name == "x"
