"""One node at a time: what its kernel gave, beside what the reference gives on the very inputs that the kernel had.

So errors do not add up: a node is right or wrong by itself. Which node comes first is the order of execution.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from compilerllm.bisect.budget import Measure, measure_value
from compilerllm.bisect.errors import CannotCompare
from compilerllm.bisect.evaluate import Runtime, Site, evaluate_node, instance, run_node
from compilerllm.bisect.parameters import Parameters
from compilerllm.bisect.workload import Workload
from compilerllm.ir.graph import Graph, Module, Value
from compilerllm.ir.op import lookup
from compilerllm.ir.text import print_node
from compilerllm.ir.types import StepType
from compilerllm.kernels.reference.states import State, Step
from compilerllm.kernels.spec import KernelSpec


@dataclass(frozen=True, eq=False)
class Seen:
    """A node that ran: its operands and results in the reference's own layouts; states as they were before it.

    ``written``: the states it writes, as they were afterwards, in the order of its operands.
    """

    site: Site
    specs: tuple[KernelSpec, ...]
    operands: Sequence[Runtime]
    results: Sequence[Runtime]
    written: Sequence[State]
    number: int  # of the step
    step: Step
    dims: Mapping[str, int]


@dataclass(frozen=True)
class Checked:
    """A node over all steps: ``worst`` is the measure of its worst result in step ``number``, the first that is outside the
    budget, or else the one nearest to it."""

    order: int
    path: str
    function: str
    node: str
    op: str
    shapes: tuple[str, ...]  # of operands and results, in that step
    specs: tuple[KernelSpec, ...]
    result: str  # the result that was worst
    worst: Measure
    number: int

    @property
    def templates(self) -> str:
        """What runs it: template names, with their arguments."""
        texts = []
        for spec in self.specs:
            config = ", ".join(f"{k}={v}" for k, v in spec.config)
            texts.append(f"{spec.template}({config})" if config else spec.template)
        return " + ".join(dict.fromkeys(texts)) or "generated code"


@dataclass(frozen=True)
class Layer:
    """What a call of a layer function gave, by step: results of the kernels, each flattened together."""

    prefix: str
    results: tuple[tuple[Tensor, ...], ...]


class NodeRunner(Protocol):
    """The kernels of a target, node by node."""

    module: Module

    def run(self, work: Workload) -> Iterator[Seen]:
        """Every node with code, of every step; afterwards ``logits`` has each step's."""
        ...

    @property
    def logits(self) -> list[Tensor]: ...

    @property
    def total(self) -> int:
        """How many ``Seen`` a run of the workload gives, for a progress bar; 0 where it is not known."""
        ...


def check(module: Module, seen: Seen) -> tuple[str, Measure]:
    """The worst result of a node that ran, by name, and its measure."""
    node = seen.site.node
    measures: list[tuple[str, Measure]] = []
    mine, exact = _copied(seen.operands), _copied(seen.operands)
    own = evaluate_node(module, node, mine, seen.step, seen.dims, False)
    wide_states = [State(o.type, o.data.float(), o.group) if isinstance(o, State) else o for o in exact]
    truth = evaluate_node(module, node, wide_states, seen.step, seen.dims, True)
    for value, a, b, c in zip(node.outputs, seen.results, own, truth, strict=True):
        if a is None:
            continue
        if not b.is_floating_point() and (scores := _scores(seen)) is not None:
            a, b, c = (_chosen(scores, ids) for ids in (a, b, b))
        measures.append((value.name, measure_value(a, b, c, value.dtype)))
    states = [(m, w) for m, w in zip(mine, wide_states, strict=True) if isinstance(m, State)]
    for after, (b_state, c_state) in zip(seen.written, states, strict=False):
        a, b, c = (_rows(s, seen.step) for s in (after, b_state, c_state))
        measures.append(("the cache", measure_value(a, b, c, after.type.dtype)))
    return max(measures, key=lambda m: m[1].ratio) if measures else ("", Measure(0.0, 0.0, 0.0))


def _scores(seen: Seen) -> Tensor | None:
    """What a node chose the largest of, f32: of two that are equal it may take either."""
    node, operands = seen.site.node, seen.operands
    if node.op in ("topk", "route"):
        return operands[0].float()  # type: ignore[no-any-return]
    if node.op == "norm_route":
        bias = operands[4] if len(operands) > 4 else None
        normed, weight = seen.results[0].float(), operands[3].float()
        return torch.nn.functional.linear(normed, weight, None if bias is None else bias.float())
    return None


def _chosen(scores: Tensor, ids: Tensor) -> Tensor:
    """The scores of what was chosen; infinite for what is not there to choose."""
    there = (ids >= 0) & (ids < scores.shape[-1])
    found = scores.gather(-1, ids.long().clamp(0, scores.shape[-1] - 1))
    return found.masked_fill(~there, float("inf")).sort(-1).values


def check_all(module: Module, seen: Iterator[Seen]) -> list[Checked]:
    """Each node once, in order of execution, with its worst step."""
    found: dict[tuple[str, int], Checked] = {}
    for item in seen:
        result, measure = check(module, item)
        site = item.site
        key = site.prefix, id(site.node)
        before = found.get(key)
        if before is not None and (not before.worst.within or before.worst.ratio >= measure.ratio):
            continue
        shapes = [_shape(o) for o in (*item.operands, *item.results)]
        found[key] = Checked(
            len(found) if before is None else before.order, site.path, site.graph.name,
            print_node(site.node).strip(), site.node.op, tuple(shapes), item.specs, result, measure, item.number,
        )  # fmt: skip
    return sorted(found.values(), key=lambda c: c.order)


def writes_state(op: str) -> bool:
    return op != "group" and lookup(op).writes_state


def reads_state(op: str) -> bool:
    return op != "group" and lookup(op).reads_state


def operand_of(
    graph: Graph, value: Value, values: Mapping[Value, Tensor], params: Parameters, prefix: str,
    dims: Mapping[str, int], step: Step, outer: frozenset[str] = frozenset(),
) -> Tensor:  # fmt: skip
    """A value as the kernel had it; where it has none of its own (parameters, what kernels keep in a form of theirs), as the
    reference makes it. ``outer``: parameters that the prefix does not go before.
    """
    if value in values:
        return values[value]
    for param in graph.params:
        if param.value is value:
            return params.get(instance(graph, param.name, "" if param.name in outer else prefix))
    maker = graph.producers().get(value)
    if maker is None:
        raise CannotCompare(f"nothing in @{graph.name} makes %{value.name}")
    given: list[Runtime] = []
    for operand in maker.inputs:
        if operand is None or isinstance(operand.type, StepType):
            given.append(None if operand is None else step)
        else:
            given.append(operand_of(graph, operand, values, params, prefix, dims, step, outer))
    made = run_node(maker, given, dims, False)[maker.outputs.index(value)]
    assert isinstance(made, Tensor)
    return made


def _copied(operands: Sequence[Runtime]) -> list[Runtime]:
    """Operands whose states may be written to."""
    return [replace(o, data=o.data.clone()) if isinstance(o, State) else o for o in operands]


def _rows(state: State, step: Step) -> Tensor:
    """Keys and values of this step's tokens [T, 2, heads, dim]."""
    size = state.block_size
    parts = []
    for s, a, b in step.sequences():
        positions = step["positions"][a:b].long()
        blocks = step.block_tables[state.group, s][positions // size].long()
        parts.append(state.data[blocks, positions % size])
    return torch.cat(parts) if parts else state.data[:0, 0]


def _shape(value: Runtime) -> str:
    if isinstance(value, State):
        return str(value.type)
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return "none" if value is None else "step"
