"""Drop the gathering of sampled rows where a step samples all of its tokens.

Before::

    %rows = step_field(%step, field="sample_rows") : i32[R]
    %h.rows = gather_rows(%h, %rows) : bf16[R, 64]
    %n = rms_norm(%h.rows, %norm.weight, eps=1e-06) : bf16[R, 64]

After::

    %n = rms_norm(%h, %norm.weight, eps=1e-06) : bf16[T, 64]

For buckets of pure decoding: such a step has one token a sequence and samples each, so row r is token r and R is T.
Groups over sampled rows become groups over tokens.
Whoever picks a bucket must see to it that a step with unsampled tokens gets another.
"""

from dataclasses import replace

from compilerllm.ir.builder import Rewriter
from compilerllm.ir.dims import Dim, dim, substitute, symbol
from compilerllm.ir.graph import Attr, DimDecl, Graph, Module, Node, Value
from compilerllm.ir.types import StepType, TensorType
from compilerllm.passes.report import PassReport

BY = "sample_every_token"


def sample_every_token(module: Module, report: PassReport) -> Module:
    """Rewrite a flat ``main``, and the functions of its groups."""
    main = module.main
    if not any(isinstance(v.type, StepType) for v in main.inputs):
        return module
    producers = main.producers()
    gathers = {n for n in main.nodes if n.op == "gather_rows" and _of_step(producers.get(n.operand(1)))}
    if not gathers:
        return module
    report.matches += len(gathers)
    groups = {n.fn for n in main.nodes if n.op == "group"}
    bodies = [_over_tokens(module.functions[name]) for name in groups if _has_rows(module.functions[name])]
    return module.with_functions(_over_tokens(main, gathers), *bodies)


def _of_step(node: Node | None) -> bool:
    return node is not None and node.op == "step_field" and node.text("field") == "sample_rows"


def _has_rows(graph: Graph) -> bool:
    return any(d.name == "R" for d in graph.dims)


def _over_tokens(graph: Graph, gathers: "set[Node] | frozenset[Node]" = frozenset()) -> Graph:
    """The function with T where R was, less the gathers."""
    inputs = [Value(v.name, _type(v.tensor)) if _changes(v) else v for v in graph.inputs]
    r = Rewriter(graph, by=BY, inputs=inputs)
    for old, value in zip(graph.inputs, inputs, strict=True):
        r.set(old, value)

    def visit(_: Rewriter, node: Node) -> tuple[Value, ...] | None:
        if node in gathers:
            return (r.get(node.operand(0)),)
        attrs = {key: _attr(value) for key, value in node.attrs.items()}
        if attrs == dict(node.attrs) and node.op != "group":
            return None
        inputs = [None if v is None else r.get(v) for v in node.inputs]
        types = [_type(v.tensor) for v in node.outputs]
        return r.emit_node(node.op, inputs, attrs, types=types, name=node.outputs[0].name)

    new = r.run(visit)
    if graph.name == "main" or any(d.name == "T" for d in graph.dims):
        return new
    return replace(new, dims=tuple(DimDecl("T", d.low, d.high) if d.name == "R" else d for d in graph.dims))


def _changes(value: Value) -> bool:
    return isinstance(value.type, TensorType) and _type(value.type) != value.type


def _type(type: TensorType) -> TensorType:
    return type.with_shape(*map(_tokens, type.shape))


def _tokens(extent: Dim) -> Dim:
    return dim(substitute(extent, {"R": symbol("T")}))


def _attr(value: Attr) -> Attr:
    if isinstance(value, tuple):
        return tuple(_attr(v) for v in value)
    return _tokens(dim(value)) if hasattr(value, "free_symbols") else value
