"""What a node must move and compute, whatever kernel runs it: the floor that a kernel's time is held against."""

from collections.abc import Mapping

from compilerllm.ir.dims import Dim, substitute
from compilerllm.ir.graph import Module, Node
from compilerllm.ir.op import lookup
from compilerllm.ir.types import StateType, TensorType
from compilerllm.kernels.launch.dtypes import ITEM_BYTES
from compilerllm.kernels.launch.gpu.program import Cost

# Ops that read of a table only the rows they need.
_GATHERS = frozenset(("embedding", "gather_rows"))


def node_cost(node: Node, bounds: Mapping[str, Dim], module: Module | None = None) -> Cost:
    """Bytes and operations of a node at the bucket's bounds. Experts: those that so many tokens hit on average, if routing
    is uniform. module: where the function of a group is; without it a group counts its bytes alone."""
    operands = [v for v in node.operands if isinstance(v.type, TensorType)]
    read = operands[:1] if node.op in _GATHERS else operands

    def number(size: Dim, context: int = 0) -> float:
        return float(substitute(size, {**bounds, "C": context}))

    nbytes = sum(number(v.tensor.nbytes) for v in (*read, *node.outputs))
    flops = lookup(node.op).flops(node)
    if node.op == "group" and module is not None:
        flops = sum((lookup(n.op).flops(n) for n in module.functions[node.fn].nodes), start=flops)
    if node.op in _GATHERS:
        nbytes += number(node.output.tensor.nbytes)
    if node.op == "experts":
        weights = [v for v in operands if len(v.shape) == 3]
        tokens, count = number(operands[0].shape[0]), number(weights[0].shape[0])
        top = number(operands[1].shape[1])
        missed = (1 - top / count) ** tokens
        nbytes -= missed * sum(number(v.tensor.nbytes) for v in weights)
    base, with_one = number(flops), number(flops, 1)
    context_bytes = 0.0
    if node.op in ("paged_attention", "qkv_attention"):
        state = next(v.state for v in node.operands if isinstance(v.type, StateType))
        context_bytes = 2.0 * state["heads"] * state["dim"] * ITEM_BYTES[state.dtype]
    return Cost(nbytes, base, context_bytes, with_one - base)
