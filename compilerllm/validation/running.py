"""Runs one side of a comparison in the reference interpreter, and says how far two results are apart."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from compilerllm.ir.errors import IRError
from compilerllm.ir.graph import Attr, FuncRef, Graph, Module, Node, Param, Value
from compilerllm.ir.recipe import Convert
from compilerllm.ir.step import StepInputs
from compilerllm.ir.types import StateType, TensorType, Type
from compilerllm.kernels.errors import KernelError
from compilerllm.kernels.reference.collective import Collective
from compilerllm.kernels.reference.interpreter import Interpreter
from compilerllm.kernels.reference.states import State, Step
from compilerllm.validation.errors import CannotValidate
from compilerllm.validation.inputs import Trial
from compilerllm.validation.weights import Weights

NARROW = ("bf16", "f16")
# What a graph that is wrong stumbles over when it runs.
REFUSALS = (
    IRError,
    KernelError,
    CannotValidate,
    RuntimeError,
    LookupError,
    TypeError,
    ValueError,
    AssertionError,
)


@contextmanager
def one_thread() -> Iterator[None]:
    """Small tensors are faster without torch's other threads, and much so where the machine is busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Alone:
    """The other ranks' parts left out: a rewrite of one rank's graph is compared on that rank."""

    def all_reduce(self, x: Tensor, axis: str) -> Tensor:
        return x


@dataclass(frozen=True, eq=False)
class Outcome:
    """What a run gave, and its states afterwards."""

    outputs: tuple[Tensor, ...]
    states: Mapping[str, Tensor]


def run(module: Module, weights: Weights, trial: Trial, collective: Collective | None = None) -> Outcome:
    """One trial of ``module.main``."""
    return Runner(module, weights, collective).run(trial)


class Runner:
    """A module with its weights bound once, for several trials."""

    def __init__(
        self, module: Module, weights: Weights, collective: Collective | None = None,
        override: Mapping[str, Tensor] | None = None,
    ) -> None:  # fmt: skip
        params = weights.bind(module) | dict(override or {})
        self.interpreter = Interpreter(module, params, collective=collective or Alone())

    def run(self, trial: Trial) -> Outcome:
        states = trial.fresh_states()
        step = None if trial.step is None else Step(trial.step)
        outputs = self.interpreter.run_all(step, states, trial.inputs)
        return Outcome(outputs, {n: s.data for n, s in states.items()})

    def step(
        self, step: StepInputs, states: Mapping[str, State], inputs: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        """One of several steps over the same states."""
        return self.interpreter.run_all(Step(step), states, inputs)


def isolate(module: Module, name: str) -> Module:
    """The function ``name`` as a module of its own, with the functions it uses."""
    if name == "main":
        return module
    kept: dict[str, Graph] = {}

    def take(graph: Graph) -> None:
        for node in graph.nodes:
            if node.op in ("call", "group") and node.fn not in kept:
                kept[node.fn] = module.functions[node.fn]
                take(kept[node.fn])

    take(module.functions[name])
    return Module({"main": replace(module.functions[name], name="main"), **kept}, module.attrs)


def distance(want: Tensor, got: Tensor) -> float:
    """The largest difference of two results; infinite where their shapes, dtypes, or what is not finite differ."""
    if want.shape != got.shape or want.dtype != got.dtype:
        return math.inf
    if not want.dtype.is_floating_point:
        return 0.0 if torch.equal(want, got) else math.inf
    if not want.numel():
        return 0.0
    if not torch.equal(want.isnan(), got.isnan()) or not torch.equal(want.isinf(), got.isinf()):
        return math.inf
    infinite = want.isinf()
    if not torch.equal(want[infinite], got[infinite]):
        return math.inf
    finite = want.isfinite()
    return float((want[finite].double() - got[finite].double()).abs().max()) if bool(finite.any()) else 0.0


def magnitude(value: Tensor) -> float:
    """The largest finite entry, without its sign."""
    finite = value[value.isfinite()] if value.dtype.is_floating_point else value
    return float(finite.double().abs().max()) if finite.numel() else 0.0


def widen(module: Module) -> Module:
    """The same module in f32: what it computes where nothing is rounded to bf16 or f16 in between."""
    values: dict[Value, Value] = {}

    def value(old: Value) -> Value:
        if old not in values:
            type = _wide_type(old.type)
            values[old] = old if type is old.type else Value(old.name, type)
        return values[old]

    def node(old: Node) -> Node:
        attrs = {k: _wide_attr(k, v) for k, v in old.attrs.items()}
        inputs = tuple(None if v is None else value(v) for v in old.inputs)
        return Node(old.op, inputs, attrs, tuple(map(value, old.outputs)), old.origin)

    def param(old: Param) -> Param:
        new = value(old.value)
        return old if new is old.value else Param(new, Convert(old.recipe, "f32"))

    graphs = [
        Graph(
            g.name, g.dims, tuple(map(value, g.inputs)), tuple(map(param, g.params)), tuple(map(value, g.states)),
            tuple(map(node, g.nodes)), tuple(map(value, g.outputs)),
        )
        for g in module.functions.values()
    ]  # fmt: skip
    return Module({g.name: g for g in graphs}, module.attrs)


def wide_trial(trial: Trial) -> Trial:
    """The same numbers in f32."""
    states = {n: State(_wide_state(s.type), _wide_tensor(s.data), s.group) for n, s in trial.states.items()}
    return replace(trial, inputs=tuple(map(_wide_tensor, trial.inputs)), states=states)


def can_widen(module: Module) -> bool:
    """Whether the dtypes of all results are known: an opaque operator's arguments may name one."""
    return all(n.op != "aten" for g in module.functions.values() for n in g.nodes)


def _wide_tensor(value: Tensor) -> Tensor:
    return value.float() if value.dtype in (torch.bfloat16, torch.float16) else value


def _wide_type(type: Type) -> Type:
    if isinstance(type, TensorType) and type.dtype in NARROW:
        return type.with_dtype("f32")
    return _wide_state(type) if isinstance(type, StateType) else type


def _wide_state(type: StateType) -> StateType:
    return replace(type, dtype="f32") if type.dtype in NARROW else type


def _wide_attr(name: str, value: Attr) -> Attr:
    return "f32" if name in ("dtype", "out_dtype") and value in NARROW else value


def new_nodes(before: Graph, after: Graph) -> list[Node]:
    """Nodes of ``after`` that ``before`` does not have."""
    old = set(before.nodes)
    return [n for n in after.nodes if n not in old]


def removed_nodes(before: Graph, after: Graph) -> list[Node]:
    """Nodes of ``before`` that ``after`` no longer has."""
    return new_nodes(after, before)


__all__ = ["Alone", "FuncRef", "Outcome", "Runner", "distance", "isolate", "magnitude", "run", "widen"]
