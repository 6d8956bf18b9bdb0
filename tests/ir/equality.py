"""Structural equality of modules: what ``print`` then ``parse`` must keep, types of attributes included."""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass

from compilerllm.ir.graph import Graph, Module, Node, Value


def facts(module: Module) -> list[object]:
    """Everything a module says, as comparable data."""
    return [exact(dict(module.attrs)), *(list(graph_facts(g)) for g in module.functions.values())]


def graph_facts(graph: Graph) -> Iterator[object]:
    yield graph.name
    yield graph.dims
    yield [named(v) for v in graph.inputs]
    yield [(named(p.value), exact(p.recipe)) for p in graph.params]
    yield [named(v) for v in graph.states]
    yield from (node_facts(n) for n in graph.nodes)
    yield [v.name for v in graph.outputs]


def node_facts(node: Node) -> object:
    inputs = [None if v is None else v.name for v in node.inputs]
    return node.op, inputs, exact(dict(node.attrs)), [named(v) for v in node.outputs], node.origin


def named(value: Value) -> tuple[str, object]:
    return value.name, value.type


def exact(value: object) -> object:
    """Tells 1 from 1.0 and true, and finds NaN equal to itself."""
    if isinstance(value, dict):
        return {k: exact(v) for k, v in value.items()}
    if isinstance(value, tuple):
        return tuple(exact(v) for v in value)
    if isinstance(value, float):
        return "float", repr(value)
    if is_dataclass(value) and not isinstance(value, type):
        return type(value).__name__, tuple(exact(getattr(value, f.name)) for f in fields(value))
    return type(value).__name__, value
