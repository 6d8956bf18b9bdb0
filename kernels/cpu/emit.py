"""Writes a module as C++: one function per layer kind, run by a team of threads, called from one entry point.

Every stage is a template call with constant dims or a generated loop; ``team.sync()`` separates dependent stages.
Intermediate values live in an arena whose offsets are a table, so one library serves every bucket. A node with no
CPU kernel (``aten``, or a group of them) calls back to the host from rank 0; ``Program.host_calls`` says what it runs.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from compilerllm.ir.dims import Dim
from compilerllm.ir.graph import Graph, Module, Node, Value, join_name, state_name
from compilerllm.ir.types import StepType, TensorType
from compilerllm.kernels.cpu.opaque import HostCall, emit_opaque, is_opaque
from compilerllm.kernels.cpu.refs import C_TYPES, Ref, dense_strides, view
from compilerllm.kernels.errors import UnsupportedByTarget


@dataclass
class Program:
    """C++ source and what the launcher must know to call it."""

    dims: list[str]  # order of the dims array
    params: list[str] = field(default_factory=list)  # pointers in this order, global names (a layer's in a row)
    states: list[str] = field(default_factory=list)
    inputs: list[tuple[str, tuple[Dim, ...]]] = field(default_factory=list)
    outputs: list[tuple[str, tuple[Dim, ...]]] = field(default_factory=list)
    slots: list[tuple[str, Value]] = field(default_factory=list)  # (function, value) of each planned offset
    scratch: list[Dim] = field(default_factory=list)  # bytes of slots of our own, after the planned ones
    host_calls: list[HostCall] = field(default_factory=list)
    headers: set[str] = field(default_factory=set)
    kernels: list[tuple[str, str, str]] = field(default_factory=list)  # (function, node as text, template)
    source: str = ""


class FunctionEmitter:
    """Emits one function; op emitters in ``emit_ops`` call its methods."""

    def __init__(self, module: Module, graph: Graph, program: Program, groups: dict[int | None, int], tables: set[Value]) -> None:
        self.module, self.graph, self.program, self.groups, self.tables = module, graph, program, groups, tables
        self.lines: list[str] = []
        self.refs: dict[Value, Ref] = {}
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
        self.lines.append("  " + text)

    def sync(self) -> None:
        self.line("team.sync();")

    def need(self, header: str) -> None:
        self.program.headers.add(header)

    def ref(self, value: Value) -> Ref:
        """Where ``value`` lives. Inputs, params and node results have dense memory; views were noted when emitted."""
        found = self.refs.get(value)
        if found is None:
            found = self._new_ref(value)
            self.refs[value] = found
        return found

    def _new_ref(self, value: Value) -> Ref:
        dtype, shape = value.dtype, value.shape
        if value in self._param_index:
            base = f"((const {C_TYPES.get(dtype, 'uint8_t')}*)params_[{self._param_index[value]}])"
        elif value in self.graph.inputs:
            base = f"in{self.graph.inputs.index(value)}"
        else:
            base = self._allocate(value)
        strides = dense_strides(shape)
        return Ref(base, dtype, shape, strides, value)

    def _allocate(self, value: Value) -> str:
        c_type = "float" if value in self.tables else C_TYPES[value.dtype]
        if value in self._out_names and value not in self.tables:
            return self._out_names[value]
        if value in self.tables:
            half: Dim = value.shape[0] * self.table_half(value)
            return self.scratch(half * 4, c_type)
        self.program.slots.append((self.graph.name, value))
        name = f"v{len(self.program.slots) - 1}"
        self.line(f"{c_type}* const {name} = ({c_type}*)(c.arena + c.offsets[{len(self.program.slots) - 1}]);")
        return name

    def scratch(self, nbytes: Dim, c_type: str) -> str:
        """Memory of this function's own, beside the plan; gives the pointer's name."""
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
        return width if value in self.half_width_tables() else width // 2

    def half_width_tables(self) -> set[Value]:
        half: set[Value] = set()
        for node in self.graph.nodes:
            if node.attrs.get("half_width") and node.op in ("rope", "qkv_rope_write"):
                half.update(v for v in node.operands if v in self.tables)
            if node.op == "rotary_table" and node.attrs["layout"] == "half_width":
                half.update(node.outputs)
        return half

    def group(self, state: Value) -> int:
        """Index of the state's block table."""
        return self.groups[state.state.get("window")]

    def state(self, value: Value) -> str:
        return f"states_[{self._state_index[value]}]"

    def meta(self, state: Value) -> str:
        return f"c.meta({self.group(state)})"

    def rows(self, value: Value, lead: int) -> tuple[Ref, str, int, str]:
        """``value`` as rows and columns; copied to dense memory first where its strides need it."""
        ref = self.ref(value)
        shape = ref.rows(lead)
        if shape is None:
            ref = self.dense(value)
            shape = ref.rows(lead)
        if shape is None:
            raise UnsupportedByTarget(f"@{self.graph.name}: %{value.name} ({value.type}) has columns of symbolic extent")
        return ref, *shape

    def dense(self, value: Value) -> Ref:
        """``value`` without gaps, copied once if it has any."""
        ref = self.ref(value)
        if ref.contiguous or value in self.tables:
            return ref
        from compilerllm.kernels.cpu.loops import emit_copy

        base = self.scratch(value.tensor.nbytes, ref.c_type)
        self.refs[value] = Ref(base, value.dtype, value.shape, dense_strides(value.shape), value)
        emit_copy(self, self.refs[value], ref)
        self.sync()
        return self.refs[value]

    def note(self, node: Node, template: str) -> None:
        """Record which template runs a node, for the manifest and ``explain``."""
        from compilerllm.ir.text import print_node

        self.program.kernels.append((self.graph.name, print_node(node), template))

    def emit(self, emitters: dict[str, Callable[["FunctionEmitter", Node], None]]) -> str:
        """The whole function as C++."""
        for node in self.graph.nodes:
            if node.inputs and node.op in ("reshape", "permute", "slice", "expand"):
                source = node.inputs[0]
                assert source is not None
                seen = view(node, self.ref(source))
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
        self._store_outputs()
        return self._signature() + " {\n" + self._prologue() + "\n".join(self.lines) + "\n}\n"

    def _store_outputs(self) -> None:
        from compilerllm.kernels.cpu.loops import emit_copy

        for index, value in enumerate(self.graph.outputs):
            if self._out_names.get(value) == f"out{index}":
                continue
            dense = Ref(f"out{index}", value.dtype, value.shape, dense_strides(value.shape), value)
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
        dims = [d for d in self.program.dims if d in {decl.name for decl in self.graph.dims} | {"T", "S", "R"}]
        return "".join(f"  [[maybe_unused]] const int64_t {d} = c.dims[{self.program.dims.index(d)}];\n" for d in dims)


