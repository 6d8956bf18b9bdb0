"""Offsets of a program's values in each bucket's arena."""

from collections.abc import Mapping
from typing import Any

from compilerllm.ir.dims import Dim, substitute
from compilerllm.ir.graph import Module, Value
from compilerllm.ir.step import Bucket
from compilerllm.kernels.cpu.emitter import Program
from compilerllm.kernels.launch.memory import aligned
from compilerllm.kernels.refs import view_roots
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


def plan_program(
    module: Module,
    program: Program,
    bucket: Bucket,
    aliases: dict[Value, Value],
    exact: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    """The manifest's plan of one bucket: arena bytes, an offset for each of the program's slots, its scratch after them.

    ``exact`` gives dims beside the bucket's; the functions must declare them with no higher bound.

    A layer function's frame has one place for all its calls: behind whatever ``main`` keeps alive at any of them.
    """
    # The program writes main's results to the caller's memory: the arena keeps none for them (logits are the largest).
    given = module.main.inputs[:1]
    made = {v for node in module.main.nodes for v in node.outputs}
    outside = {v: given[0] for v in module.main.outputs if given and v in made and v not in aliases}
    plan = plan_memory(module, bucket, aliases | outside)
    main = plan.frames["main"]
    base = {"main": 0}
    end = main.bytes
    for call, start in main.call_base.items():
        base[call.fn] = max(base.get(call.fn, 0), start)
    for function, start in base.items():
        end = max(end, start + plan.frames[function].bytes)
    dims = bucket_dims(bucket) | dict(exact or {})
    end = aligned(end)

    def reserve(size: Dim) -> int:
        nonlocal end
        start = end
        end += aligned(int(substitute(size, dims)))
        return start

    offsets = []
    for function, value in program.slots:
        slot = plan.frames[function].slots.get(value)
        offsets.append(reserve(value.tensor.nbytes) if slot is None else base[function] + slot.offset)
    scratch = [reserve(size) for size in program.scratch]
    return {"arena_bytes": end, "offsets": offsets, "scratch": scratch}
