"""Runs a module node by node in torch: the meaning of the IR, at every stage of the pipeline.

Captured (tensors in, tensors out), served (a step and states), fused and specialised modules all run here, so any
pass can be checked against the graph it replaced. This is also how level O0 executes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from compilerllm.ir.dims import Dim, free_dims, print_dim, substitute
from compilerllm.ir.graph import Graph, Module, Node, Value, join_name, state_name
from compilerllm.ir.step import StepInputs
from compilerllm.ir.types import StepType, TensorType
from compilerllm.kernels.launch.dtypes import IR_DTYPES
from compilerllm.kernels.reference import registry
from compilerllm.kernels.reference.collective import Collective
from compilerllm.kernels.reference.errors import MissingParam, ParamMismatch, ResultMismatch, UnboundDim
from compilerllm.kernels.reference.quantized import dequantize
from compilerllm.kernels.reference.states import State, Step

Runtime = Any  # Tensor | State | Step


@dataclass(frozen=True, eq=False)
class _Plan:
    """What is the same in every run of a function: values to drop after each node, attributes that need no dims."""

    dead_after: tuple[tuple[Value, ...], ...]
    attrs: tuple[dict[str, Any] | None, ...]


class Interpreter:
    """``params`` are tensors by global name (``Module.param_instances``), in the logical layout.

    A packed parameter (q4_0, q4_1, q8_0) is given as its blocks' bytes (u8) and dequantised to f32 at first use.
    ``check`` compares every result's dtype and shape with its type.
    """

    def __init__(
        self,
        module: Module,
        params: Mapping[str, Tensor],
        *,
        collective: Collective | None = None,
        check: bool = True,
    ) -> None:
        self.module, self.params = module, params
        self.collective, self.check = collective, check
        self._wide: dict[str, Tensor] = {}
        self._plans: dict[str, _Plan] = {}
        for instance in module.param_instances():
            if instance.name not in params:
                raise MissingParam(f"parameter {instance.name} : {instance.type} is not given")
            _check_param(instance.name, instance.type, params[instance.name])

    @torch.no_grad()
    def run(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Run ``main`` of a module without states. Raises ``UnboundDim`` where the inputs do not fit."""
        return self._function(self.module.main, inputs, "", "", {}, None)

    @torch.no_grad()
    def run_step(
        self,
        step: StepInputs | Step,
        states: Mapping[str, State],
        last_token: Tensor | None = None,
        *,
        inputs: Sequence[Tensor] = (),
    ) -> Tensor:
        """Run one step of a served module: logits [R, V]. ``states`` are by global name and are written in place.

        ``last_token`` [slots] is what negative token ids stand for. ``inputs`` are those of ``main`` beside the step.
        """
        ready = step if isinstance(step, Step) else Step(step, last_token)
        return self.run_all(ready, states, inputs)[0]

    @torch.no_grad()
    def run_all(
        self, step: Step | None, states: Mapping[str, State], inputs: Sequence[Tensor] = ()
    ) -> tuple[Tensor, ...]:
        """Everything that ``main`` gives, with or without a step."""
        rest = iter(inputs)
        given = [step if isinstance(v.type, StepType) else next(rest, None) for v in self.module.main.inputs]
        return self._function(self.module.main, given, "", "", states, step)

    def _function(
        self,
        graph: Graph,
        inputs: Sequence[Runtime],
        prefix: str,
        suffix: str,
        states: Mapping[str, State],
        step: Step | None,
    ) -> tuple[Tensor, ...]:
        binding = self._bind(graph, inputs, step)
        table: dict[Value, Runtime] = dict(zip(graph.inputs, inputs, strict=True))
        for param in graph.params:
            table[param.value] = self._param(join_name(prefix, param.name), param.value.tensor)
        for value in graph.states:
            table[value] = states[state_name(value.name, suffix)]
        plan = self._plan(graph)
        for index, node in enumerate(graph.nodes):
            operands = [None if v is None else table[v] for v in node.inputs]
            if node.op == "call":
                results: Any = self._function(
                    self.module.functions[node.fn], operands, node.text("params", ""),
                    node.text("states", ""), states, step,
                )  # fmt: skip
            elif node.op == "group":
                results = self._function(
                    self.module.functions[node.fn], operands, prefix, suffix, states, step
                )
            elif node.op == "all_reduce" and self.collective is not None:
                part = operands[0]
                assert isinstance(part, Tensor)
                results = self.collective.all_reduce(part, node.text("axis"))
            else:
                attrs = plan.attrs[index]
                if attrs is None:
                    attrs = {k: _number(v, binding, node) for k, v in node.attrs.items()}
                results = registry.lookup(node.op)(*operands, **attrs)
            if not isinstance(results, tuple):
                results = () if results is None else (results,)
            if self.check:
                _check_results(graph, node, results, binding)
            table.update(zip(node.outputs, results, strict=True))
            for value in plan.dead_after[index]:
                del table[value]
        return tuple(table[v] for v in graph.outputs)

    def _param(self, name: str, type: TensorType) -> Tensor:
        if not type.is_quantized:
            return self.params[name]
        if name not in self._wide:
            self._wide[name] = dequantize(self.params[name], type)
        return self._wide[name]

    def _plan(self, graph: Graph) -> _Plan:
        if graph.name not in self._plans:
            keep = set(graph.outputs)
            dead: list[tuple[Value, ...]] = []
            for node in reversed(graph.nodes):
                last = dict.fromkeys(v for v in (*node.operands, *node.outputs) if v not in keep)
                keep.update(last)
                dead.append(tuple(last))
            attrs = tuple(
                None
                if any(_is_symbolic(v) for v in node.attrs.values())
                else {k: _number(v, {}, node) for k, v in node.attrs.items()}
                for node in graph.nodes
            )
            self._plans[graph.name] = _Plan(tuple(reversed(dead)), attrs)
        return self._plans[graph.name]

    def _bind(self, graph: Graph, inputs: Sequence[Runtime], step: Step | None) -> dict[str, int]:
        """Numbers of the function's dims: from its inputs' shapes, else from the step."""
        if len(inputs) != len(graph.inputs):
            raise UnboundDim(f"@{graph.name} takes {len(graph.inputs)} inputs, not {len(inputs)}")
        return bind_dims(graph, inputs, {} if step is None else step.dims)


