"""Which of a rewrite's nodes is to blame for a difference."""

from dataclasses import replace

from torch import Tensor

from compilerllm.ir.graph import Module, Node, Value
from compilerllm.validation.inputs import Trial
from compilerllm.validation.running import REFUSALS, Runner, distance, new_nodes
from compilerllm.validation.weights import Weights


def blame(before: Module, after: Module, weights: Weights, trial: Trial) -> tuple[tuple[str, ...], str]:
    """The first new node whose result is not that of the value it stands for, and their origin; else all new nodes.

    Passes name a node's result after what it replaces, so equal names (less a number at the end) with equal types are
    taken for the same value. New nodes that stand for none, and feed the one that differs, are named with it.
    """
    old = before.functions
    fresh = [
        n
        for name, g in after.functions.items()
        for n in (new_nodes(old[name], g) if name in old else g.nodes)
    ]
    suspects = [n for n in after.main.nodes if n in set(fresh)] or fresh
    try:
        want, got = _values(before, weights, trial), _values(after, weights, trial)
    except REFUSALS:
        return _told(suspects)  # one side does not run
    unknown: dict[Value, Node] = {}
    for node in suspects:
        pairs = [
            (want.get(v.name, want.get(v.name.rpartition("_")[0])), got.get(v.name)) for v in node.outputs
        ]
        if any(a is not None and b is not None and distance(a, b) for a, b in pairs):
            return _told([node, *_feeding(node, unknown)])
        unknown |= {v: node for v, (a, _) in zip(node.outputs, pairs, strict=True) if a is None}
    return _told(suspects)


def _feeding(node: Node, unknown: dict[Value, Node]) -> list[Node]:
    """The nodes of ``unknown`` that a node depends on, the nearest first."""
    found: dict[Node, None] = {}
    queue = [node]
    while queue:
        for value in queue.pop(0).operands:
            if value in unknown and unknown[value] not in found:
                found[unknown[value]] = None
                queue.append(unknown[value])
    return list(found)


def _told(nodes: list[Node]) -> tuple[tuple[str, ...], str]:
    return tuple(map(repr, nodes)), next((n.origin.path for n in nodes if n.origin.path), "")


def _values(module: Module, weights: Weights, trial: Trial) -> dict[str, Tensor]:
    """Every tensor that main computes, by name."""
    main = module.main
    values = tuple(v for n in main.nodes for v in n.outputs)
    outcome = Runner(module.with_functions(replace(main, outputs=values)), weights).run(trial)
    return dict(zip((v.name for v in values), outcome.outputs, strict=True))
