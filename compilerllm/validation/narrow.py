"""A large model's single nodes with fewer rows of weights, so that running their kernels takes little time and memory.

Kernels that multiply by a weight [N, K] go through N in tiles that know nothing of each other: what some tiles and a tail
of the same alignment show holds for more of them. K, which one sum goes through, stays. Tables and experts are as many
independent parts.
"""

from dataclasses import replace

from compilerllm.ir.graph import Graph, Module, Node, Value
from compilerllm.ir.op import lookup

FEW = 512  # rows: a multiple of every tile, so that what is left over stays the same
FEW_EXPERTS = 8
# op -> operands with the weight's rows as their first axis, and as their last.
_ALONG_ROWS: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "linear": ((1, 2), ()), "linear_act": ((1, 2), ()), "linear_gated": ((1, 2), ()), "linear_add": ((1, 3), (2,)),
    "norm_linear": ((3, 4), ()), "norm_linear_gated": ((3, 4), ()), "embedding": ((1,), ()), "experts": ((3, 4, 5, 6), ()),
}  # fmt: skip


def narrowed_rows(module: Module) -> Module:
    """A module of one node with fewer rows of weights; what has few, or another op, as it is."""
    main = module.main
    if len(main.nodes) != 1 or main.nodes[0].op not in _ALONG_ROWS:
        return module
    (node,) = main.nodes
    first, last = _ALONG_ROWS[node.op]
    new: dict[Value, Value] = {}
    for at in (*first, *last):
        value = node.input(at) if at < len(node.inputs) else None
        if value is None:
            continue
        *lead, end = value.shape
        rows = value.shape[0] if at in first else end
        few = _few(node, rows) if isinstance(rows, int) else rows
        shape = (few, *value.shape[1:]) if at in first else (*lead, few)
        new[value] = Value(value.name, value.tensor.with_shape(*shape))
    inputs = tuple(None if v is None else new.get(v, v) for v in node.inputs)
    inferred = lookup(node.op).infer(inputs, node.attrs)
    assert inferred is not None, f"{node.op} infers its types"
    outputs = tuple(Value(v.name, t) for v, t in zip(node.outputs, inferred, strict=True))
    graph = Graph(
        main.name, main.dims, tuple(new.get(v, v) for v in main.inputs),
        tuple(replace(p, value=new.get(p.value, p.value)) for p in main.params), main.states,
        (replace(node, inputs=inputs, outputs=outputs),), outputs,
    )  # fmt: skip
    return module.with_functions(graph)


def _few(node: Node, rows: int) -> int:
    if node.op == "experts":
        return min(rows, FEW_EXPERTS)
    if "gated" in node.op:  # two halves
        return 2 * (rows // 2 if rows <= 4 * FEW else FEW + rows // 2 % FEW)
    return rows if rows <= 2 * FEW else FEW + rows % FEW
