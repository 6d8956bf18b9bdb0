"""One bucket's program in the making: where values live, memory of launches' own, and the table of op emitters.

Op emitters are in ``emit_rows``, ``emit_groups``, ``emit_linear``, ``emit_attention`` and ``emit_experts``; ``emit``
puts whole programs together. The graph is flat (``passes.inline_calls``); a node becomes launches in order.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib import import_module
from itertools import pairwise
from typing import Any

import sympy

from compilerllm.ir.dims import Dim, dim, substitute
from compilerllm.ir.graph import Graph, Module, Node, Value
from compilerllm.ir.step import Bucket
from compilerllm.ir.text import print_node
from compilerllm.ir.types import StateType, StepType, Type
from compilerllm.kernels.costs import node_cost
from compilerllm.kernels.cutlass.supply import NONE as NO_CUTLASS
from compilerllm.kernels.cutlass.supply import Supply
from compilerllm.kernels.errors import UnsupportedByTarget
from compilerllm.kernels.launch.dtypes import ITEM_BYTES, TRITON_TYPES
from compilerllm.kernels.launch.gpu.program import NO_COST, Choice, Cost, Extent, Pointer
from compilerllm.kernels.refs import VIEW_OPS, Ref, dense_strides, view
from compilerllm.kernels.spec import KernelSpec
from compilerllm.kernels.triton.calls import (
    Arg,
    Call,
    Emitted,
    GridEntry,
    Memory,
    Rows,
    Typed,
)
from compilerllm.kernels.triton.chooser import Chooser, FirstCandidate, OpenChooser
from compilerllm.kernels.triton.source import ConstValue, KernelSource, argument_names
from compilerllm.kernels.triton.target import CudaTarget
from compilerllm.kernels.tuning import problem_key

SCRATCH_ALIGNMENT = 256


class BucketEmitter:
    """Emits the flat main graph for one bucket; op emitters call its methods."""

    def __init__(
        self,
        module: Module,
        bucket: Bucket,
        target: CudaTarget,
        windows: Sequence[int | None],
        level: int = 2,
        chooser: Chooser | None = None,
        cutlass: Supply = NO_CUTLASS,
    ) -> None:
        self.module, self.bucket, self.target, self.level = module, bucket, target, level
        self.cutlass = cutlass
        self.graph: Graph = module.main
        self.windows = windows
        self.chooser = chooser or FirstCandidate()
        self.pdl = target.pdl and level >= 2
        self.out = Emitted(bucket)
        self.uses = self.graph.uses()
        self._producers = self.graph.producers()
        self._costs: dict[tuple[str, str, tuple[Type, ...]], Cost] = {}
        self._bounds: dict[str, Dim] = {"T": bucket.tokens, "S": bucket.sequences, "R": bucket.rows}
        self._refs: dict[Value, Ref] = {}
        self._bases: dict[str, Pointer] = {}
        self._params = {p.value for p in self.graph.params}
        self._node = 0
        self._scratch = 0
        self._copies: list[
            tuple[Value, Ref, range]
        ] = []  # of operands, by the present node: where it was, the calls
        self._asked: list[Choice] = []  # choices of the present node
        self._forced: dict[str, Any] | None = None
        self._last_use = self._lives()

    @property
    def node(self) -> Node:
        """The node being emitted."""
        return self.graph.nodes[self._node]

    @property
    def is_step(self) -> bool:
        """Whether main takes a step (a language model), not tensors alone."""
        return any(isinstance(v.type, StepType) for v in self.graph.inputs)

    def producer(self, value: Value) -> Node | None:
        """The node that makes a value; None for inputs and parameters."""
        return self._producers.get(value)

    # -- where values are -----------------------------------------------------------------------------------------

    def ref(self, value: Value) -> Ref:
        """Where a tensor lives; ``base`` names a pointer. Results get memory when first asked for."""
        if value not in self._refs:
            self._refs[value] = self._place(value)
        return self._refs[value]

    def _place(self, value: Value) -> Ref:
        if value in self._params:
            pointer = Pointer("param", value.name)
        elif value in self.graph.outputs and value not in self.graph.inputs:
            pointer = Pointer("logits", str(self.graph.outputs.index(value)))
        elif value in self.graph.inputs:
            pointer = Pointer("table", f"input_{self.graph.inputs.index(value)}")
        else:
            nbytes = self.bound(value.tensor.nbytes)
            self._reserve(value.name, nbytes, self._node, self._last_use.get(value, self._node))
            pointer = Pointer("arena", value.name)
        self._bases[value.name] = pointer
        return Ref(value.name, value.dtype, value.shape, dense_strides(value.shape), value)

    def bind(self, value: Value, pointer: Pointer) -> None:
        """Say where a result already lies, dense: no memory is reserved for it."""
        self._bases[value.name] = pointer
        self._refs[value] = Ref(value.name, value.dtype, value.shape, dense_strides(value.shape), value)

    def pointer(self, value: Value) -> Pointer:
        """A tensor's first element in dense memory (copied there first if it is strided), or a state's cache."""
        if isinstance(value.type, StateType):
            return Pointer("state", value.name)
        return self._at(self.dense(value))

    def arg(self, value: Value) -> Typed:
        """``pointer`` as an argument."""
        if isinstance(value.type, StateType):
            return Typed(self.pointer(value), value.type.dtype)
        return self.typed(self.pointer(value), value.dtype)

    @staticmethod
    def typed(pointer: Pointer, dtype: str) -> Typed:
        """A pointer of ours as an argument; IR dtypes."""
        return Typed(pointer, dtype, pointer.offset % 16 == 0)

    def ref_arg(self, ref: Ref) -> Typed:
        """A view's first element as an argument; its strides are the caller's business."""
        pointer = self._at(ref)
        return Typed(pointer, ref.dtype, pointer.offset % 16 == 0)

    def _at(self, ref: Ref) -> Pointer:
        if not isinstance(ref.offset, int):
            raise UnsupportedByTarget(f"%{ref.root.name} is read at the symbolic offset {ref.offset}")
        return self._bases[ref.base].at(ref.offset * ITEM_BYTES[ref.dtype])

    def dense(self, value: Value) -> Ref:
        """``value`` without gaps, copied once if it has any."""
        ref = self.ref(value)
        if ref.contiguous:
            return ref
        copy, before = self._copied(value), len(self.out.calls)
        _copy_strided(self, ref, copy)
        self._copies.append((value, ref, range(before, len(self.out.calls))))
        return copy

    def _copied(self, value: Value) -> Ref:
        name = f"{value.name}.dense"
        self._reserve(
            name, self.bound(value.tensor.nbytes), self._node, self._last_use.get(value, self._node)
        )
        self._bases[name] = Pointer("arena", name)
        self._refs[value] = Ref(name, value.dtype, value.shape, dense_strides(value.shape), value)
        return self._refs[value]

    def rows(self, value: Value, lead: int = 1) -> Rows:
        """``value`` as rows (its first ``lead`` axes) of dense columns; copied first where its strides need it."""
        ref = self.ref(value)
        found = _as_rows(ref, lead)
        if found is None:
            ref = self.dense(value)
            found = _as_rows(ref, lead)
        if found is None:
            raise UnsupportedByTarget(
                f"%{value.name} ({value.type}) has columns or strides of symbolic extent"
            )
        count, columns, stride = found
        return Rows(self._at(ref), count, columns, stride, value.dtype)

    def is_param(self, value: Value | None) -> bool:
        """Whether the value is a weight: nothing in a step writes it, so it may be read before the wait."""
        return value is not None and self.ref(value).root in self._params

    # -- memory of a launch's own ---------------------------------------------------------------------------------

    def scratch(self, nbytes: int) -> Pointer:
        """``nbytes`` for this node alone."""
        self._scratch += 1
        name = f"scratch.{self._scratch}"
        self._reserve(name, nbytes, self._node, self._node)
        return Pointer("arena", name)

    def counters(self, count: int) -> Pointer:
        """``count`` int32 zeros that launches share: each leaves them zero."""
        self.out.counters = max(self.out.counters, count)
        return Pointer("counters")

    def _reserve(self, name: str, nbytes: int, first: int, last: int) -> None:
        size = -(-max(nbytes, 1) // SCRATCH_ALIGNMENT) * SCRATCH_ALIGNMENT
        if name in self.out.memory:  # another candidate's scratch: one of them runs
            size = max(size, self.out.memory[name].bytes)
        self.out.memory[name] = Memory(name, size, first, last)

    # -- the step --------------------------------------------------------------------------------------------------

    def step(self, name: str) -> Pointer:
        """A field of StepInputs, "meta", or "table_<group>" on the device; all int32."""
        return Pointer("step", name)

    def step_arg(self, name: str) -> Typed:
        """``step`` as an argument."""
        return Typed(self.step(name), "i32")

    def table(self, name: str) -> Pointer:
        """A device table that outlives steps: "last_token" int32 [slots]."""
        return Pointer("table", name)

    def group(self, state: Value) -> int:
        """Index of the state's block table."""
        return self.windows.index(state.state.get("window"))

    # -- sizes -----------------------------------------------------------------------------------------------------

    def bound(self, size: Dim) -> int:
        """A dimension at the bucket's upper bounds."""
        return int(substitute(size, self._bounds))

    def extent(self, size: Dim, div: int = 1, mul: int = 1) -> int | Extent:
        """``mul * ceil(size / div)`` as a grid entry or argument; ``size`` is a number, T, S, R or a multiple."""
        if isinstance(size, int):
            return mul * -(-size // div)
        if isinstance(size, sympy.Symbol):
            return Extent(str(size.name), div, mul)
        if isinstance(size, sympy.Mul):
            factor, symbol = size.as_coeff_Mul()
            if isinstance(symbol, sympy.Symbol):
                return Extent(str(symbol.name), div, mul, 0, int(factor))
        raise UnsupportedByTarget(f"the size {size} is no multiple of a step's T, S or R")

    # -- launches --------------------------------------------------------------------------------------------------

    def launch(
        self,
        node: Node,
        template: str,
        grid: Sequence[GridEntry],
        args: Mapping[str, Arg],
        constexprs: Mapping[str, ConstValue],
        *,
        num_warps: int = 4,
        num_stages: int = 3,
        registers: int = 0,
    ) -> None:
        """Add one launch. Arguments go by name; PDL is added where the template has it."""
        names = argument_names(template)
        constants = dict(constexprs)
        if "PDL" in names:
            constants.setdefault("PDL", self.pdl)
        types: dict[str, str] = {}
        unaligned = []
        for name, value in args.items():
            if isinstance(value, Typed):
                types[name] = "*" + TRITON_TYPES[value.dtype]
                if not value.aligned:
                    unaligned.append(name)
            else:
                types[name] = "fp32" if isinstance(value, float) else "i32"
        source = KernelSource.of(
            template, types, constants, num_warps=num_warps, num_stages=num_stages,
            pdl=bool(constants.get("PDL")), unaligned=tuple(sorted(unaligned)), registers=registers,
        )  # fmt: skip
        values = tuple(_value(args[n]) for n, _ in source.signature)
        config = {k: str(v) for k, v in source.constexprs} | {
            "num_warps": str(num_warps),
            "num_stages": str(num_stages),
        }
        if registers:
            config["registers"] = str(registers)
        spec = KernelSpec.of(node, self.module, self.target.name, template, config)
        self._add(node, source, "", tuple(t for _, t in source.signature), (), grid, values, spec)

    def library(self, node: Node, name: str, args: Sequence[Arg], fixed: Mapping[str, Any]) -> None:
        """Add a call of a library: "matmul" (cuBLAS), "cutlass_gemm", "aten"."""
        types = tuple(
            "*" + TRITON_TYPES[a.dtype]
            if isinstance(a, Typed)
            else ("fp32" if isinstance(a, float) else "i32")
            for a in args
        )
        config = {k: str(v) for k, v in fixed.items()}
        spec = KernelSpec.of(node, self.module, self.target.name, f"library:{name}", config)
        self._add(
            node, None, name, types, tuple(sorted(fixed.items())), (1, 1, 1), tuple(map(_value, args)), spec
        )

    def _add(
        self, node: Node, source: KernelSource | None, library: str, types: tuple[str, ...],
        fixed: tuple[tuple[str, Any], ...], grid: Sequence[GridEntry],
        args: tuple[Pointer | Extent | int | float, ...], spec: KernelSpec,
    ) -> None:  # fmt: skip
        x, y, z = (*grid, 1, 1, 1)[:3]
        path = node.origin.path
        label = f"{print_node(node).strip()[:160]}" + (f"  [{path}]" if path else "")
        first = not self.out.calls or self.out.calls[-1].node != self._node
        cost = self._cost(node) if first else NO_COST
        self.out.calls.append(
            Call(source, library, types, fixed, (x, y, z), args, self._node, label, spec, cost)
        )

    def _cost(self, node: Node) -> Cost:
        """What the node must move and compute; asked once of nodes that are alike, as layers' are."""
        values = (*node.operands, *node.outputs)
        kind = node.op, str(node.attrs), tuple(v.type for v in values)
        if kind not in self._costs:
            self._costs[kind] = node_cost(node, self._bounds, self.module)
        return self._costs[kind]

    def choose(
        self, node: Node, family: str, problem: Mapping[str, int | str], candidates: Sequence[dict[str, Any]]
    ) -> dict[str, Any]:
        """The candidate to run. Raises ``UnsupportedByTarget`` where there is none."""
        if not candidates:
            raise UnsupportedByTarget(
                f"no {family} kernel for {dict(problem)} (from {node.origin.path or node!r})"
            )
        if self._forced is not None:
            return self._forced
        if isinstance(self.chooser, OpenChooser):
            offered = tuple(self.chooser.offer(family, problem, candidates))
        else:
            offered = (self.chooser.choose(family, problem, candidates),)
        self._asked.append(Choice(family, problem_key(problem), offered))
        return offered[0]

    # -- the walk --------------------------------------------------------------------------------------------------

    def _lives(self) -> dict[Value, int]:
        """The last node that uses each value or a view of it."""
        roots: dict[Value, Value] = {}
        last: dict[Value, int] = {}
        for index, node in enumerate(self.graph.nodes):
            for value in node.operands:
                last[value] = index
                while value in roots:
                    value = roots[value]
                    last[value] = index
            if node.op in VIEW_OPS or node.op == "gather_rows":
                roots[node.outputs[0]] = node.operand(0)
        for value in self.graph.outputs:
            while True:
                last[value] = len(self.graph.nodes)
                if value not in roots:
                    break
                value = roots[value]
        return last

    def emit(self) -> Emitted:
        """All launches of the bucket. Raises ``UnsupportedByTarget`` for an op no CUDA kernel runs."""
        emitters = all_emitters()
        for index, node in enumerate(self.graph.nodes):
            self._node = index
            if node.op in VIEW_OPS and node.outputs[0] not in self.graph.outputs:
                seen = view(node, self.ref(node.operand(0)))
                if seen is not None:
                    self._refs[node.outputs[0]] = seen
                    continue
            run = emitters.get(node.op)
            if run is None:
                raise UnsupportedByTarget(
                    f"no CUDA kernel for op {node.op!r} (from {node.origin.path or 'the graph'}); "
                    "compile with --optimization-level 0 to run it through torch"
                )
            self._emit(run, node)
        return self.out

    def _emit(self, run: "Emitter", node: Node) -> None:
        """The node's launches. Where its one choice is open, those of every candidate, into the same places.

        A node that makes several choices takes the default of each: combinations would multiply. A candidate that wants
        an operand copied first, which the default does not, is left out: the copy would be later nodes' operand too.
        """
        self._asked, self._copies = [], []
        begins, scratch = [len(self.out.calls)], self._scratch
        run(self, node)
        if len(self._asked) != 1 or len(self._asked[0].configs) == 1:
            return
        (asked,) = self._asked
        most, copies, kept = self._scratch, len(self._copies), [asked.configs[0]]
        for config in asked.configs[1:]:
            begin = len(self.out.calls)
            self._scratch, self._forced = scratch, config
            run(self, node)
            most = max(most, self._scratch)
            if len(self._copies) > copies:
                self._undo(begin, copies)
            else:
                begins.append(begin)
                kept.append(config)
        self._scratch, self._forced = most, None
        if len(kept) > 1:
            self._tag(node, replace(asked, configs=tuple(kept)), [*begins, len(self.out.calls)])

    def _undo(self, begin: int, copies: int) -> None:
        """Forget calls from ``begin`` on, and what they copied. Scratch memory stays: it is others' too."""
        del self.out.calls[begin:]
        for value, ref, _ in reversed(self._copies[copies:]):
            copy = self._refs[value].base
            del self.out.memory[copy], self._bases[copy]
            self._refs[value] = ref
        del self._copies[copies:]

    def _tag(self, node: Node, choice: Choice, begins: Sequence[int]) -> None:
        """Say whose each call is. Copies of operands come before them all, and are everybody's.

        The node's cost stands where any candidate's first launch is.
        """
        if choice not in self.out.choices:
            self.out.choices.append(choice)
        index, cost = self.out.choices.index(choice), self._cost(node)
        calls, copied = self.out.calls, [i for *_, places in self._copies for i in places]
        ordered = [replace(calls[i], cost=NO_COST) for i in copied]
        for candidate, (begin, end) in enumerate(pairwise(begins)):
            own = [i for i in range(begin, end) if i not in copied]
            ordered += [replace(calls[i], pick=(index, candidate), cost=NO_COST) for i in own]
            if not copied:
                ordered[-len(own)] = replace(ordered[-len(own)], cost=cost)
        if copied:
            ordered[0] = replace(ordered[0], cost=cost)
        calls[begins[0] :] = ordered


def _value(arg: Arg) -> Pointer | Extent | int | float:
    return arg.pointer if isinstance(arg, Typed) else arg


def _as_rows(ref: Ref, lead: int) -> tuple[Dim, int, int] | None:
    found = ref.rows(lead)
    if found is None or not isinstance(found[2], int):
        return None
    return dim(found[0]), found[1], found[2]


Emitter = Callable[[BucketEmitter, Node], None]
EMITTERS: dict[str, Emitter] = {}
_FAMILIES = ("emit_rows", "emit_groups", "emit_linear", "emit_attention", "emit_decode", "emit_experts")
_strided_copy: list[Callable[[BucketEmitter, Ref, Ref], None]] = []


def emitter(*ops: str) -> Callable[[Emitter], Emitter]:
    """Register the function below as what emits ``ops``."""

    def register(function: Emitter) -> Emitter:
        for op in ops:
            EMITTERS[op] = function
        return function

    return register


def strided_copy(
    function: Callable[[BucketEmitter, Ref, Ref], None],
) -> Callable[[BucketEmitter, Ref, Ref], None]:
    """Register what copies one view into another of the same shape: (emitter, source, destination)."""
    _strided_copy.append(function)
    return function


def _copy_strided(e: BucketEmitter, source: Ref, destination: Ref) -> None:
    all_emitters()
    _strided_copy[-1](e, source, destination)


@cache
def all_emitters() -> Mapping[str, Emitter]:
    """Every op's emitter, by op name."""
    for part in _FAMILIES:
        import_module(f"compilerllm.kernels.triton.{part}")
    return EMITTERS


__all__ = [
    "EMITTERS", "ITEM_BYTES", "TRITON_TYPES", "Arg", "BucketEmitter", "Call", "Chooser", "Emitted", "FirstCandidate",
    "Memory", "Rows", "Typed", "all_emitters", "emitter", "strided_copy",
]  # fmt: skip
