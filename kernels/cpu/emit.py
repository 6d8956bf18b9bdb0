"""Writes a module as C++: one function per layer kind, run by a team of threads, called from one entry point.

Every stage is a template call with constant dims or a generated loop; ``team.sync()`` separates dependent stages.
Intermediate values live in an arena whose offsets are a table, so one library serves every bucket. A node with no
CPU kernel (``aten``, or a group of them) calls back to the host from rank 0; ``Program.host_calls`` says what it runs.
"""

from compilerllm.ir.graph import Graph, Module, Node, Value, join_name, state_name
from compilerllm.ir.types import StepType, TensorType
from compilerllm.kernels.cpu.emitter import FunctionEmitter, Program, c_name, emitter
from compilerllm.kernels.cpu.refs import C_TYPES
from compilerllm.kernels.cpu.target import CpuTarget
from compilerllm.kernels.errors import UnsupportedByTarget
from compilerllm.kernels.groups import paged_windows


def find_tables(module: Module) -> set[Value]:
    """Values that come from ``rotary_table`` and go to rope alone, followed into the functions they are passed to.

    They are stored as rope kernels read them; a table that anything else reads is an ordinary tensor.
    """
    links = [pair for call, callee in module.calls() for pair in zip(call.inputs, callee.inputs, strict=True)]
    tables = {
        v for g in module.functions.values() for n in g.nodes if n.op == "rotary_table" for v in n.outputs
    }
    tables |= {inner for given, inner in links if given in tables}
    plain = {v for g in module.functions.values() for v in g.outputs}
    ropes = ("rope", "qkv_rope_write")
    for graph in module.functions.values():
        plain |= {v for n in graph.nodes if n.op not in (*ropes, "call") for v in n.operands}
    plain &= tables
    while (
        grown := {v for pair in links if not plain.isdisjoint(pair) for v in pair if v is not None}
        & tables - plain
    ):
        plain |= grown
    for graph in module.functions.values():
        for node in graph.nodes:
            if node.op in ropes and (both := [v for v in node.operands if v in plain]):
                raise UnsupportedByTarget(
                    f"@{graph.name}: {node!r} rotates by %{both[0].name}, which is used outside of rope as well; "
                    "compile with --optimization-level 0"
                )
    return tables - plain


@emitter("call")
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


def emit_program(module: Module, target: CpuTarget, timed: bool = False) -> Program:
    """The module as one C++ translation unit. Raises ``UnsupportedByTarget`` for an op no CPU kernel runs.

    timed: rank 0 also reads the clock after each stage; otherwise the same program, with the same slots and offsets.
    """
    main = module.main
    # The order is part of the ABI: T, S, R first where a step has them, then the rest by name.
    declared = {d.name for g in module.functions.values() for d in g.dims}
    program = Program(
        target.name, [d for d in ("T", "S", "R") if d in declared] + sorted(declared - {"T", "S", "R"}),
        timed=timed,
    )  # fmt: skip
    if timed:
        program.headers.add("stamp.h")
    windows, tables = paged_windows(module), find_tables(module)
    program.params += [p.name for p in main.params]
    program.states += [v.name for v in main.states]
    called = dict.fromkeys(callee.name for _, callee in module.calls())
    graphs = [*(module.functions[name] for name in called), main]
    parts = [FunctionEmitter(module, graph, program, windows, tables).emit() for graph in graphs]
    for value in main.inputs:
        if isinstance(value.type, TensorType):
            program.inputs.append((value.dtype, value.shape))
    program.outputs += [(v.dtype, v.shape) for v in main.outputs]
    program.source = _preamble(program) + "\n".join(parts) + _entry(program, main)
    return program


def _preamble(program: Program) -> str:
    headers = "".join(
        f'#include "{h}"\n' for h in ("team.h", "vec.h", *sorted(program.headers - {"team.h", "vec.h"}))
    )
    return f"""// Generated. Arguments: dims {", ".join(program.dims) or "none"}.
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
    begin = "  begin_stamps(team);\n" if program.timed else ""
    return f"""
static void entry(Team& team, void* arg) {{
  const Ctx& c = *(const Ctx*)arg;
{begin}\
  {c_name(main.name)}({call});
}}
CLLM_EXPORT void cllm_run(int threads, Ctx* c) {{ run_team(threads, entry, c); }}
"""
