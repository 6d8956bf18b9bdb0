"""The reference, watched: a module node by node in torch, at any stage of the pipeline, in its dtype or in float32.

It runs the same table of operators as ``kernels.reference``; what it adds is that weights come when a layer asks, that
every node's operands and results can be looked at, and that ``wide`` keeps every float at f32.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from compilerllm.bisect.errors import CannotCompare
from compilerllm.bisect.parameters import Parameters
from compilerllm.bisect.workload import Workload
from compilerllm.ir.dims import Dim, substitute
from compilerllm.ir.graph import Graph, Module, Node, ParamInstance, Value, join_name, state_name
from compilerllm.ir.recipe import rename
from compilerllm.ir.step import StepInputs
from compilerllm.ir.types import StepType
from compilerllm.kernels.groups import paged_windows
from compilerllm.kernels.reference import registry
from compilerllm.kernels.reference.interpreter import bind_dims
from compilerllm.kernels.reference.states import State, Step, allocate_states

Runtime = Any  # Tensor | State | Step | None
_NARROW = ("bf16", "f16")


@dataclass(frozen=True, eq=False)
class Site:
    """A node where it runs: its function, and the prefixes of the call that it is in (empty in ``main``)."""

    graph: Graph
    node: Node
    prefix: str = ""
    suffix: str = ""

    @property
    def path(self) -> str:
        """The module of the model it came from, the layer included."""
        return join_name(self.prefix, self.node.origin.path) if self.node.origin.path else self.prefix


# Called after each node (groups as one node): where, what it took, what it gave.
Watch = Callable[[Site, Sequence[Runtime], Sequence[Runtime]], None]


def instance(graph: Graph, name: str, prefix: str) -> ParamInstance:
    """A function's parameter under a call's prefix."""
    param = graph.param(name)
    recipe = rename(param.recipe, partial(join_name, prefix))
    return ParamInstance(join_name(prefix, name), param.value.tensor, recipe)


class Evaluator:
    """Runs ``module`` over a workload. ``wide``: floats stay f32, weights too; the result is the exact one."""

    def __init__(
        self, module: Module, params: Parameters, *, wide: bool = False, watch: Watch | None = None
    ) -> None:
        self.module, self.params, self.wide, self.watch = module, params, wide, watch

    @property
    def serves(self) -> bool:
        """Whether main takes steps (after ``page_attention``); before, it takes a sequence's tokens."""
        return any(isinstance(v.type, StepType) for v in self.module.main.inputs)

    def run(self, work: Workload, on_step: Callable[[], None] = lambda: None) -> list[Tensor]:
        """Logits of every step [rows, V], f32."""
        if not self.serves:
            logits = []
            for sequence in work.sequences:
                logits.append(self.run_tokens(sequence))
                on_step()
            return work.by_step(logits)
        result = []
        states = self.states(work)
        for step in work.steps(len(paged_windows(self.module))):
            result.append(self.run_step(step, states))
            on_step()
        return result

    def states(self, work: Workload) -> dict[str, State]:
        """Fresh states for a workload."""
        made = allocate_states(self.module, work.num_blocks, len(work.sequences))
        if not self.wide:
            return made
        return {name: State(s.type, s.data.float(), s.group) for name, s in made.items()}

    @torch.no_grad()
    def run_tokens(self, ids: Sequence[int]) -> Tensor:
        """Logits [T, V] of one sequence, of a module that takes tokens and positions."""
        inputs: list[Tensor] = []
        for value, data in zip(self.module.main.inputs, (list(ids), list(range(len(ids)))), strict=False):
            tensor = torch.tensor(data)
            inputs.append(tensor.unsqueeze(0) if len(value.shape) == 2 else tensor)
        (logits, *_) = self._function(self.module.main, inputs, "", "", {}, None)
        result: Tensor = logits.float().reshape(-1, logits.shape[-1])
        return result

    @torch.no_grad()
    def run_step(self, step: StepInputs, states: Mapping[str, State]) -> Tensor:
        """Logits [R, V] of one step; writes the states."""
        ready = Step(step)
        given = [ready for _ in self.module.main.inputs]
        (logits, *_) = self._function(self.module.main, given, "", "", states, ready)
        result: Tensor = logits.float()
        return result

    def _function(
        self, graph: Graph, inputs: Sequence[Runtime], prefix: str, suffix: str, states: Mapping[str, State],
        step: Step | None, inside_group: bool = False,
    ) -> tuple[Runtime, ...]:  # fmt: skip
        binding = bind_dims(graph, inputs, {} if step is None else step.dims)
        table: dict[Value, Runtime] = dict(zip(graph.inputs, inputs, strict=True))
        table |= {v: states[state_name(v.name, suffix)] for v in graph.states}
        names = {p.value: p.name for p in graph.params}
        last = _last_uses(graph)
        for index, node in enumerate(graph.nodes):
            for value in node.operands:
                if value in names and value not in table:
                    table[value] = self.params.get(instance(graph, names[value], prefix), self.wide)
            operands = [None if v is None else table[v] for v in node.inputs]
            results: tuple[Runtime, ...]
            if node.op == "call":
                results = self._function(
                    self.module.functions[node.fn], operands, node.text("params", ""),
                    node.text("states", ""), states, step,
                )  # fmt: skip
            elif node.op == "group":
                results = self._function(
                    self.module.functions[node.fn], operands, prefix, suffix, states, step, True
                )
            else:
                results = run_node(node, operands, binding, self.wide)
            table.update(zip(node.outputs, results, strict=True))
            if self.watch is not None and not inside_group:
                self.watch(Site(graph, node, prefix, suffix), operands, results)
            for value in last[index]:
                table.pop(value, None)
        return tuple(table[v] for v in graph.outputs)


