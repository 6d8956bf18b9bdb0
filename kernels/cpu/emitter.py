"""What one function's code is collected in: where values live, memory of its own, and the table of op emitters.

Op emitters are in ``emit_ops``, ``emit_attention`` and ``emit_loops``; ``emit`` puts whole programs together.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module

from compilerllm.ir.dims import Dim
from compilerllm.ir.graph import Graph, Module, Node, Value
from compilerllm.ir.text import print_node
from compilerllm.ir.types import StepType
from compilerllm.kernels.cpu.loops import emit_copy
from compilerllm.kernels.cpu.opaque import HostCall
from compilerllm.kernels.cpu.refs import C_TYPES, CRef
from compilerllm.kernels.errors import UnsupportedByTarget
from compilerllm.kernels.refs import VIEW_OPS, dense_strides, view
from compilerllm.kernels.spec import KernelSpec


@dataclass(frozen=True)
class KernelUse:
    """A node of a function, as text, and the kernel that runs it."""

    function: str
    node: str
    spec: KernelSpec


@dataclass
class Program:
    """C++ source and what the launcher must know to call it."""

    target: str  # its name
    dims: list[str]  # order of the dims array
    # Global names in the order of the pointer tables; those of one layer stand in a row.
    params: list[str] = field(default_factory=list)
    states: list[str] = field(default_factory=list)
    inputs: list[tuple[str, tuple[Dim, ...]]] = field(default_factory=list)
    outputs: list[tuple[str, tuple[Dim, ...]]] = field(default_factory=list)
    slots: list[tuple[str, Value]] = field(default_factory=list)  # (function, value) of each planned offset
    scratch: list[Dim] = field(default_factory=list)  # bytes of slots of our own, after the planned ones
    host_calls: list[HostCall] = field(default_factory=list)
    headers: set[str] = field(default_factory=set)
    kernels: list[KernelUse] = field(default_factory=list)  # in the order of the source
    # Of each function the nodes that have code, in order: all but views.
    stages: dict[str, list[Node]] = field(default_factory=dict)
    timed: bool = False  # whether rank 0 reads the clock after each stage (csrc/stamp.h)
    source: str = ""


class FunctionEmitter:
    """Emits one function; op emitters call its methods.

    windows: of each group of paged states, as ``paged_windows`` gives them. tables: values of the module that are
    rotary tables in rope's own form (f32, each frequency once).
    """

    def __init__(
        self,
        module: Module,
        graph: Graph,
        program: Program,
        windows: Sequence[int | None],
        tables: set[Value],
    ) -> None:
        self.module, self.graph, self.program = module, graph, program
        self.windows, self.tables = windows, tables
        self.lines: list[str] = []
        self.refs: dict[Value, CRef] = {}
        self._param_index = {p.value: i for i, p in enumerate(graph.params)}
        self._state_index = {v: i for i, v in enumerate(graph.states)}
        self._out_names = self._output_pointers()
        self._fresh = 0

    def fresh(self, stem: str) -> str:
        """A C variable name not used yet in this function."""
        self._fresh += 1
        return f"{stem}{self._fresh}_"

    def _output_pointers(self) -> dict[Value, str]:
        """Outputs whose producer may write straight to the caller's memory."""
        produced = {v for n in self.graph.nodes for v in n.outputs}
        seen: dict[Value, str] = {}
        for index, value in enumerate(self.graph.outputs):
            if value in produced and value not in seen:
                seen[value] = f"out{index}"
        return seen

    def line(self, text: str) -> None:
        """Add a line of C++ to the function's body."""
        self.lines.append("  " + text)

    def sync(self) -> None:
        """Let the team wait: what follows may read what came before."""
        self.line("team.sync();")

    def need(self, header: str) -> None:
        """Include a header of ``csrc``."""
        self.program.headers.add(header)

    def ref(self, value: Value) -> CRef:
        """Where ``value`` lives. Inputs, params and node results have dense memory; views were noted when emitted."""
        found = self.refs.get(value)
        if found is None:
            found = self._new_ref(value)
            self.refs[value] = found
        return found

    def _new_ref(self, value: Value) -> CRef:
        dtype, shape = value.dtype, value.shape
        if value in self._param_index:
            base = f"((const {C_TYPES.get(dtype, 'uint8_t')}*)params_[{self._param_index[value]}])"
        elif value in self.graph.inputs:
            base = f"in{self.graph.inputs.index(value)}"
        else:
            base = self._allocate(value)
        strides = dense_strides(shape)
        return CRef(base, dtype, shape, strides, value)

    def _allocate(self, value: Value) -> str:
        c_type = "float" if value in self.tables else C_TYPES[value.dtype]
        if value in self._out_names and value not in self.tables:
            return self._out_names[value]
        if value in self.tables:
            half: Dim = value.shape[0] * self.table_half(value)
            return self.scratch(half * 4, c_type)
        self.program.slots.append((self.graph.name, value))
        name = f"v{len(self.program.slots) - 1}"
        self.line(
            f"{c_type}* const {name} = ({c_type}*)(c.arena + c.offsets[{len(self.program.slots) - 1}]);"
        )
        return name

    def scratch(self, nbytes: Dim, c_type: str) -> str:
        """``nbytes`` of this function's own, beside the plan; gives the name of a pointer to ``c_type``."""
        self.program.scratch.append(nbytes)
        index = len(self.program.scratch) - 1
        name = f"t{index}"
        self.line(f"{c_type}* const {name} = ({c_type}*)(c.arena + c.scratch[{index}]);")
        return name

    def table_half(self, value: Value) -> int:
        """Columns of a rotary table as kernels read it: each frequency once."""
        width = value.shape[-1]
        if not isinstance(width, int):
            raise UnsupportedByTarget(f"@{self.graph.name}: a rotary table of symbolic width {width}")
        return width if value in self._half_width_tables() else width // 2

    def _half_width_tables(self) -> set[Value]:
        half: set[Value] = set()
        for node in self.graph.nodes:
            if node.attrs.get("half_width") and node.op in ("rope", "qkv_rope_write"):
                half.update(v for v in node.operands if v in self.tables)
            if node.op == "rotary_table" and node.attrs["layout"] == "half_width":
                half.update(node.outputs)
        return half

    def group(self, state: Value) -> int:
        """Index of the state's block table."""
        return self.windows.index(state.state.get("window"))

    def state(self, value: Value) -> str:
        """The pointer to a state's blocks."""
        return f"states_[{self._state_index[value]}]"

    def meta(self, state: Value) -> str:
        """The step's sequences with the block table of the state's group, as kernels take them."""
        return f"c.meta({self.group(state)})"

    def rows(self, value: Value, lead: int) -> tuple[CRef, str, int, str]:
        """``value`` as rows (its first ``lead`` axes) of columns (the others): ref, rows, columns, row stride in elements.

        Copied to dense memory first where its strides need it. Raises ``UnsupportedByTarget`` for symbolic columns.
        """
        ref = self.ref(value)
        shape = ref.c_rows(lead)
        if shape is None:
            ref = self.dense(value)
            shape = ref.c_rows(lead)
        if shape is None:
            raise UnsupportedByTarget(
                f"@{self.graph.name}: %{value.name} ({value.type}) has columns of symbolic extent"
            )
        return ref, *shape

    def dense(self, value: Value) -> CRef:
        """``value`` without gaps, copied once if it has any."""
        ref = self.ref(value)
        if ref.contiguous or value in self.tables:
            return ref
        base = self.scratch(value.tensor.nbytes, ref.c_type)
        self.refs[value] = CRef(base, value.dtype, value.shape, dense_strides(value.shape), value)
        emit_copy(self, self.refs[value], ref)
        self.sync()
        return self.refs[value]

    def note(self, node: Node, template: str, **config: str) -> None:
        """Record which template runs a node, and with which arguments, for the manifest."""
        spec = KernelSpec.of(node, self.module, self.program.target, template, config)
        self.program.kernels.append(KernelUse(self.graph.name, print_node(node), spec))

    def emit(self) -> str:
        """The whole function as C++. Raises ``UnsupportedByTarget`` for an op no CPU kernel runs."""
        emitters = all_emitters()
        for node in self.graph.nodes:
            if node.op in VIEW_OPS:
                seen = view(node, self.ref(node.operand(0)))
                if seen is not None and node.outputs[0] not in self._out_names:
                    self.refs[node.outputs[0]] = seen
                    continue
            emitter = emitters.get(node.op)
            if emitter is None:
                raise UnsupportedByTarget(
                    f"@{self.graph.name}: no CPU kernel for op {node.op!r} (from {node.origin.path or 'the graph'}); "
                    "compile with --optimization-level 0 to run it through torch"
                )
            self.line(f"// {node!r}")
            emitter(self, node)
            self.program.stages.setdefault(self.graph.name, []).append(node)
            if self.program.timed:
                self.line("stamp(team);")
        self._store_outputs()
        return self._signature() + " {\n" + self._prologue() + "\n".join(self.lines) + "\n}\n"

    def _store_outputs(self) -> None:
        for index, value in enumerate(self.graph.outputs):
            if self._out_names.get(value) == f"out{index}":
                continue
            dense = CRef(f"out{index}", value.dtype, value.shape, dense_strides(value.shape), value)
            emit_copy(self, dense, self.ref(value))
            self.sync()

    def _signature(self) -> str:
        args = ["Team& team", "const Ctx& c", "void* const* params_", "void* const* states_"]
        for index, value in enumerate(self.graph.inputs):
            if isinstance(value.type, StepType):
                continue
            c_type = "float" if value in self.tables else C_TYPES[value.dtype]
            args.append(f"const {c_type}* in{index}")
        args += [f"{C_TYPES[v.dtype]}* out{i}" for i, v in enumerate(self.graph.outputs)]
        return f"static void {c_name(self.graph.name)}({', '.join(args)})"

    def _prologue(self) -> str:
        dims = [
            d for d in self.program.dims if d in {decl.name for decl in self.graph.dims} | {"T", "S", "R"}
        ]
        return "".join(
            f"  [[maybe_unused]] const int64_t {d} = c.dims[{self.program.dims.index(d)}];\n" for d in dims
        )


