"""Serve several sequences in one step: keys and values live in paged states, the step says which token is whose.

Before::

    func @layer(%x: bf16[T, 64], ...) {
      %a = attention(%q, %k, %v, scale=0.25, causal=true) : bf16[T, 4, 16]

After::

    func @layer(%step: step, %x: bf16[T, 64], ...) {
      state %kv : paged_kv<bf16, heads=2, dim=16>
      kv_write(%kv, %k, %v, %step)
      %a = paged_attention(%q, %kv, %step, scale=0.25) : bf16[T, 4, 16]

``main`` takes ``%step`` only: token ids and positions become fields of it. A function that needs the step takes it as
its first input. What would mix tokens of different sequences is refused (``servable.py``).
"""

from collections.abc import Callable

from compilerllm.ir.builder import Rewriter
from compilerllm.ir.graph import Attr, Graph, Module, Node, Value
from compilerllm.ir.types import STEP, StateType, StepType
from compilerllm.passes.errors import NotServable
from compilerllm.passes.opinfo import same_graph
from compilerllm.passes.report import PassReport
from compilerllm.passes.servable import check_servable

TOKEN_IDS = ("input_ids", "token_ids")
POSITIONS = ("positions", "position_ids")
TOKEN_TYPES = ("token_types", "token_type_ids")
# Ops that take whole numbers of any width, so that the step's i32 needs no cast.
_ANY_INTEGER = frozenset(("embedding", "rotary_table", "cast", "gather_rows"))
_MAX_ROWS = 2**31 - 1

# One attention in a graph being rewritten, the step, how many came before it in the function -> its result.
Replace = Callable[[Rewriter, Node, Value, int], Value]


def page_attention(module: Module, report: PassReport) -> Module:
    """Rewrite all functions. Raises ``NotServable`` naming the function, the reason and what to do."""

    def page(r: Rewriter, node: Node, step: Value, number: int) -> Value:
        return _page(r, node, step, f"kv{number + 1}" if number else "kv")

    return give_step(module, report, "page_attention", page)


def give_step(module: Module, report: PassReport, by: str, replace: Replace) -> Module:
    """The module with the step as ``main``'s only input and every attention replaced. Raises ``NotServable``."""
    if any(isinstance(v.type, StepType) for v in module.main.inputs):
        return module
    if not any(n.op in ("attention", "slot_conv") for g in module.functions.values() for n in g.nodes):
        raise NotServable(
            "main", "it has no attention node, so nothing carries a sequence's context from step to step",
            "Capture must turn each attention layer into one attention op; a class with attention code of its own "
            "needs an entry in models/.",
        )  # fmt: skip
    with_step = _functions_with_step(module)
    for name, graph in module.functions.items():
        if name != "main":
            module = module.with_functions(_give_function(graph, with_step, report, by, replace))
    module = module.with_functions(_give_function(module.main, with_step, report, by, replace))
    for graph in module.functions.values():
        check_servable(graph)
    return module


def _functions_with_step(module: Module) -> frozenset[str]:
    """``main``, functions with attention, and those that call one."""
    found = {"main"} | {n for n, g in module.functions.items() if any(x.op == "attention" for x in g.nodes)}
    while True:
        more = {
            n for n, g in module.functions.items() if any(x.op == "call" and x.fn in found for x in g.nodes)
        }
        if more <= found:
            return frozenset(found)
        found |= more


