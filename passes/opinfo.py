"""Which ops are pointwise, row-wise or mere views: what several passes must agree on."""

from compilerllm.ir.dims import Dim, free_dims
from compilerllm.ir.graph import Graph, Node, Value
from compilerllm.ir.types import TensorType

UNARY = frozenset(
    [
        "neg",
        "abs",
        "exp",
        "log",
        "sqrt",
        "rsqrt",
        "reciprocal",
        "tanh",
        "sigmoid",
        "silu",
        "relu",
        "gelu",
        "sin",
        "cos",
        "gelu_tanh",
        "erf",
        "floor",
        "log1p",
        "square",
        "logical_not",
    ]
)
ARITHMETIC = frozenset(
    [
        "add",
        "sub",
        "mul",
        "div",
        "pow",
        "maximum",
        "minimum",
        "remainder",
        "floor_div",
        "logical_and",
        "logical_or",
    ]
)
COMPARISONS = frozenset(["eq", "ne", "lt", "le", "gt", "ge"])
BINARY = ARITHMETIC | COMPARISONS
# One result element from the elements at the same place (after broadcasting).
POINTWISE = UNARY | BINARY | {"where", "cast", "softcap", "gated_act"}
REDUCTIONS = frozenset(["sum", "mean", "amax", "amin", "argmax", "prod"])
# Ops with an ``axis`` along which a whole row is needed.
ALONG_AXIS = REDUCTIONS | {"softmax", "cumsum"}
NORMS = frozenset(("rms_norm", "layer_norm"))
# Each row of the last axis of ``x`` by itself; other operands are weights.
LAST_AXIS = NORMS | {"linear", "topk", "linear_act", "linear_gated", "gated_act_packed"}
VIEWS = frozenset(("reshape",))
# Activations that have a one-node spelling; the name is that of gated_act's and linear_act's attribute.
ACTIVATION_NODES = frozenset(("silu", "gelu", "gelu_tanh", "relu", "sigmoid"))


def axis_of(node: Node, name: str = "axis") -> int:
    """The axis attribute as a number from 0 on."""
    return node.integer(name) % node.operands[0].tensor.rank


def has_dim(extent: Dim, name: str) -> bool:
    return name in free_dims(extent)


def axes_with(type: TensorType, name: str) -> tuple[int, ...]:
    """The axes whose extent depends on a dimension."""
    return tuple(i for i, extent in enumerate(type.shape) if has_dim(extent, name))


def tensors(values: "tuple[Value | None, ...]") -> list[Value]:
    """Those that are tensors."""
    return [v for v in values if v is not None and isinstance(v.type, TensorType)]


def same_graph(old: Graph, new: Graph) -> Graph:
    """``old`` itself where ``new`` is the same in all parts, so that an idle pass is seen as one."""
    unchanged = (
        len(old.nodes) == len(new.nodes)
        and all(a is b for a, b in zip(old.nodes, new.nodes, strict=True))
        and all(
            len(a) == len(b) and all(x is y for x, y in zip(a, b, strict=True))
            for a, b in ((old.inputs, new.inputs), (old.outputs, new.outputs), (old.params, new.params), (old.states, new.states))
        )
        and old.dims == new.dims
    )  # fmt: skip
    return old if unchanged else new