def bind_dims(graph: Graph, inputs: Sequence[Runtime], known: Mapping[str, int]) -> dict[str, int]:
    """Match a function's input types with what it is given. Raises ``UnboundDim`` where they do not fit."""
    binding: dict[str, int] = {}
    pending: list[tuple[Value, Dim, int]] = []
    for value, given in zip(graph.inputs, inputs, strict=True):
        if isinstance(value.type, StepType):
            continue
        if given is None:
            raise UnboundDim(f"@{graph.name}: input {value!r} is not given")
        shape = tuple(given.shape)
        if len(shape) != value.tensor.rank:
            raise UnboundDim(f"@{graph.name}: input {value!r} is given the shape {list(shape)}")
        for extent, number in zip(value.shape, shape, strict=True):
            names = free_dims(extent)
            if len(names) == 1 and print_dim(extent) in names:
                if binding.setdefault(print_dim(extent), number) != number:
                    raise UnboundDim(
                        f"@{graph.name}: {extent} is {binding[print_dim(extent)]}, but {value!r} has {number}"
                    )
            else:
                pending.append((value, extent, number))
    for decl in graph.dims:
        if decl.name not in binding and decl.name in known:
            binding[decl.name] = known[decl.name]
    for value, extent, number in pending:
        _solve(graph, value, extent, number, binding)
    for decl in graph.dims:
        number = binding.get(decl.name, decl.low)
        if not decl.low <= number <= decl.high:
            raise UnboundDim(f"@{graph.name}: {decl.name} is {number}, outside [{decl.low}, {decl.high}]")
    return binding


def _solve(graph: Graph, value: Value, extent: Dim, number: int, binding: dict[str, int]) -> None:
    """Check ``extent == number``; a single unknown in a linear extent is bound by it."""
    left = substitute(extent, dict(binding))
    if isinstance(left, int):
        if left != number:
            raise UnboundDim(f"@{graph.name}: {value!r} is given an axis of {number}, not {left}")
        return
    (name, *others) = sorted(free_dims(left))
    at_zero, at_one = substitute(left, {name: 0}), substitute(left, {name: 1})
    if others or not isinstance(at_zero, int) or not isinstance(at_one, int) or at_one == at_zero:
        raise UnboundDim(f"@{graph.name}: {print_dim(extent)} of {value!r} does not tell {name}")
    found = (number - at_zero) // (at_one - at_zero)
    if substitute(left, {name: found}) != number:
        raise UnboundDim(f"@{graph.name}: no {name} gives {print_dim(extent)} = {number} ({value!r})")
    binding[name] = found


def _is_symbolic(value: Any) -> bool:
    if isinstance(value, tuple):
        return any(_is_symbolic(v) for v in value)
    return hasattr(value, "free_symbols")


def _number(value: Any, binding: Mapping[str, int], node: Node) -> Any:
    """An attribute with its dimensions as numbers."""
    if isinstance(value, tuple):
        return tuple(_number(v, binding, node) for v in value)
    if not hasattr(value, "free_symbols"):
        return value
    number = substitute(value, dict(binding))
    if not isinstance(number, int):
        raise UnboundDim(f"{node!r}: nothing tells {', '.join(sorted(free_dims(number)))}")
    return number


def _check_results(graph: Graph, node: Node, results: tuple[Any, ...], binding: Mapping[str, int]) -> None:
    if len(results) != len(node.outputs):
        raise ResultMismatch(f"@{graph.name}: {node!r} gives {len(results)} values, not {len(node.outputs)}")
    for value, result in zip(node.outputs, results, strict=True):
        want = tuple(_number(extent, binding, node) for extent in value.shape)
        if tuple(result.shape) != want or IR_DTYPES.get(result.dtype) != value.dtype:
            raise ResultMismatch(
                f"@{graph.name}: {node!r} gives {result.dtype} {list(result.shape)}, "
                f"but %{value.name} is {value.type} = {list(want)}"
            )


def _check_param(name: str, type: TensorType, given: Tensor) -> None:
    if type.is_quantized:
        if given.numel() * given.element_size() != type.nbytes:
            raise ParamMismatch(
                f"parameter {name} : {type} takes {type.nbytes} bytes, "
                f"but {given.dtype} {list(given.shape)} is given"
            )
    elif IR_DTYPES.get(given.dtype) != type.dtype or tuple(given.shape) != type.shape:
        raise ParamMismatch(f"parameter {name} : {type} is given as {given.dtype} {list(given.shape)}")