def c_name(function: str) -> str:
    """A C identifier for a function of the module."""
    return "fn_" + "".join(ch if ch.isalnum() else "_" for ch in function)


def state_groups(module: Module) -> dict[int | None, int]:
    """Paged states that share a block table, by window: windowless first, then by size."""
    windows = {t.get("window") for _, t in module.state_instances() if t.addressing == "paged"}
    order = sorted(windows, key=lambda w: (w is not None, w or 0))
    return {window: index for index, window in enumerate(order)}


def find_tables(module: Module) -> set[Value]:
    """Values that come from ``rotary_table`` and go to rope alone, followed into the functions they are passed to.

    They are stored as rope kernels read them; a table that anything else reads is an ordinary tensor.
    """
    links = [pair for call, callee in module.calls() for pair in zip(call.inputs, callee.inputs, strict=True)]
    tables = {v for g in module.functions.values() for n in g.nodes if n.op == "rotary_table" for v in n.outputs}
    tables |= {inner for given, inner in links if given in tables}
    plain = {v for g in module.functions.values() for v in g.outputs}
    ropes = ("rope", "qkv_rope_write")
    for graph in module.functions.values():
        plain |= {v for n in graph.nodes if n.op not in (*ropes, "call") for v in n.operands}
    plain &= tables
    while grown := {v for pair in links if not plain.isdisjoint(pair) for v in pair if v is not None} & tables - plain:
        plain |= grown
    for graph in module.functions.values():
        for node in graph.nodes:
            if node.op in ropes and (both := [v for v in node.operands if v in plain]):
                raise UnsupportedByTarget(
                    f"@{graph.name}: {node!r} rotates by %{both[0].name}, which is used outside of rope as well; "
                    "compile with --optimization-level 0"
                )
    return tables - plain


