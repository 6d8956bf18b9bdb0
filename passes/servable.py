"""Refuse what would be wrong when tokens of several sequences share a step.

After paging, attention is the only way a token may learn of another. A reduction, matrix product, slice or join along
T, or a value made out of the number of tokens (positions by ``arange``), would be silently wrong in a packed step.
"""

from compilerllm.ir.graph import Graph, Node
from compilerllm.passes.errors import NotServable
from compilerllm.passes.opinfo import ALONG_AXIS, axes_with, axis_of, tensors

TOKENS = "T"
_KNOWS_STEP = frozenset(("step_field", "call", "full"))
_ATTENTION_HINT = "Each attention layer must be one attention op: a model class with attention code of its own needs an entry in models/."


def check_servable(graph: Graph) -> None:
    """Raise ``NotServable`` at the first node that mixes tokens, or that counts them."""
    for node in graph.nodes:
        found = _mixes(node)
        if found is not None:
            raise NotServable(graph.name, f"{node!r}{_where(node)} {found[0]}", found[1])


def _where(node: Node) -> str:
    return f" (from {node.origin.path})" if node.origin.path else ""


def _mixes(node: Node) -> tuple[str, str] | None:
    """What is wrong with a node, and what to do; None if it treats each token by itself."""
    inputs = tensors(node.inputs)
    carried = any(axes_with(v.tensor, TOKENS) for v in inputs)
    for value in node.outputs:
        axes = axes_with(value.tensor, TOKENS)
        if len(axes) > 1:
            return f"relates tokens with tokens: {value.type}", _ATTENTION_HINT
        if axes and not carried and node.op not in _KNOWS_STEP:
            return (
                "is made out of the number of tokens, which is not a position in a packed step",
                "Let the model take its positions as an input.",
            )
    if node.op in ALONG_AXIS and axis_of(node) in axes_with(inputs[0].tensor, TOKENS):
        return "reduces over the tokens of all sequences", _ATTENTION_HINT
    if node.op == "matmul" and inputs[0].tensor.rank - 1 in axes_with(inputs[0].tensor, TOKENS):
        return "sums over the tokens of all sequences", _ATTENTION_HINT
    if node.op in ("slice", "concat") and axis_of(node) in axes_with(inputs[0].tensor, TOKENS):
        return (
            "cuts or joins the tokens of all sequences",
            "Only sequence ops with a state may look at neighbours.",
        )
    if node.op == "attention":
        return "is an attention that was not paged", "Run page_attention over the whole module."
    return None
