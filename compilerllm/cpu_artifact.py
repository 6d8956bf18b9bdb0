"""The CPU part of an artifact: one library, a plan per bucket, what runs through the host."""

import dataclasses
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compilerllm.environment import cache_dir
from compilerllm.ir.step import Bucket
from compilerllm.kernels.cpu.target import CpuTarget

if TYPE_CHECKING:
    from collections.abc import Callable

    from compilerllm.ir.graph import Module
    from compilerllm.kernels.cpu.emitter import Program

INDUCTOR_LEVEL = 3  # from here on opaque operators are compiled ahead; it takes half a minute a group


def write_cpu(
    module: "Module", target: CpuTarget, buckets: tuple[Bucket, ...], level: int, folder: Path,
    stage: "Callable[[str], None]",
) -> "tuple[Module, dict[str, Any]]":  # fmt: skip
    """Generate, compile and save; gives the module with its weights' layouts, and the manifest's part."""
    from compilerllm.kernels.cpu.build import build_library
    from compilerllm.kernels.cpu.emit import emit_program
    from compilerllm.kernels.cpu.select import select_layouts

    stage("generate")
    module = select_layouts(module, target)
    program = emit_program(module, target)
    stage("compile")
    library = build_library(program.source, target, cache_dir() / "libraries")
    opaque = opaque_entries(program)
    if level >= INDUCTOR_LEVEL and opaque:
        stage("opaque")
        compile_opaque(program, opaque, target, folder)
    stage("save")
    (folder / "program.so").write_bytes(library.read_bytes())
    (folder / "program.cpp").write_text(program.source)
    manifest = program_entries(module, program, buckets) | {"opaque": opaque, "library": "program.so"}
    for call, entry in zip(manifest["program"]["host_calls"], opaque, strict=True):
        call["package"] = entry["package"]
    return module, manifest


def opaque_entries(program: "Program") -> list[dict[str, Any]]:
    """The manifest's report on host calls, in their order: what each runs, and by what (torch, unless compiled)."""
    return [
        {"where": call.where, "operators": [step[0] for step in call.steps], "runs": "aten", "package": None, "reason": ""}
        for call in program.host_calls
    ]  # fmt: skip


def compile_opaque(
    program: "Program", entries: list[dict[str, Any]], target: CpuTarget, folder: Path
) -> None:
    """Compile host calls into ``folder`` with Inductor, and note in ``entries`` what became of each."""
    from compilerllm.kernels.cpu.inductor import compile_host_calls

    names: dict[Path, str] = {}
    outcomes = compile_host_calls(program.host_calls, target, cache_dir() / "libraries")
    for entry, outcome in zip(entries, outcomes, strict=True):
        entry["reason"] = outcome.reason
        if outcome.package is not None:
            if outcome.package not in names:
                names[outcome.package] = f"group_{len(names)}.pt2"
                shutil.copyfile(outcome.package, folder / names[outcome.package])
            entry |= {"runs": "inductor", "package": names[outcome.package]}


def program_entries(module: "Module", program: "Program", buckets: tuple[Bucket, ...]) -> dict[str, Any]:
    """The manifest's part on the program: pointers, plans per bucket, states and their groups, kernels."""
    from compilerllm.kernels.cpu.build import kernel_key
    from compilerllm.kernels.groups import state_entries
    from compilerllm.planning import alias_table, plan_program

    aliases = alias_table(module)
    return {
        "program": {
            "dims": program.dims,
            "params": program.params,
            "states": program.states,
            "host_calls": [dataclasses.asdict(h) for h in program.host_calls],
            "plans": [plan_program(module, program, bucket, aliases) for bucket in buckets],
        },
        **state_entries(module),
        "kernels": [
            {
                "function": use.function,
                "node": use.node,
                "key": kernel_key(use.spec),
                **dataclasses.asdict(use.spec),
            }
            for use in program.kernels
        ],
    }
