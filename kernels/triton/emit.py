"""Whole programs: every bucket emitted, its memory planned, its kernels compiled."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from compilerllm.ir.graph import Module
from compilerllm.ir.step import Bucket
from compilerllm.kernels.groups import paged_windows
from compilerllm.kernels.launch.gpu.program import Argument, Kernel, Launch, Plan, Pointer, Program
from compilerllm.kernels.triton.build import Cubin, build_kernels
from compilerllm.kernels.triton.emitter import BucketEmitter, Call, Chooser, Emitted, Memory
from compilerllm.kernels.triton.prefetch import check_launches
from compilerllm.kernels.triton.source import KernelSource
from compilerllm.kernels.triton.target import CudaTarget

Prepare = Callable[[Module, Bucket], Module]


@dataclass(frozen=True)
class ProgramDraft:
    """All buckets emitted, nothing compiled yet."""

    target: CudaTarget
    buckets: tuple[Emitted, ...]

    def sources(self) -> list[KernelSource]:
        """Every kernel once, in the order of first use."""
        return list(dict.fromkeys(c.source for b in self.buckets for c in b.calls if c.source is not None))


def draft_program(
    module: Module,
    buckets: Sequence[Bucket],
    target: CudaTarget,
    level: int = 2,
    chooser: Chooser | None = None,
    prepare: Prepare = lambda module, bucket: module,
) -> ProgramDraft:
    """Emit every bucket of a flat module (``inline_calls``). ``prepare`` rewrites it for one bucket first."""
    windows = paged_windows(module)
    emitted = tuple(
        BucketEmitter(prepare(module, bucket), bucket, target, windows, level, chooser).emit()
        for bucket in buckets
    )
    return ProgramDraft(target, emitted)


def finish_program(draft: ProgramDraft, cubins: Mapping[KernelSource, Cubin] | None = None) -> Program:
    """The draft with memory planned and kernels numbered. Without ``cubins`` it can only be interpreted."""
    numbers: dict[tuple[KernelSource | None, str, tuple[str, ...], object], int] = {}
    kernels: list[Kernel] = []
    plans = []
    for emitted in draft.buckets:
        arena = place(list(emitted.memory.values()))
        launches = []
        for call in emitted.calls:
            key = (call.source, call.library, call.types, call.fixed)
            if key not in numbers:
                numbers[key] = len(kernels)
                kernels.append(_kernel(call, cubins))
            args = tuple(_fixed(a, emitted.memory) for a in call.args)
            launches.append(Launch(numbers[key], call.grid, args, call.label, call.cost))
        check_launches(launches, kernels)
        plans.append(Plan(emitted.bucket, arena, tuple(launches)))
    return Program(tuple(kernels), tuple(plans), max((b.counters for b in draft.buckets), default=0))


def build_program(
    draft: ProgramDraft, cache: Path, on_progress: Callable[[int, int], None] = lambda done, total: None
) -> tuple[Program, dict[KernelSource, Cubin]]:
    """Compile the draft's kernels through the cache, and finish it. Raises ``KernelBuildError``."""
    cubins = build_kernels(draft.sources(), draft.target, cache, on_progress)
    return finish_program(draft, cubins), cubins


def _kernel(call: Call, cubins: Mapping[KernelSource, Cubin] | None) -> Kernel:
    source = call.source
    if source is None:
        return Kernel("", "", f"library:{call.library}", call.types, constexprs=call.fixed)
    if cubins is None:
        return Kernel("", "", source.template, call.types, source.num_warps, 0, source.pdl, source.constexprs)
    cubin = cubins[source]
    return Kernel(
        cubin.name,
        cubin.key,
        source.template,
        call.types,
        cubin.num_warps,
        cubin.shared,
        source.pdl,
        source.constexprs,
    )


def _fixed(arg: Argument, memory: Mapping[str, Memory]) -> Argument:
    if isinstance(arg, Pointer) and arg.space == "arena":
        return replace(arg, name="", offset=memory[arg.name].offset + arg.offset)
    return arg


def place(pieces: list[Memory]) -> int:
    """Give every piece an offset so that pieces needed at the same time never share bytes; gives the arena's bytes.

    Largest first, each into the lowest gap among those it meets.
    """
    placed: list[Memory] = []
    total = 0
    for piece in sorted(pieces, key=lambda p: (-p.bytes, p.first)):
        busy = sorted(
            (p for p in placed if p.first <= piece.last and piece.first <= p.last), key=lambda p: p.offset
        )
        at = 0
        for other in busy:
            if other.offset - at >= piece.bytes:
                break
            at = max(at, other.offset + other.bytes)
        piece.offset = at
        total = max(total, at + piece.bytes)
        placed.append(piece)
    return total
