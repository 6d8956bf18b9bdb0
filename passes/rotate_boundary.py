"""Move the add that ends a layer to where its sum is used, so that it meets the next layer's norm.

Before::

    func @layer(%x: bf16[T, 64]) {
      %n = rms_norm(%x, ...) ...
      %y = add(%residual, %mlp) : bf16[T, 64]
      return %y
    }
    main: %h1 = call(%h0, fn=@layer) ; %h2 = call(%h1, fn=@layer) ; rms_norm(%h2)

After::

    func @layer(%x: bf16[T, 64], %x.addend: bf16[T, 64]) {
      %sum = add(%x, %x.addend) ; %n = rms_norm(%sum, ...) ...
      return %residual, %mlp
    }
    main: %zero = full(...) ; %a, %b = call(%h0, %zero, fn=@layer) ; %c, %d = call(%a, %b, fn=@layer)
          %s = add(%c, %d) ; rms_norm(%s)

The first call adds zero, which changes nothing but the sign of a zero. Sums are the same sums, rounded the same way.
"""

from dataclasses import dataclass, replace

from compilerllm.ir.builder import Rewriter, prune
from compilerllm.ir.graph import Graph, Module, Node, Value
from compilerllm.passes.report import PassReport

BY = "rotate_boundary"


@dataclass(frozen=True)
class _Plan:
    """Per function: the results that are split, and the inputs that become two."""

    outputs: dict[str, frozenset[int]]
    inputs: dict[str, frozenset[int]]


def rotate_boundary(module: Module, report: PassReport) -> Module:
    """Rewrite ``main`` and the functions it calls whose results end in an add."""
    splits = {name: _adds(graph) for name, graph in module.functions.items() if name != "main"}
    splits = {name: found for name, found in splits.items() if found and _only_called_by_main(module, name)}
    sums = {
        node.outputs[i] for node, _ in module.calls() for i in splits.get(node.fn, ())
    }  # values of main that will be a sum of two
    takes: dict[str, set[int]] = {}
    for node, _ in module.calls():
        found = {i for i, v in enumerate(node.operands) if v in sums}
        if found and _only_called_by_main(module, node.fn):
            takes.setdefault(node.fn, set()).update(found)
    # A split pays only where a later layer takes both parts.
    if not takes:
        return module
    plan = _Plan({n: frozenset(s) for n, s in splits.items()}, {n: frozenset(s) for n, s in takes.items()})
    changed = [_function(module.functions[name], plan) for name in {*plan.outputs, *plan.inputs}]
    report.match(len(changed))
    return module.with_functions(*changed, _main(module.main, plan))


def _only_called_by_main(module: Module, name: str) -> bool:
    return all(
        node.op not in ("call", "group") or node.fn != name
        for other, graph in module.functions.items() if other != "main" for node in graph.nodes
    )  # fmt: skip


def _adds(graph: Graph) -> frozenset[int]:
    """Results that are the sum of two values of their own type, used nowhere else."""
    producers, uses = graph.producers(), graph.uses()
    found = set()
    for i, value in enumerate(graph.outputs):
        node = producers.get(value)
        if node is None or node.op != "add" or len(node.operands) != 2:
            continue
        used_once = not uses[value] and graph.outputs.count(value) == 1
        if used_once and all(v.type == value.type for v in node.operands):
            found.add(i)
    return frozenset(found)


def _function(graph: Graph, plan: _Plan) -> Graph:
    taken, split = plan.inputs.get(graph.name, frozenset()), plan.outputs.get(graph.name, frozenset())
    inputs: list[Value] = []
    pairs: list[tuple[Value, Value, Value]] = []
    names = {v.name for v in graph.values()}
    for i, value in enumerate(graph.inputs):
        inputs.append(value)
        if i in taken:
            name = f"{value.name}.addend"
            while name in names:
                name += "_"
            inputs.append(Value(name, value.type))
            pairs.append((value, value, inputs[-1]))
    r = Rewriter(graph, BY, inputs=inputs)
    for old, a, b in pairs:
        first_use = next((n.origin for n in graph.nodes if old in n.operands), r.origin)
        r.set(old, r.emit("add", a, b, name=f"{a.name}.sum", origin=first_use.touched(BY)))
    producers = graph.producers()
    last_adds = {i: producers[graph.outputs[i]] for i in split}
    new = r.run(lambda _, node: None)
    outputs: list[Value] = []
    for i, old in enumerate(graph.outputs):
        outputs += [r.get(v) for v in last_adds[i].operands] if i in last_adds else [r.get(old)]
    return prune(replace(new, outputs=tuple(outputs)))


def _main(graph: Graph, plan: _Plan) -> Graph:
    r = Rewriter(graph, BY)
    parts: dict[Value, tuple[Value, Value]] = {}
    zeros: dict[object, Value] = {}

    def zero(like: Value) -> Value:
        if like.type not in zeros:
            zeros[like.type] = r.emit("full", shape=like.shape, value=0.0, dtype=like.dtype, name="zero")
        return zeros[like.type]

    def call(node: Node) -> tuple[Value, ...]:
        taken, split = plan.inputs.get(node.fn, frozenset()), plan.outputs.get(node.fn, frozenset())
        operands: list[Value] = []
        for i, value in enumerate(node.operands):
            if i not in taken:
                operands.append(r.get(value))
            elif value in parts:
                operands += parts[value]
            else:
                operands += (r.get(value), zero(r.get(value)))
        types = []
        for i, value in enumerate(node.outputs):
            types += [value.tensor] * (2 if i in split else 1)
        results = list(r.emit_node("call", operands, node.attrs, types=types, name=node.outputs[0].name))
        outputs: list[Value] = []
        for i, value in enumerate(node.outputs):
            first = results.pop(0)
            if i in split:
                parts[value] = (first, results.pop(0))
                outputs.append(r.emit("add", *parts[value], name=f"{value.name}.sum"))
            else:
                outputs.append(first)
        return tuple(outputs)

    return r.run(lambda _, node: call(node) if node.op == "call" else None)
