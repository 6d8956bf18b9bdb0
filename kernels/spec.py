"""A kernel before it is code: one frozen description that is cache key, artifact entry and tuning key alike."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from compilerllm.ir.graph import Attr, FuncRef, Module, Node
from compilerllm.ir.op import Reduction, lookup
from compilerllm.ir.text import print_attr, print_graph

UNKNOWN = "unknown"


@dataclass(frozen=True)
class KernelSpec:
    """What one kernel computes and how.

    ``reduction_key`` says what it sums over (a value of ``ir.op.Reduction``, or "unknown" for opaque operators): with
    "none" its bits cannot depend on how the work is split, with any other they may.
    """

    op: str
    types: tuple[str, ...]  # operand types ("none" for one left out), then result types, as IR text
    attrs: tuple[tuple[str, str], ...]  # as IR text, by name; a group's function is given in full
    target: str
    template: str  # name of the template in the target's library
    config: tuple[tuple[str, str], ...] = ()  # the template's arguments, by name
    reduction_key: str = Reduction.NONE.value

    @staticmethod
    def of(
        node: Node, module: Module, target: str, template: str, config: Mapping[str, str] | None = None
    ) -> "KernelSpec":
        """The kernel ``template`` of ``target`` for a node of ``module``."""
        operands = ["none" if v is None else str(v.type) for v in node.inputs]
        attrs = ((name, _text(value, module)) for name, value in node.attrs.items())
        return KernelSpec(
            node.op, (*operands, *(str(v.type) for v in node.outputs)), tuple(sorted(attrs)), target, template,
            tuple(sorted((config or {}).items())), _reduction_key(node, module),
        )  # fmt: skip

    def canonical(self) -> str:
        """Text that is equal exactly when the specs are."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))

    def key(self, *sources: str) -> str:
        """Content hash of the spec with the sources and tool versions it is built from."""
        digest = hashlib.sha256(self.canonical().encode())
        for source in sources:
            digest.update(b"\0" + source.encode())
        return digest.hexdigest()[:32]


def _text(value: Attr, module: Module) -> str:
    return print_graph(module.functions[value.name]) if isinstance(value, FuncRef) else print_attr(value)


def _reduction_key(node: Node, module: Module) -> str:
    """What the node sums over; a group: what the last node of its function that sums at all does."""
    nodes = module.functions[node.fn].nodes if node.op == "group" else (node,)
    if any(n.op == "aten" for n in nodes):
        return UNKNOWN
    sums = [r for n in nodes if (r := lookup(n.op).reduction) is not Reduction.NONE]
    return (sums[-1] if sums else Reduction.NONE).value
