"""Passes that are wrong on purpose, each under the name of the right one."""

from collections.abc import Callable
from dataclasses import replace

from compilerllm.ir.builder import Rewriter
from compilerllm.ir.graph import Attr, Graph, Module, Node, Value
from compilerllm.ir.recipe import Concat, Recipe
from compilerllm.passes.add_adapters import AdapterOptions
from compilerllm.passes.add_adapters import add_adapters as right_add_adapters
from compilerllm.passes.drop_batch import drop_batch as right_drop_batch
from compilerllm.passes.fuse_add_norm import fuse_add_norm as right_fuse_add_norm
from compilerllm.passes.fuse_gated import fuse_gated as right_fuse_gated
from compilerllm.passes.fuse_qkv import fuse_qkv as right_fuse_qkv
from compilerllm.passes.fuse_qkv_attention import fuse_qkv_attention as right_fuse_qkv_attention
from compilerllm.passes.gather_rows import gather_rows as right_gather_rows
from compilerllm.passes.pack_projections import pack_projections as right_pack_projections
from compilerllm.passes.page_attention import page_attention as right_page_attention
from compilerllm.passes.raise_partial_rope import raise_partial_rope as right_raise_partial_rope
from compilerllm.passes.report import PassReport
from compilerllm.passes.rotate_boundary import rotate_boundary as right_rotate_boundary
from compilerllm.passes.shard import Mesh
from compilerllm.passes.shard import shard as right_shard

Edit = Callable[[Node], dict[str, Attr | None]]


def edited(graph: Graph, op: str, edit: Edit) -> Graph:
    """``graph`` with other attributes for every node of ``op``; None as a value takes one away."""

    def visit(r: Rewriter, node: Node) -> tuple[Value, ...] | None:
        if node.op != op:
            return None
        attrs = {k: v for k, v in {**node.attrs, **edit(node)}.items() if v is not None}
        inputs = [None if v is None else r.get(v) for v in node.inputs]
        return r.emit_node(
            op, inputs, attrs, types=[v.tensor for v in node.outputs], name=node.outputs[0].name
        )

    return Rewriter(graph, by="").run(visit)


def with_inputs(graph: Graph, op: str, edit: Callable[[Node], tuple[Value | None, ...]]) -> Graph:
    """``graph`` with other operands for every node of ``op``."""

    def visit(r: Rewriter, node: Node) -> tuple[Value, ...] | None:
        if node.op != op:
            return None
        inputs = [None if v is None else r.get(v) for v in edit(node)]
        return r.emit_node(
            op, inputs, node.attrs, types=[v.tensor for v in node.outputs], name=node.outputs[0].name
        )

    return Rewriter(graph, by="").run(visit)


def fuse_add_norm(graph: Graph, report: PassReport) -> Graph:
    """Forgets whether the norm rounds before it scales."""
    return edited(right_fuse_add_norm(graph, report), "add_rms_norm", lambda n: {"round_first": None})


def fuse_gated(graph: Graph, report: PassReport) -> Graph:
    """Activates with another function."""
    return edited(right_fuse_gated(graph, report), "linear_gated", lambda n: {"act": "gelu"})


def pack_projections(graph: Graph, report: PassReport) -> Graph:
    """Packs the parts in the opposite order."""
    new = right_pack_projections(graph, report)

    def turned(recipe: Recipe) -> Recipe:
        return Concat(tuple(reversed(recipe.sources)), recipe.axis) if isinstance(recipe, Concat) else recipe

    return replace(new, params=tuple(replace(p, recipe=turned(p.recipe)) for p in new.params))


def fuse_qkv(graph: Graph, report: PassReport) -> Graph:
    """Does not norm the keys."""
    new = right_fuse_qkv(graph, report)
    return with_inputs(
        new, "qkv_rope_write", lambda n: (*n.inputs[:6], None) if len(n.inputs) > 6 else n.inputs
    )


def page_attention(module: Module, report: PassReport) -> Module:
    """Lets a window's tokens see everything."""
    new = right_page_attention(module, report)
    return new.with_functions(
        *(edited(g, "paged_attention", lambda n: {"window": None}) for g in new.functions.values())
    )


def gather_rows(graph: Graph, report: PassReport) -> Graph:
    """Takes the rows that slots name."""
    return edited(
        right_gather_rows(graph, report),
        "step_field",
        lambda n: {"field": "slots", "extent": None} if n.attrs["field"] == "sample_rows" else {},
    )


def drop_batch(graph: Graph, report: PassReport) -> Graph:
    """Turns a slice to the axis before."""
    return edited(right_drop_batch(graph, report), "softmax", lambda n: {"axis": 0})


def rotate_boundary(module: Module, report: PassReport) -> Module:
    """Starts with a one where a zero must be."""
    new = right_rotate_boundary(module, report)
    return new.with_functions(edited(new.main, "full", lambda n: {"value": 1.0}))


def shard(module: Module, mesh: Mesh, report: PassReport) -> Module:
    """Adds what all ranks have twice."""
    new = right_shard(module, mesh, report)
    return new.with_functions(*map(_doubled, new.functions.values()))


def _doubled(graph: Graph) -> Graph:
    """Every sum over ranks is added to itself."""

    def visit(r: Rewriter, node: Node) -> tuple[Value, ...] | None:
        if node.op != "all_reduce":
            return None
        (total,) = r.copy(node)
        return (r.emit("add", total, total, name=f"{total.name}.twice"),)

    return Rewriter(graph, by="").run(visit)


def add_adapters(module: Module, options: AdapterOptions, report: PassReport) -> Module:
    """Picks the adapter of the token's position."""
    new = right_add_adapters(module, options, report)
    return new.with_functions(*(
        edited(g, "step_field", lambda n: {"field": "positions"} if n.attrs["field"] == "adapter_id" else {})
        for g in new.functions.values()
    ))  # fmt: skip


def raise_partial_rope(graph: Graph, report: PassReport) -> Graph:
    """Always rotates halves: right on every graph whose rope does."""
    new = right_raise_partial_rope(graph, report)
    return new if new is graph else edited(new, "rope", lambda n: {"style": "half"})


def fuse_linear_add(graph: Graph, report: PassReport) -> Graph:
    """Lets a row that belongs to nobody into the others: adds nothing, unless one of them is not finite."""

    def visit(r: Rewriter, node: Node) -> tuple[Value, ...] | None:
        if node.op != "linear":
            return None
        (y,) = r.copy(node)
        total = r.emit("sum", y, axis=0, keepdim=True)
        nothing = r.emit("mul", total, scalar=0.0)
        return (r.emit("add", y, nothing, name=node.output.name),)

    report.match()
    return Rewriter(graph, by="").run(visit)


def fuse_qkv_attention(graph: Graph, report: PassReport) -> Graph:
    """Scales a little less."""
    new = right_fuse_qkv_attention(graph, report)
    return (
        edited(new, "qkv_attention", lambda n: {"scale": n.number("scale") * 0.999})
        if new is not graph
        else graph
    )