def run_node(
    node: Node, operands: Sequence[Runtime], binding: Mapping[str, int], wide: bool
) -> tuple[Runtime, ...]:
    """What the reference gives for one node that is no call. ``wide``: attributes that name a narrow dtype say f32."""
    attrs = {name: _attribute(value, binding, node, wide) for name, value in node.attrs.items()}
    results = registry.lookup(node.op)(*operands, **attrs)
    if not isinstance(results, tuple):
        results = () if results is None else (results,)
    return tuple(widen(r) for r in results) if wide else results


def evaluate_node(
    module: Module,
    node: Node,
    operands: Sequence[Runtime],
    step: Step | None,
    dims: Mapping[str, int],
    wide: bool,
) -> tuple[Runtime, ...]:
    """One node on its own, a group's function included. Nothing of it reads a parameter but through its operands."""
    given = [widen(o) for o in operands] if wide else list(operands)
    if node.op != "group":
        return run_node(node, given, dims, wide)
    inner = _NoParameters(module, wide)
    return inner._function(module.functions[node.fn], given, "", "", {}, step)


class _NoParameters(Evaluator):
    """For groups, whose functions take all they read as inputs."""

    def __init__(self, module: Module, wide: bool) -> None:
        self.module, self.wide, self.watch = module, wide, None


def widen(value: Runtime) -> Runtime:
    """Floats as f32, tensors and states; everything else as it is."""
    if isinstance(value, State):
        return State(value.type, value.data.float(), value.group)
    return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value


def _attribute(value: Any, binding: Mapping[str, int], node: Node, wide: bool) -> Any:
    if isinstance(value, tuple):
        return tuple(_attribute(v, binding, node, wide) for v in value)
    if isinstance(value, str) and wide and value.removeprefix("dtype:") in _NARROW:
        return value.removesuffix(value.removeprefix("dtype:")) + "f32"
    return number(value, binding, node) if hasattr(value, "free_symbols") else value


def number(size: Dim, binding: Mapping[str, int], node: Node | None = None) -> int:
    """A dimension's value. Raises ``CannotCompare`` where a name of it is not bound."""
    found = substitute(size, dict(binding))
    if not isinstance(found, int):
        raise CannotCompare(f"nothing tells the size {found}" + (f" of {node!r}" if node else ""))
    return found


def _last_uses(graph: Graph) -> list[list[Value]]:
    """Values to drop after each node; parameters too, so that one layer's weights are held at a time."""
    keep = set(graph.outputs)
    result: list[list[Value]] = []
    for node in reversed(graph.nodes):
        last = [v for v in dict.fromkeys((*node.operands, *node.outputs)) if v not in keep]
        keep.update(last)
        result.append(last)
    return result[::-1]
