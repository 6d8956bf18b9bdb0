"""Offsets of a program's values in each bucket's arena."""

from typing import Any

from compilerllm.ir.dims import Dim, substitute
from compilerllm.ir.graph import Module, Value
from compilerllm.ir.step import Bucket
from compilerllm.kernels.cpu.emit import Program
from compilerllm.kernels.cpu.refs import view_roots
from compilerllm.kernels.launch.memory import aligned
from compilerllm.passes.plan_memory import plan_memory


def bucket_dims(bucket: Bucket) -> dict[str, Dim]:
    """A bucket's bounds as dimension values."""
    return {"T": bucket.tokens, "S": bucket.sequences, "R": bucket.rows}


def alias_table(module: Module) -> dict[Value, Value]:
    """For every result that is a view, in any function, the value whose memory it shares."""
    table: dict[Value, Value] = {}
    for graph in module.functions.values():
        table |= view_roots(graph)
    return table


def plan_program(module: Module, program: Program, bucket: Bucket, aliases: dict[Value, Value]) -> dict[str, Any]:
    """The manifest's plan of one bucket: arena bytes, an offset for each of the program's slots, its scratch after them."""
    plan = plan_memory(module, bucket, aliases)
    dims = bucket_dims(bucket)
    end = aligned(plan.total_bytes)
    scratch = []
    for size in program.scratch:
        scratch.append(end)
        end += aligned(int(substitute(size, dims)))
    offsets = [plan.offset(function, value) for function, value in program.slots]
    return {"arena_bytes": end, "offsets": offsets, "scratch": scratch}