def _give_function(
    graph: Graph, with_step: frozenset[str], report: PassReport, by: str, replace: Replace
) -> Graph:
    if graph.name not in with_step:
        return graph
    step = Value("step", STEP)
    is_main = graph.name == "main"
    inputs = (step,) if is_main else (step, *graph.inputs)
    if any(v.name == "step" for v in graph.values()):
        raise NotServable(
            graph.name, "it already has a value called %step", "Rename it in the captured graph."
        )
    r = Rewriter(graph, by, inputs=inputs)
    r.fresh("step")
    if is_main:
        _bind_main_inputs(graph, r, step)
        for name in ("S", "R"):
            if all(d.name != name for d in graph.dims):
                r.dim(name, 1 if name == "S" else 0, _MAX_ROWS)

    def visit(_: Rewriter, node: Node) -> tuple[Value, ...] | None:
        if node.op == "attention":
            report.match()
            replaced.append(node)
            return (replace(r, node, step, len(replaced) - 1),)
        if node.op == "call" and node.fn in with_step:
            operands = [step, *(r.get(v) for v in node.operands)]
            suffix = node.text("states", "") or _suffix(node.text("params", ""))
            attrs = {**node.attrs, **({"states": suffix} if suffix else {})}
            types = [v.tensor for v in node.outputs]
            return r.emit_node("call", operands, attrs, types=types, name=node.outputs[0].name)
        if node.op not in _ANY_INTEGER and any(v in wide for v in node.operands):
            operands_as_captured = [_widened(r, v, wide) for v in node.inputs]
            types = [v.tensor for v in node.outputs]
            return r.emit_node(
                node.op, operands_as_captured, node.attrs, types=types, name=node.outputs[0].name
            )
        return None

    replaced: list[Node] = []
    wide = {v: v.tensor.dtype for v in graph.inputs if is_main}
    return same_graph(graph, r.run(visit))


def _suffix(params: str) -> str:
    """The layer's number in ``model.layers.7``: what tells its states from other layers'."""
    return params.rpartition(".")[2]


def _widened(r: Rewriter, value: Value | None, wide: dict[Value, str]) -> Value | None:
    """A step field in the dtype the captured graph had."""
    if value is None or value not in wide:
        return None if value is None else r.get(value)
    new = r.get(value)
    return new if new.dtype == wide[value] else r.emit("cast", new, dtype=wide[value], name=value.name)


def _bind_main_inputs(graph: Graph, r: Rewriter, step: Value) -> None:
    for value in graph.inputs:
        names = {"token_ids": TOKEN_IDS, "positions": POSITIONS, "token_types": TOKEN_TYPES}
        field = next((field for field, known in names.items() if value.name in known), None)
        if field is None:
            raise NotServable(
                "main", f"it takes %{value.name}, which a step does not hold",
                f"A captured main takes {TOKEN_IDS[0]}, {POSITIONS[0]} and {TOKEN_TYPES[0]} only.",
            )  # fmt: skip
        if value.tensor.rank != 1:
            raise NotServable("main", f"%{value.name} is {value.type}, not [T]", "Run drop_batch first.")
        r.set(value, r.emit("step_field", step, field=field, name=field))


def _page(r: Rewriter, node: Node, step: Value, name: str) -> Value:
    """kv_write and paged_attention in place of one attention."""
    q, k, v = (r.get(x) for x in node.operands[:3])
    sinks = node.input(3)
    if not node.attr("causal"):
        raise NotServable(
            r.graph.name, f"{node!r} is not causal", "A decoder's attention must look backwards only."
        )
    heads, dim, width = k.shape[1], k.shape[2], v.shape[2]
    if not isinstance(heads, int) or not isinstance(dim, int) or not isinstance(width, int):
        raise NotServable(
            r.graph.name, f"{node!r} has heads of unknown size {k.type}", "Heads must be numbers."
        )
    if width > dim:
        raise NotServable(
            r.graph.name,
            f"{node!r} has values wider ({width}) than keys ({dim})",
            "Such a state is not there yet.",
        )
    if width < dim:  # one state holds both, so values are filled up with zeros (deepseek)
        zeros = r.emit("full", shape=(*v.shape[:2], dim - width), value=0.0, dtype=v.dtype)
        v = r.emit("concat", v, zeros, axis=2)
    window = node.integer("window", 0)
    fields = (("heads", heads), ("dim", dim), *((("window", window),) if window else ()))
    kv = r.state(name, StateType("paged_kv", k.dtype, fields))
    r.emit_many("kv_write", kv, k, v, step)
    attrs: dict[str, Attr] = {"scale": node.number("scale")}
    if window:
        attrs["window"] = window
    if node.attrs.get("softcap"):
        attrs["softcap"] = node.number("softcap")
    operands = (q, kv, step, None if sinks is None else r.get(sinks))
    (out,) = r.emit_node("paged_attention", operands, attrs, name=node.output.name)
    return r.emit("slice", out, axis=2, start=0, stop=width) if width < dim else out
