"""Checks that a module is well formed: definitions before uses, types as the rules say, calls that fit."""

from compilerllm.ir.dims import free_dims
from compilerllm.ir.errors import InvalidGraph, IRError
from compilerllm.ir.graph import Graph, Module, Node, Value
from compilerllm.ir.op import lookup
from compilerllm.ir.recipe import Recipe, Relayout, sources
from compilerllm.ir.types import StateType, StepType, TensorType


def verify(module: Module) -> None:
    """Raise ``InvalidGraph`` naming function and node at the first rule that is broken."""
    for name, graph in module.functions.items():
        if name != graph.name:
            raise InvalidGraph(f"function @{graph.name} is registered as {name!r}")
        verify_graph(graph, module)
    _check_no_recursion(module)


def verify_graph(graph: Graph, module: Module | None = None) -> None:
    """Check one function; calls are checked against ``module`` where it is given."""
    where = f"@{graph.name}"
    declared = {d.name for d in graph.dims}
    for decl in graph.dims:
        if not 0 <= decl.low <= decl.high:
            raise InvalidGraph(f"{where}: dim {decl.name} in [{decl.low}, {decl.high}] is not a range")
    names: set[str] = set()
    defined: set[Value] = set()

    def define(value: Value) -> None:
        if value.name in names:
            raise InvalidGraph(f"{where}: %{value.name} is defined twice")
        if isinstance(value.type, TensorType) and (unknown := _free(value.type) - declared):
            raise InvalidGraph(
                f"{where}: %{value.name}: {value.type} uses undeclared dimension {sorted(unknown)[0]}"
            )
        names.add(value.name)
        defined.add(value)

    for value in graph.inputs:
        if isinstance(value.type, StateType):
            raise InvalidGraph(f"{where}: input %{value.name} is a state; declare it with 'state'")
        define(value)
    for param in graph.params:
        if not isinstance(param.value.type, TensorType):
            raise InvalidGraph(f"{where}: parameter %{param.name} must be a tensor")
        if _free(param.value.type):
            raise InvalidGraph(
                f"{where}: parameter %{param.name} must have a fixed shape, not {param.value.type}"
            )
        if any(_has_relayout(s) for s in sources(param.recipe)):
            raise InvalidGraph(
                f"{where}: parameter %{param.name}: relayout must be the outermost step of a recipe"
            )
        define(param.value)
    for value in graph.states:
        if not isinstance(value.type, StateType):
            raise InvalidGraph(f"{where}: state %{value.name} is a {value.type}")
        define(value)
    for node in graph.nodes:
        for operand in node.operands:
            if operand not in defined:
                raise InvalidGraph(f"{where}: {node!r} uses %{operand.name} before it is defined")
        _check_node(node, where, module)
        for value in node.outputs:
            define(value)
    for value in graph.outputs:
        if value not in defined:
            raise InvalidGraph(f"{where}: returns %{value.name}, which is not defined")


def _check_node(node: Node, where: str, module: Module | None) -> None:
    try:
        types = lookup(node.op).infer(node.inputs, node.attrs)
    except IRError as error:
        raise InvalidGraph(f"{where}: {node!r}: {error}") from error
    given = tuple(v.type for v in node.outputs)
    if types is not None and types != given:
        raise InvalidGraph(f"{where}: {node!r} is typed {_list(given)}, but its rule gives {_list(types)}")
    if node.op in ("call", "group") and module is not None:
        _check_call(node, where, module)


def _check_call(node: Node, where: str, module: Module) -> None:
    callee = module.functions.get(node.fn)
    if callee is None:
        raise InvalidGraph(f"{where}: {node!r} calls @{node.fn}, which the module does not have")
    if len(node.inputs) != len(callee.inputs) or len(node.outputs) != len(callee.outputs):
        raise InvalidGraph(
            f"{where}: {node!r} passes {len(node.inputs)} and takes {len(node.outputs)} values, "
            f"but @{callee.name} takes {len(callee.inputs)} and gives {len(callee.outputs)}"
        )
    if node.op == "group" and (callee.params or callee.states):
        raise InvalidGraph(f"{where}: group @{callee.name} must take everything as inputs")
    pairs = [*zip(node.inputs, callee.inputs, strict=True), *zip(node.outputs, callee.outputs, strict=True)]
    for given, wanted in pairs:
        if given is None or given.type != wanted.type:
            raise InvalidGraph(f"{where}: {node!r}: {given!r} does not fit {wanted!r} of @{callee.name}")


def _check_no_recursion(module: Module) -> None:
    active: list[str] = []
    done: set[str] = set()

    def visit(name: str) -> None:
        if name in active:
            raise InvalidGraph(f"@{name} calls itself through {' -> '.join([*active, name])}")
        if name in done:
            return
        active.append(name)
        for node in module.functions[name].nodes:
            if node.op in ("call", "group"):
                visit(node.fn)
        active.pop()
        done.add(name)

    for name in module.functions:
        visit(name)


def _has_relayout(recipe: Recipe) -> bool:
    return isinstance(recipe, Relayout) or any(_has_relayout(s) for s in sources(recipe))


def _free(type: TensorType) -> frozenset[str]:
    return frozenset().union(*(free_dims(d) for d in type.shape)) if type.shape else frozenset()


def _list(types: tuple[TensorType | StateType | StepType, ...]) -> str:
    return ", ".join(map(str, types)) or "nothing"
