"""The verifier: one broken graph for each rule, and the message that names function and node."""

from dataclasses import replace

import pytest

from compilerllm.ir.errors import InvalidGraph
from compilerllm.ir.graph import DimDecl, FuncRef, Graph, Module, Node, Param, Value
from compilerllm.ir.recipe import Convert, Read, Relayout
from compilerllm.ir.types import STEP, StateType, TensorType
from compilerllm.ir.verify import verify

F32 = TensorType("f32", ("T", 8))
X, Y = Value("x", F32), Value("y", F32)
NEG = Node("neg", (X,), {}, (Y,))
GOOD = Graph("main", (DimDecl("T", 1, 64),), (X,), (), (), (NEG,), (Y,))
WIDE = TensorType("f32", (8,))
KV = Value("kv", StateType("paged_kv", "f32", (("heads", 2), ("dim", 4))))


def callee(**changes: object) -> Graph:
    """A function that takes and gives what ``NEG`` does."""
    a, b = Value("a", F32), Value("b", F32)
    graph = Graph("other", GOOD.dims, (a,), (), (), (Node("neg", (a,), {}, (b,)),), (b,))
    return replace(graph, **changes)  # type: ignore[arg-type]


def calling(op: str = "call", name: str = "other", node: Node | None = None) -> Graph:
    return replace(GOOD, nodes=(node or Node(op, (X,), {"fn": FuncRef(name)}, (Y,)),))


def test_good_graphs_pass() -> None:
    verify(Module({"main": GOOD}))
    verify(Module({"main": calling(), "other": callee()}))
    verify(Module({"main": calling("group"), "other": callee()}))


GRAPHS = {
    "range": (replace(GOOD, dims=(DimDecl("T", 5, 4),)), r"@main: dim T in \[5, 4\] is not a range"),
    "negative range": (replace(GOOD, dims=(DimDecl("T", -1, 4),)), "is not a range"),
    "undeclared": (replace(GOOD, dims=()), r"@main: %x: f32\[T, 8\] uses undeclared dimension T"),
    "input twice": (replace(GOOD, inputs=(X, Value("x", WIDE))), "@main: %x is defined twice"),
    "result twice": (replace(GOOD, nodes=(NEG, NEG)), "%y is defined twice"),
    "state as input": (replace(GOOD, inputs=(X, KV)), "input %kv is a state"),
    "tensor as state": (replace(GOOD, states=(Value("s", WIDE),)), r"state %s is a f32\[8\]"),
    "state as param": (replace(GOOD, params=(Param(KV, Read("kv")),)), "parameter %kv must be a tensor"),
    "symbolic param": (
        replace(GOOD, params=(Param(Value("w", F32), Read("w")),)), r"%w must have a fixed shape, not f32\[T, 8\]",
    ),
    "inner relayout": (
        replace(GOOD, params=(Param(Value("w", WIDE), Convert(Relayout(Read("w"), "n16"), "f32")),)),
        "parameter %w: relayout must be the outermost step",
    ),
    "undefined": (replace(GOOD, inputs=(Value("z", F32),)), r"%y = neg\(%x\) uses %x before it is defined"),
    "another value of that name": (replace(GOOD, inputs=(Value("x", F32),)), "uses %x before it is defined"),
    "undefined result": (replace(GOOD, outputs=(Value("z", F32),)), "returns %z, which is not defined"),
    "wrong type": (
        replace(GOOD, nodes=(Node("neg", (X,), {}, (Value("y", WIDE),)),)),
        r"%y = neg\(%x\) is typed f32\[8\], but its rule gives f32\[T, 8\]",
    ),
    "refused": (replace(GOOD, nodes=(Node("softmax", (X,), {"axis": 2}, (Y,)),)), "softmax: axis 2 is outside rank 2"),
    "unknown op": (replace(GOOD, nodes=(Node("negg", (X,), {}, (Y,)),)), "unknown op 'negg'"),
}  # fmt: skip


@pytest.mark.parametrize("name", GRAPHS)
def test_graph_rules(name: str) -> None:
    graph, message = GRAPHS[name]
    with pytest.raises(InvalidGraph, match=message):
        verify(Module({"main": graph}))


MODULES = {
    "wrong key": ({"main": GOOD, "f": callee()}, "function @other is registered as 'f'"),
    "no callee": ({"main": calling()}, r"%y = call\(%x\) calls @other, which the module does not have"),
    "inputs": ({"main": calling(), "other": callee(inputs=(), nodes=(), states=(KV,), outputs=(KV,))}, "passes 1 and takes 1 values, but @other takes 0 and gives 1"),
    "outputs": (
        {"main": calling(), "other": callee(outputs=())}, "passes 1 and takes 1 values, but @other takes 1 and gives 0",
    ),
    "types": (
        {"main": calling(), "other": callee(inputs=(Value("a", STEP),), nodes=(), outputs=(KV,), states=(KV,))},
        r"%x: f32\[T, 8\] does not fit %a: step of @other",
    ),
    "group with params": (
        {"main": calling("group"), "other": callee(params=(Param(Value("w", WIDE), Read("w")),))},
        "group @other must take everything as inputs",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MODULES)
def test_module_rules(name: str) -> None:
    functions, message = MODULES[name]
    with pytest.raises(InvalidGraph, match=message):
        verify(Module(functions))


def test_recursion_is_shown_as_a_path() -> None:
    a, b = Value("a", F32), Value("b", F32)
    back = Graph("other", GOOD.dims, (a,), (), (), (Node("call", (a,), {"fn": FuncRef("main")}, (b,)),), (b,))
    with pytest.raises(InvalidGraph, match="@main calls itself through main -> other -> main"):
        verify(Module({"main": calling(), "other": back}))