def c_name(function: str) -> str:
    """A C identifier for a function of the module."""
    return "fn_" + "".join(ch if ch.isalnum() else "_" for ch in function)


Emitter = Callable[[FunctionEmitter, Node], None]
EMITTERS: dict[str, Emitter] = {}


def emitter(*ops: str) -> Callable[[Emitter], Emitter]:
    """Register the function below as what writes the code of ``ops``."""

    def register(function: Emitter) -> Emitter:
        for op in ops:
            EMITTERS[op] = function
        return function

    return register


@cache
def all_emitters() -> Mapping[str, Emitter]:
    """Every op's emitter, by op name."""
    for part in ("emit_ops", "emit_attention", "emit_loops"):
        import_module(f"compilerllm.kernels.cpu.{part}")
    return EMITTERS


def optional(e: FunctionEmitter, node: Node, index: int, c_type: str | None = None) -> str:
    """Pointer to an optional operand, or nullptr."""
    value = node.input(index)
    if value is None:
        return f"({c_type}*)nullptr" if c_type else "nullptr"
    return e.dense(value).pointer


def float_type(e: FunctionEmitter, value: Value) -> str:
    """The template argument for activations: bf16 or float."""
    if value.dtype not in ("bf16", "f32"):
        raise UnsupportedByTarget(
            f"@{e.graph.name}: %{value.name} is {value.dtype}; CPU kernels run bf16 and f32. Serve with --dtype bfloat16 or float32"
        )
    return "bf16" if value.dtype == "bf16" else "float"
