"""Tensor parallelism: one rank's module, with slices of the weights and an ``all_reduce`` where partial sums meet.

Before::

    param %up.weight : bf16[256, 64]
    param %down.weight : bf16[64, 256]
    %h = linear(%x, %up.weight) : bf16[T, 256]
    %a = silu(%h) : bf16[T, 256]
    %y = linear(%a, %down.weight) : bf16[T, 64]

After, on rank 1 of 2::

    param %up.weight : bf16[128, 64] = slice(read("up.weight"), axis=0, start=128, stop=256)
    param %down.weight : bf16[64, 128] = slice(read("down.weight"), axis=1, start=128, stop=256)
    %h = linear(%x, %up.weight) : bf16[T, 128]
    %a = silu(%h) : bf16[T, 128]
    %p = linear(%a, %down.weight) : bf16[T, 64]
    %y = all_reduce(%p, axis="tp") : bf16[T, 64]

``sharding.py`` decides which values are split; this file carries it out. Embedding, router and lm_head stay whole.
"""

from compilerllm.ir.builder import Rewriter
from compilerllm.ir.dims import Dim, dim
from compilerllm.ir.graph import Attr, Graph, Module, Node, Param, Value
from compilerllm.ir.recipe import Concat, Recipe, Slice
from compilerllm.ir.types import QUANTIZED_BLOCKS, StateType, TensorType
from compilerllm.passes.errors import CannotShard
from compilerllm.passes.report import PassReport
from compilerllm.passes.sharding import Mesh, Sharding, decide

BY = "shard"
__all__ = ["Mesh", "shard"]


def shard(module: Module, mesh: Mesh, report: PassReport | None = None) -> Module:
    """The module of rank ``mesh.rank`` of ``mesh.world``. It must be served and not fused yet.

    Raises ``CannotShard`` where nothing at all can be split.
    """
    if not 0 <= mesh.rank < mesh.world:
        raise CannotShard(f"rank {mesh.rank} is not one of {mesh.world} ranks")
    report = report or PassReport(BY)
    if mesh.world == 1:
        return module
    changed = []
    for graph in module.functions.values():
        plan = decide(graph, mesh, report)
        if plan.columns or plan.experts:
            changed.append(_Sharder(graph, plan, mesh).build())
            report.match(len(plan.columns) + len(plan.rows) + len(plan.experts))
    if not changed:
        raise CannotShard(
            f"no linear of this model can be split over {mesh.world} ranks; "
            "the numbers of heads and the widths of the MLPs must be multiples of it"
        )
    return module.with_functions(*changed)


class _Sharder(Rewriter):
    def __init__(self, graph: Graph, plan: Sharding, mesh: Mesh) -> None:
        super().__init__(graph, by=BY)
        self.plan, self.mesh = plan, mesh
        self.params = {p.value: p for p in graph.params}
        self.new_params: dict[Value, Value] = {}

    def build(self) -> Graph:
        self._params = {}
        self._states = {}
        for old in self.graph.states:
            heads = self.plan.states.get(old)
            new = old if heads is None else Value(old.name, _with_heads(old.state, heads // self.mesh.world))
            self._states[new.name] = new
            self.set(old, new)
        self._replace_params()
        return self.run(lambda _, node: self._visit(node))

    def _replace_params(self) -> None:
        cut: dict[Value, Param] = {}
        for node, pieces in self.plan.columns.items():
            for value in node.operands[1:]:
                cut[value] = self._pieces(self.params[value], 0, pieces)
        for node in self.plan.rows:
            weight = node.operands[1]
            cut[weight] = self._pieces(self.params[weight], 1, ((0, _extent(weight, 1)),))
        for node in self.plan.experts:
            self._cut_experts(node, cut)
        for value, axis in self.plan.by_head.items():
            cut[value] = self._pieces(self.params[value], axis, ((0, _extent(value, axis)),))
        for param in self.graph.params:
            new = cut.get(param.value, param)
            self._params[new.name] = new
            self.set(param.value, new.value)

    def _cut_experts(self, node: Node, cut: dict[Value, Param]) -> None:
        gate_up, down, up_bias = node.operands[3], node.operands[4], node.input(5)
        rows = _extent(gate_up, 1)
        halves = ((0, rows),) if node.attrs.get("interleaved") else ((0, rows // 2), (rows // 2, rows))
        cut[gate_up] = self._pieces(self.params[gate_up], 1, halves)
        cut[down] = self._pieces(self.params[down], 2, ((0, _extent(down, 2)),))
        if up_bias is not None:
            cut[up_bias] = self._pieces(self.params[up_bias], 1, halves)

    def _pieces(self, param: Param, axis: int, pieces: tuple[tuple[int, int], ...]) -> Param:
        """This rank's part of each piece [start, stop) of one axis."""
        parts: list[Recipe] = []
        total = 0
        for start, stop in pieces:
            size = (stop - start) // self.mesh.world
            first = start + self.mesh.rank * size
            parts.append(Slice(param.recipe, axis, first, first + size))
            total += size
        type = param.value.tensor
        if type.is_quantized and axis == type.rank - 1 and total % QUANTIZED_BLOCKS[type.dtype][1]:
            raise CannotShard(
                f"%{param.name} : {type} does not split into whole blocks over {self.mesh.world} ranks"
            )
        shape: tuple[Dim, ...] = (*type.shape[:axis], total, *type.shape[axis + 1 :])
        recipe = parts[0] if len(parts) == 1 else Concat(tuple(parts), axis)
        return Param(Value(param.name, TensorType(type.dtype, shape)), recipe)

    def _visit(self, node: Node) -> tuple[Value, ...] | None:
        if node in self.plan.rows or node in self.plan.experts:
            operands = [None if v is None else self.get(v) for v in node.inputs]
            if self.mesh.rank and len(operands) > (bias := 2 if node.op == "linear" else 6):
                operands[bias] = None  # the first rank alone adds the bias
            (partial,) = self.emit_node(node.op, operands, node.attrs, name=f"{node.output.name}.partial")
            return (self.emit("all_reduce", partial, axis=self.mesh.axis, name=node.output.name),)
        attrs = self._attrs(node)
        if attrs is None:
            return None
        operands = [None if v is None else self.get(v) for v in node.inputs]
        return self.emit_node(node.op, operands, attrs, name=node.outputs[0].name)

    def _attrs(self, node: Node) -> dict[str, Attr] | None:
        """Attributes that hold extents of split axes; None where there are none."""
        if node.op in ("reshape", "expand", "full"):
            axis = self.plan.axis.get(node.output)
            if axis is None:
                return None
            shape = list(node.dimensions("shape"))
            shape[axis] = dim(shape[axis] // self.mesh.world)
            return {**node.attrs, "shape": tuple(shape)}
        if node.op == "slice" and node in self.plan.cuts:
            start, stop = self.plan.cuts[node]
            return {**node.attrs, "start": start, "stop": stop}
        return None


def _extent(value: Value, axis: int) -> int:
    extent = value.shape[axis]
    assert isinstance(extent, int)
    return extent


def _with_heads(state: StateType, heads: int) -> StateType:
    return StateType(
        state.kind, state.dtype, tuple((k, heads if k == "heads" else v) for k, v in state.fields)
    )