def emit_call(e: FunctionEmitter, node: Node) -> None:
    """A call of a layer function: its pointers start at a fixed place of the program's tables."""
    callee = e.module.functions[node.fn]
    prefix, suffix = node.text("params", ""), node.text("states", "")
    params_at, states_at = len(e.program.params), len(e.program.states)
    e.program.params += [join_name(prefix, p.name) for p in callee.params]
    e.program.states += [state_name(v.name, suffix) for v in callee.states]
    args = [f"params_ + {params_at}", f"states_ + {states_at}"]
    for value in node.inputs:
        assert value is not None
        if isinstance(value.type, StepType):
            continue
        args.append(e.dense(value).pointer)
    args += [e.ref(v).pointer for v in node.outputs]
    e.line(f"{c_name(callee.name)}(team, c, {', '.join(args)});")
    e.sync()


def emit_group(e: FunctionEmitter, node: Node) -> None:
    """A group: one generated loop, or one host call where it is made of opaque operators."""
    from compilerllm.kernels.cpu.emit_ops import group

    (emit_opaque if is_opaque(e.module.functions[node.fn]) else group)(e, node)


def emit_program(module: Module) -> Program:
    """The module as one C++ translation unit. Raises ``UnsupportedByTarget`` for an op no CPU kernel runs."""
    from compilerllm.kernels.cpu.emit_ops import EMITTERS

    main = module.main
    # The order is part of the ABI: T, S, R first where a step has them, then the rest by name.
    declared = {d.name for g in module.functions.values() for d in g.dims}
    program = Program([d for d in ("T", "S", "R") if d in declared] + sorted(declared - {"T", "S", "R"}))
    groups, tables = state_groups(module), find_tables(module)
    program.params += [p.name for p in main.params]
    program.states += [v.name for v in main.states]
    emitters = {**EMITTERS, "call": emit_call, "aten": emit_opaque, "group": emit_group}
    called = dict.fromkeys(callee.name for _, callee in module.calls())
    parts = [FunctionEmitter(module, module.functions[name], program, groups, tables).emit(emitters) for name in called]
    parts.append(FunctionEmitter(module, main, program, groups, tables).emit(emitters))
    for value in main.inputs:
        if isinstance(value.type, TensorType):
            program.inputs.append((value.dtype, value.shape))
    program.outputs += [(v.dtype, v.shape) for v in main.outputs]
    program.source = _preamble(program) + "\n".join(parts) + _entry(program, main)
    return program


def _preamble(program: Program) -> str:
    headers = "".join(f'#include "{h}"\n' for h in ("team.h", "vec.h", *sorted(program.headers - {"team.h", "vec.h"})))
    return f"""// Generated. Arguments: dims {', '.join(program.dims) or 'none'}.
{headers}
#include "program.h"
using namespace cllm;

"""


def _entry(program: Program, main: Graph) -> str:
    args = []
    index = 0
    for value in main.inputs:
        if isinstance(value.type, StepType):
            continue
        args.append(f"(const {C_TYPES[value.dtype]}*)c.inputs[{index}]")
        index += 1
    args += [f"({C_TYPES[v.dtype]}*)c.outputs[{i}]" for i, v in enumerate(main.outputs)]
    call = ", ".join(["team", "c", "c.params", "c.states", *args])
    return f"""
static void entry(Team& team, void* arg) {{
  const Ctx& c = *(const Ctx*)arg;
  {c_name(main.name)}({call});
}}
CLLM_EXPORT void cllm_run(int threads, Ctx* c) {{ run_team(threads, entry, c); }}
"""

