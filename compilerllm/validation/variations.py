"""Near misses made from matches: a graph that a pass rewrites, changed a little at each node that the pass takes away.

A pass that relies on something it does not ask for (that nobody else uses a value, that two operands are the same, that
an optional operand is absent, which operand comes first) is right on every graph where that happens to hold. So each
such thing is taken away in turn; then the pass must refuse, or still be right.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial

from compilerllm.ir.builder import Rewriter, prune
from compilerllm.ir.errors import IRError
from compilerllm.ir.graph import Graph, Module, Node, Param, Value
from compilerllm.ir.op import lookup
from compilerllm.ir.types import TensorType
from compilerllm.ir.verify import verify

Variation = tuple[str, Module]


def variations(module: Module, function: str, node: Node) -> Iterator[Variation]:
    """What may be changed at ``node``, each as (words, the changed module). Ill-typed changes are left out."""
    graph = module.functions[function]
    for words, change in _changes(graph, function, node):
        try:
            changed = module.with_functions(change())
            verify(changed)
        except IRError:
            continue
        yield words, changed


def _changes(graph: Graph, function: str, node: Node) -> Iterator[tuple[str, Callable[[], Graph]]]:
    uses = graph.uses()
    if function == "main":
        for value in node.outputs:
            if value not in graph.outputs and uses[value]:
                yield (
                    f"%{value.name} is returned too",
                    partial(replace, graph, outputs=(*graph.outputs, value)),
                )
    for i, a in enumerate(node.inputs):
        if a is None:
            continue
        for j in range(i + 1, len(node.inputs)):
            b = node.inputs[j]
            if b is not None and b is not a and a.type == b.type:
                yield f"operands {i} and {j} are swapped", partial(_with, graph, node, {i: b, j: a})
        other = _another(graph, node, a)
        if other is not None:
            yield f"operand {i} is %{other.name}", partial(_with, graph, node, {i: other})
    for index, operand in enumerate(lookup(node.op).operands):
        if not operand.optional:
            continue
        if node.input(index) is not None:
            yield f"operand {operand.name!r} is left out", partial(_with, graph, node, {index: None})
        elif (param := _param_for(graph, node, operand.name)) is not None:
            change = partial(_with, graph, node, {index: param.value}, param)
            yield f"operand {operand.name!r} is added", change


def _another(graph: Graph, node: Node, value: Value) -> Value | None:
    """Another value of the same type that is there before ``node``: the last one made, or an input, or a parameter."""
    before = [v for n in graph.nodes[: graph.nodes.index(node)] for v in n.outputs]
    candidates = [*reversed(before), *graph.inputs, *(p.value for p in graph.params)]
    return next(
        (v for v in candidates if v is not value and v not in node.inputs and v.type == value.type
         and isinstance(v.type, TensorType)), None
    )  # fmt: skip


def _param_for(graph: Graph, node: Node, name: str) -> Param | None:
    """A parameter of the shape that an optional operand of a linear, a norm or an attention has."""
    x = node.operands[0]
    if name == "bias" and node.op == "linear":
        shape = (node.operand(1).shape[0],)
    elif name in ("weight", "bias") and node.op in (
        "rms_norm",
        "layer_norm",
        "add_rms_norm",
        "add_layer_norm",
    ):
        shape = (x.shape[-1],)
    elif name == "sinks" and node.op in ("attention", "paged_attention"):
        shape = (x.shape[1],)
    else:
        return None
    if not all(isinstance(d, int) for d in shape):
        return None
    taken = {v.name for v in graph.values()}
    return (
        None
        if f"varied.{name}" in taken
        else Param.read(f"varied.{name}", TensorType(node.outputs[0].dtype, shape))
    )


def _with(graph: Graph, node: Node, other: Mapping[int, Value | None], param: Param | None = None) -> Graph:
    """The function with ``other`` operands, by place, for one node; types are inferred anew, and what nobody uses goes."""
    count = max(len(node.inputs), *(i + 1 for i in other))
    inputs = tuple(other[i] if i in other else node.input(i) for i in range(count))
    r = Rewriter(graph, by="")
    if param is not None:
        r.adopt(params=(param,))

    def visit(_: Rewriter, old: Node) -> tuple[Value, ...] | None:
        if old is not node:
            return None
        inferred = lookup(old.op).infer(inputs, old.attrs)
        types = tuple(v.type for v in old.outputs) if inferred is None else inferred
        same = types == tuple(v.type for v in old.outputs)
        made = (
            old.outputs if same else tuple(Value(v.name, t) for v, t in zip(old.outputs, types, strict=True))
        )
        r.append(Node(old.op, inputs, old.attrs, made, old.origin))
        return made

    return prune(r.run(visit))
