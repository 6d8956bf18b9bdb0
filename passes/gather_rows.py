"""Compute logits only for the rows that are sampled.

Before::

    %n = rms_norm(%h, %norm.weight, eps=1e-06) : bf16[T, 64]
    %logits = linear(%n, %lm_head.weight) : bf16[T, 256]
    return %logits

After::

    %rows = step_field(%step, field="sample_rows") : i32[R]
    %g = gather_rows(%h, %rows) : bf16[R, 64]
    %n = rms_norm(%g, %norm.weight, eps=1e-06) : bf16[R, 64]
    %logits = linear(%n, %lm_head.weight) : bf16[R, 256]

The gather moves up from the results as far as every op on the way treats each row by itself and has no other user.
"""

from compilerllm.ir.builder import Rewriter
from compilerllm.ir.dims import Dim, dim, substitute, symbol
from compilerllm.ir.graph import Attr, Graph, Node, Value
from compilerllm.ir.types import StepType
from compilerllm.passes.errors import NotServable
from compilerllm.passes.opinfo import ALONG_AXIS, LAST_AXIS, POINTWISE, axes_with, axis_of, tensors
from compilerllm.passes.report import PassReport

_BY_ROW = LAST_AXIS | {"embedding", "experts", "gather_rows", "add_rms_norm", "add_layer_norm", "linear_add"}


def gather_rows(graph: Graph, report: PassReport) -> Graph:
    """Rewrite ``main`` (other functions are returned as they are)."""
    step = next((v for v in graph.inputs if isinstance(v.type, StepType)), None)
    if graph.name != "main" or step is None:
        return graph
    if not any(axes_with(v.tensor, "T") for v in graph.outputs):
        return graph
    for value in graph.outputs:
        if axes_with(value.tensor, "T") != (0,):
            raise NotServable(
                "main", f"its result %{value.name} is {value.type}, not [T, ...]", "Return logits [T, V]."
            )
    return _gathered(_Gatherer(graph, step, _tail(graph), report))


def _gathered(r: "_Gatherer") -> Graph:
    return r.run(lambda _, node: r.visit(node))


def _tail(graph: Graph) -> frozenset[Node]:
    """The nodes that need to see sampled rows only."""
    uses = graph.uses()
    outputs = frozenset(graph.outputs)
    found: set[Node] = set()
    for node in reversed(graph.nodes):
        only = all(all(user in found for user in uses[v]) and (v in outputs or uses[v]) for v in node.outputs)
        if only and node.outputs and rowwise(node) and axes_with(node.outputs[0].tensor, "T") == (0,):
            found.add(node)
    return frozenset(found)


def rowwise(node: Node) -> bool:
    """Whether row t of the results depends on row t of the operands that have a T axis, which must be their first."""
    operands = tensors(node.inputs)
    rows = [v for v in operands if axes_with(v.tensor, "T")]
    if not rows or any(axes_with(v.tensor, "T") != (0,) for v in (*rows, *node.outputs)):
        return False
    if node.op in POINTWISE:
        return all(v.tensor.rank == node.output.tensor.rank for v in rows)
    if node.op in _BY_ROW:
        return node.op != "gather_rows" or node.operands[1] in rows
    if node.op in ALONG_AXIS or node.op in ("slice", "concat"):
        return axis_of(node) != 0
    match node.op:
        case "reshape":
            return all(v.shape[0] == symbol("T") for v in (rows[0], node.output))
        case "permute":
            return node.integers("order")[0] == 0
        case "expand":
            return rows[0].tensor.rank == node.output.tensor.rank
    return False


class _Gatherer(Rewriter):
    def __init__(
        self, graph: Graph, step: Value, tail: frozenset[Node], report: PassReport, by: str = "gather_rows"
    ) -> None:
        super().__init__(graph, by=by)
        self.step, self.tail, self.report = step, tail, report
        self.rows: Value | None = None
        self.gathered: dict[Value, Value] = {}
        self.in_tail = {v for node in tail for v in node.outputs}

    def sampled(self, old: Value) -> Value:
        """The sampled rows of what stands for ``old``."""
        if old in self.in_tail or not axes_with(old.tensor, "T"):
            return self.get(old)
        if old not in self.gathered:
            if self.rows is None:
                self.rows = self.emit("step_field", self.step, field="sample_rows", name="sample_rows")
            self.gathered[old] = self.emit("gather_rows", self.get(old), self.rows, name=f"{old.name}.rows")
            self.report.match()
        return self.gathered[old]

    def finish(self, *outputs: Value) -> Graph:
        return super().finish(*(self.sampled(v) for v in self.graph.outputs))

    def visit(self, node: Node) -> tuple[Value, ...] | None:
        if node not in self.tail:
            return None
        operands = [None if v is None else self.sampled(v) for v in node.inputs]
        attrs: dict[str, Attr] = dict(node.attrs)
        if isinstance(shape := attrs.get("shape"), tuple):
            attrs["shape"] = tuple(_rows_for_tokens(dim(d)) for d in shape)
        return self.emit_node(node.op, operands, attrs, name=node.outputs[0].name)


def _rows_for_tokens(extent: Dim) -> Dim:
    return substitute(extent, {"T": symbol("R")})
