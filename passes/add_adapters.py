"""Low-rank adapters in slots: every chosen linear gets an update that a token's ``adapter_id`` picks.

Before::

    %y = linear(%x, %q_proj.weight) : bf16[T, 64]

After::

    param %q_proj.adapter_a : bf16[8, 16, 64]
    param %q_proj.adapter_b : bf16[8, 64, 16]
    %id = step_field(%step, field="adapter_id") : i32[T]
    %base = linear(%x, %q_proj.weight) : bf16[T, 64]
    %y = adapter_add(%x, %base, %q_proj.adapter_a, %q_proj.adapter_b, %id) : bf16[T, 64]

Slot 0 is the base model. The parameters are read under their own names; whoever loads an adapter fills its slot.
"""

from dataclasses import dataclass

from compilerllm.ir.builder import Rewriter
from compilerllm.ir.graph import Graph, Module, Node, Value
from compilerllm.ir.types import StepType, TensorType
from compilerllm.passes.errors import CannotAdapt
from compilerllm.passes.opinfo import axes_with, same_graph
from compilerllm.passes.report import PassReport

BY = "add_adapters"


@dataclass(frozen=True)
class AdapterOptions:
    """targets: ends of module paths, such as ``q_proj``. slots: with slot 0, the base model. rank: the largest rank."""

    targets: tuple[str, ...]
    slots: int
    rank: int


def add_adapters(module: Module, options: AdapterOptions, report: PassReport | None = None) -> Module:
    """Rewrite every function with the step. Raises ``CannotAdapt`` for a target that no linear has."""
    report = report or PassReport(BY)
    if options.slots < 2 or options.rank < 1:
        raise CannotAdapt(
            f"{options.slots} slots of rank {options.rank}: at least 2 slots (0 is the base) and rank 1 are needed"
        )
    found: set[str] = set()
    changed = [_adapt(graph, options, found, report) for graph in module.functions.values()]
    if missing := [t for t in options.targets if t not in found]:
        raise CannotAdapt(
            f"no linear with the step is called {missing[0]!r}; there are {', '.join(sorted(_names(module))) or 'none'}"
        )
    return module.with_functions(*changed)


def _names(module: Module) -> set[str]:
    return {
        _path(n).rpartition(".")[2] for g in module.functions.values() for n in g.nodes if n.op == "linear"
    }


def _path(linear: Node) -> str:
    return linear.operands[1].name.removesuffix(".weight")


def _adapt(graph: Graph, options: AdapterOptions, found: set[str], report: PassReport) -> Graph:
    step = next((v for v in graph.inputs if isinstance(v.type, StepType)), None)
    if step is None:
        return graph
    r = Rewriter(graph, by=BY)
    ids: list[Value] = []

    def visit(_: Rewriter, node: Node) -> tuple[Value, ...] | None:
        if node.op != "linear":
            return None
        path = _path(node)
        target = next((t for t in options.targets if path == t or path.endswith(f".{t}")), None)
        if target is None:
            return None
        x, weight = r.get(node.operands[0]), node.operands[1]
        if axes_with(x.tensor, "T") != (0,) or x.tensor.rank != 2:
            report.miss(node, f"its input is {x.type}, not [T, K]")
            return None
        found.add(target)
        report.match()
        if not ids:
            ids.append(r.emit("step_field", step, field="adapter_id", name="adapter_id"))
        (base,) = r.copy(node)
        rows, width = weight.shape
        a = r.param(f"{path}.adapter_a", TensorType(x.dtype, (options.slots, options.rank, width)))
        b = r.param(f"{path}.adapter_b", TensorType(x.dtype, (options.slots, rows, options.rank)))
        return (r.emit("adapter_add", x, base, a, b, ids[0], name=f"{node.output.name}.adapted"),)

    return same_graph(graph, r.run(visit))
