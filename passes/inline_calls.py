"""Put every layer function's body where it is called: one flat ``main``, and the functions of groups beside it.

Before::

    func @main(%step: step) {
      param %norm.weight : f32[8]
      %y = call(%step, %x, fn=@layer_0, params="layers.0", states="0") : f32[T, 8]

After::

    func @main(%step: step) {
      param %norm.weight : f32[8]
      param %layers.0.w : f32[8, 8]
      state %kv.0 : paged_kv<f32, heads=1, dim=8>
      %h = linear(%x, %layers.0.w) : f32[T, 8]

Targets whose programs are lists of launches want it: a bucket's rewrites may then differ by layer, and the order of
weight reads over the whole step is plain to see.
"""

from dataclasses import replace
from functools import partial

from compilerllm.ir.builder import Builder
from compilerllm.ir.graph import Graph, Module, Node, Value, join_name, state_name
from compilerllm.ir.recipe import rename
from compilerllm.passes.report import PassReport


def inline_calls(module: Module, report: PassReport | None = None) -> Module:
    """The module with no ``call`` left. Layer functions go, functions of groups stay."""
    main = module.main
    b = Builder(main.name, main.dims)
    b.adopt(inputs=main.inputs, params=main.params, states=main.states)
    table: dict[Value, Value] = {v: v for v in (*main.inputs, *(p.value for p in main.params), *main.states)}
    called = set()
    for node in main.nodes:
        if node.op == "call":
            called.add(node.fn)
            _inline(b, node, module.functions[node.fn], table)
            if report is not None:
                report.matches += 1
        else:
            _copy(b, node, table)
    flat = b.finish(*(table[v] for v in main.outputs))
    kept = {name: g for name, g in module.functions.items() if name not in called and name != "main"}
    return Module({"main": flat, **kept}, module.attrs)


def _inline(b: Builder, call: Node, callee: Graph, outer: dict[Value, Value]) -> None:
    prefix, suffix = call.text("params", ""), call.text("states", "")
    table = {
        v: outer[given] for v, given in zip(callee.inputs, call.inputs, strict=True) if given is not None
    }
    for param in callee.params:
        recipe = rename(param.recipe, partial(join_name, prefix))
        table[param.value] = b.param(join_name(prefix, param.name), param.value.tensor, recipe)
    for state in callee.states:
        table[state] = b.state(state_name(state.name, suffix), state.state)
    for node in callee.nodes:
        _copy(b, node, table, prefix)
    outer.update(zip(call.outputs, (table[v] for v in callee.outputs), strict=True))


def _copy(b: Builder, node: Node, table: dict[Value, Value], prefix: str = "") -> None:
    """The node under fresh names, its module's path under ``prefix``; its types are the same: nothing is inferred again."""
    inputs = tuple(None if v is None else table[v] for v in node.inputs)
    outputs = tuple(Value(b.fresh(v.name), v.type) for v in node.outputs)
    path = join_name(prefix, node.origin.path) if node.origin.path else prefix
    b.append(Node(node.op, inputs, node.attrs, outputs, replace(node.origin, path=path)))
    table.update(zip(node.outputs, outputs, strict=True))
