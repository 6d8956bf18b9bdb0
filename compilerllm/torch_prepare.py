"""Readies the graph of an ordinary torch function for the passes and the CPU's code generator.

Inputs that serve as weights become parameters (so that projections can be packed and laid out for kernels), products
with a weight become linears over all leading axes (AOTAutograd flattens them, which would hide an epilogue), and what no
generated kernel computes (products of two activations, running sums) becomes a call of torch's own operator.
"""

from collections.abc import Iterable
from dataclasses import replace

from compilerllm.ir.builder import Rewriter
from compilerllm.ir.graph import Attr, Graph, Node, Param, Value
from compilerllm.ir.recipe import Permute, Read
from compilerllm.ir.types import TensorType

BY = "torch_prepare"
_KERNEL_FLOATS = ("f32", "bf16")
# Operands that kernels read in a layout of their own, by op: places in its signature.
_WEIGHT_PLACES = {"linear": (1,), "embedding": (1,), "experts": (3, 4, 5, 6)}
# Passes that make ops whose kernels know f32 and bf16 alone.
FLOAT32_PASSES = frozenset(
    ("raise_gated_act", "raise_softcap", "fuse_gated", "fuse_linear_act", "fuse_linear_add")
)


def prepare(graph: Graph, static: Iterable[str]) -> Graph:
    """``static`` names inputs that stay the same from call to call (parameters and buffers of a module)."""
    graph = weights_to_params(graph, frozenset(static))
    graph = Rewriter(graph, BY).run(_products)
    graph = fold_bias(unflatten_linears(graph))
    return Rewriter(graph, BY).run(_host_calls)


def weights_to_params(graph: Graph, static: frozenset[str]) -> Graph:
    """Make parameters of static inputs, and of other inputs of fixed shape that a kernel reads as a weight."""
    read = {n.inputs[i] for n in graph.nodes for i in _WEIGHT_PLACES.get(n.op, ()) if i < len(n.inputs)}
    chosen = [v for v in graph.inputs if _fixed(v) and (v.name in static or v in read)]
    params = tuple(Param(v, Read(v.name)) for v in chosen)
    kept = tuple(v for v in graph.inputs if v not in chosen)
    return replace(graph, inputs=kept, params=(*graph.params, *params))


def _fixed(value: Value) -> bool:
    return isinstance(value.type, TensorType) and all(isinstance(extent, int) for extent in value.shape)


def _products(r: Rewriter, node: Node) -> tuple[Value, ...] | None:
    """``matmul(x, W)`` with a parameter W [K, N] is a linear; a linear whose weight is computed is a matmul."""
    params = {p.value: p for p in r.graph.params}
    if node.op == "matmul":
        x, other = (r.get(v) for v in node.operands)
        param = params.get(node.operands[1])
        if param is not None and len(other.shape) == 2 and other.dtype in _KERNEL_FLOATS:
            turned = other.tensor.with_shape(other.shape[1], other.shape[0])
            weight = r.param(r.fresh(f"{other.name}_turned"), turned, Permute(param.recipe, (1, 0)))
            return (r.emit("linear", x, weight),)
    if node.op == "linear":
        x, weight, *bias = (r.get(v) for v in node.operands)
        if node.operands[1] not in params or weight.dtype not in _KERNEL_FLOATS:
            product = r.emit("matmul", x, r.emit("permute", weight, order=(1, 0)))
            return (r.emit("add", product, bias[0]) if bias else product,)
    if node.op == "embedding" and node.operands[1] not in params:
        ids, table = (r.get(v) for v in node.operands)
        flat = r.emit("reshape", ids, shape=(ids.tensor.numel,))
        rows = r.emit("gather_rows", table, flat)
        return (r.emit("reshape", rows, shape=(*ids.shape, *table.shape[1:])),)
    return None


def unflatten_linears(graph: Graph) -> Graph:
    """``reshape(linear(reshape(x, [M, K]), w), [..., N])`` with x [..., K] is ``linear(x, w)``."""
    producers, uses = graph.producers(), graph.uses()

    def visit(r: Rewriter, node: Node) -> tuple[Value, ...] | None:
        product = producers.get(node.operands[0]) if node.op == "reshape" else None
        if product is None or product.op != "linear":
            return None
        flattened = producers.get(product.operands[0])
        once = len(uses[product.output]) == 1 and product.output not in graph.outputs
        if flattened is None or flattened.op != "reshape" or not once:
            return None
        x = flattened.operands[0]
        if (*x.shape[:-1], product.output.shape[-1]) != node.output.shape or x.shape[-1] != product.operands[
            1
        ].shape[1]:
            return None
        return r.emit_node(
            "linear", [r.get(v) for v in (x, *product.operands[1:])], product.attrs, origin=product.origin
        )

    return Rewriter(graph, BY).run(visit)


def fold_bias(graph: Graph) -> Graph:
    """``add(linear(x, w), b)`` with b [N] in f32 is ``linear(x, w, b)``; in bf16 it would round once less."""
    producers, uses = graph.producers(), graph.uses()

    def visit(r: Rewriter, node: Node) -> tuple[Value, ...] | None:
        if node.op != "add" or len(node.operands) != 2 or node.output.dtype != "f32":
            return None
        for product, bias in (node.operands, node.operands[::-1]):
            maker = producers.get(product)
            if maker is None or maker.op != "linear" or maker.input(2) is not None:
                continue
            once = len(uses[product]) == 1 and product not in graph.outputs
            if once and bias not in producers and bias.tensor == product.tensor.with_shape(product.shape[-1]):
                operands = [r.get(v) for v in (*maker.operands, bias)]
                return r.emit_node("linear", operands, maker.attrs, origin=maker.origin)
        return None

    return Rewriter(graph, BY).run(visit)


def _host_calls(r: Rewriter, node: Node) -> tuple[Value, ...] | None:
    """Torch's operator, run in mid-program on the program's memory."""
    args: tuple[Attr, ...]
    match node.op:
        case "matmul":
            target, args = "aten.matmul.default", ("%0", "%1")
        case "cumsum":
            target, args = "aten.cumsum.default", ("%0", node.integer("axis"))
        case _:
            return None
    operands = [r.get(v) for v in node.operands]
    types = [v.tensor for v in node.outputs]
    return r.emit_node("aten", operands, {"target": target, "args": args}, types=types, name=node.op)


def dtypes(graph: Graph) -> frozenset[str]:
    """Dtypes of all tensors of the graph."""
    return frozenset(v.dtype for v in graph.values() if isinstance(v.type, TensorType))
