"""Opaque operators in a generated program: a call of the host from rank 0, while the team waits."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from compilerllm.ir.graph import Attr, Graph, Module, Node, Value
from compilerllm.ir.recipe import Relayout
from compilerllm.ir.types import StateType, StepType
from compilerllm.kernels.errors import UnsupportedByTarget

if TYPE_CHECKING:
    from compilerllm.kernels.cpu.emitter import FunctionEmitter

Tensors = tuple[tuple[str, tuple[str, ...]], ...]  # (dtype, extents as dimension text)


@dataclass(frozen=True)
class HostCall:
    """Opaque operators that the host runs in mid-step, one after another, on dense operands.

    A step is (target, argument templates, named templates) as JSON: lists, numbers, text. In a template ``"%1"`` is an
    operand of the call, ``"@0.1"`` the second result of step 0, ``"dim:T + 1"`` a size; the rest is as in ``aten``.
    """

    steps: tuple[tuple[str, object, object], ...]
    inputs: Tensors
    outputs: Tensors
    results: tuple[str, ...]  # which of the steps' results are the outputs
    where: str  # function and module path, for errors


def is_opaque(body: Graph) -> bool:
    """Whether a group's function is made of opaque operators, and views between them."""
    return any(node.op == "aten" for node in body.nodes)


def emit_opaque(e: "FunctionEmitter", node: Node) -> None:
    """An ``aten`` node, or a group of them, as one host call."""
    call = host_call(e.module, node, f"@{e.graph.name} {node.origin.path}".strip())
    steps = call.steps
    packed = {
        p.value for p in e.graph.params if p.value.tensor.is_quantized or isinstance(p.recipe, Relayout)
    }
    for value in node.operands:
        if isinstance(value.type, StateType | StepType):
            raise UnsupportedByTarget(f"@{e.graph.name}: opaque {steps[0][0]} cannot take a {value.type}")
        if value in packed:
            raise UnsupportedByTarget(
                f"@{e.graph.name}: opaque {steps[0][0]} reads %{value.name}, which is packed for a kernel; "
                "compile with --optimization-level 0, or a quantised checkpoint with --weights dense"
            )
    pointers = [e.dense(v).pointer for v in node.operands] + [e.ref(v).pointer for v in node.outputs]
    e.program.host_calls.append(call)
    number = len(e.program.host_calls) - 1
    e.line(
        f"if (team.rank == 0) {{ const void* a[] = {{{', '.join(pointers) or 'nullptr'}}}; c.host({number}, a); }}"
    )
    e.sync()
    e.note(node, "host")


def host_call(module: Module, node: Node, where: str) -> HostCall:
    """An ``aten`` node, or a group of opaque operators, for the host."""
    if node.op == "aten":
        steps, names = _steps((node,), {v: f"%{i}" for i, v in enumerate(node.operands)})
        results = tuple(names[v] for v in node.outputs)
    else:
        body = module.functions[node.fn]
        steps, names = _steps(body.nodes, {v: f"%{i}" for i, v in enumerate(body.inputs)})
        results = tuple(names[v] for v in body.outputs)
    return HostCall(steps, host_types(node.operands), host_types(node.outputs), results, where)


def host_types(values: Sequence[Value]) -> Tensors:
    """Dtypes and extents of operands or results, as text."""
    return tuple((v.dtype, tuple(str(d) for d in v.shape)) for v in values)


def _steps(
    nodes: Sequence[Node], names: dict[Value, str]
) -> tuple[tuple[tuple[str, object, object], ...], Mapping[Value, str]]:
    """The nodes as steps, and what every value is called in templates; ``names`` has the operands."""
    steps: list[tuple[str, object, object]] = []
    for node in nodes:
        target, args, kwargs = _operator(node)
        operands = [names[v] for v in node.operands]
        names.update({v: f"@{len(steps)}.{k}" for k, v in enumerate(node.outputs)})
        steps.append((target, _template(args, operands), _template(kwargs, operands)))
    return tuple(steps), names


def _operator(node: Node) -> tuple[str, Attr, Attr]:
    """A node of a group's function as a torch operator: target, argument templates, named ones."""
    shape: Attr = node.attrs.get("shape", ())
    match node.op:
        case "aten":
            return node.text("target"), node.attr("args"), node.attr("kwargs", ())
        case "reshape":
            return "aten.reshape.default", ("%0", shape), ()
        case "expand":
            return "aten.expand.default", ("%0", shape), ()
        case "permute":
            return "aten.permute.default", ("%0", node.attr("order")), ()
        case "slice":
            bounds = node.attr("start"), node.attr("stop"), node.integer("step", 1)
            return "aten.slice.Tensor", ("%0", node.integer("axis"), *bounds), ()
    raise UnsupportedByTarget(f"{node!r} cannot stand among opaque operators")


def _template(item: Attr, operands: Sequence[str]) -> object:
    """An argument template of a node as JSON, its operands by their names in the call."""
    if isinstance(item, tuple):
        return [_template(i, operands) for i in item]
    if isinstance(item, str) and item.startswith("%"):
        return operands[int(item[1:])]
    if isinstance(item, bool | int | float | str):
        return item
    return f"dim:{item}"
