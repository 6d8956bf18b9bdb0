"""Whole programs: every bucket emitted, its memory planned, its kernels compiled."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from compilerllm.ir.graph import Module
from compilerllm.ir.step import Bucket
from compilerllm.kernels.cutlass.build import provide_library
from compilerllm.kernels.cutlass.instances import TEMPLATES, Instance, of_spec
from compilerllm.kernels.cutlass.supply import NONE as NO_CUTLASS
from compilerllm.kernels.cutlass.supply import Supply
from compilerllm.kernels.groups import paged_windows
from compilerllm.kernels.launch.gpu.program import Argument, Choice, Kernel, Launch, Plan, Pointer, Program
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

    def instances(self) -> list[Instance]:
        """Every CUTLASS instance once, by name."""
        calls = [c for b in self.buckets for c in b.calls if f"library:{c.library}" in TEMPLATES]
        return sorted({of_spec(c.spec) for c in calls}, key=lambda i: i.name)


def draft_program(
    module: Module,
    buckets: Sequence[Bucket],
    target: CudaTarget,
    level: int = 2,
    chooser: Chooser | None = None,
    prepare: Prepare = lambda module, bucket: module,
    cutlass: Supply = NO_CUTLASS,
) -> ProgramDraft:
    """Emit every bucket of a flat module (``inline_calls``). ``prepare`` rewrites it for one bucket first.

    cutlass: the instances that calls may be of.
    """
    windows = paged_windows(module)
    emitted = tuple(
        BucketEmitter(prepare(module, bucket), bucket, target, windows, level, chooser, cutlass).emit()
        for bucket in buckets
    )
    return ProgramDraft(target, emitted)


def finish_program(
    draft: ProgramDraft, cubins: Mapping[KernelSource, Cubin] | None = None, library: str = ""
) -> Program:
    """The draft with memory planned and kernels numbered. Without ``cubins`` it can only be interpreted.

    library: the name, without its suffix, of that of the CUTLASS instances.
    """
    numbers: dict[tuple[KernelSource | None, str, tuple[str, ...], object], int] = {}
    kernels: list[Kernel] = []
    plans = []
    choices: list[Choice] = []  # equal ones of several buckets are one
    for emitted in draft.buckets:
        for choice in emitted.choices:
            if choice not in choices:
                choices.append(choice)
        numbered = [choices.index(c) for c in emitted.choices]
        arena = place(list(emitted.memory.values()))
        launches = []
        for call in emitted.calls:
            key = (call.source, call.library, call.types, call.fixed)
            if key not in numbers:
                numbers[key] = len(kernels)
                kernels.append(_kernel(call, cubins, library))
            args = tuple(_fixed(a, emitted.memory) for a in call.args)
            pick = None if call.pick is None else (numbered[call.pick[0]], call.pick[1])
            launches.append(Launch(numbers[key], call.grid, args, call.label, call.cost, pick))
        check_launches(launches, kernels)
        plans.append(Plan(emitted.bucket, arena, tuple(launches)))
    counters = max((b.counters for b in draft.buckets), default=0)
    return Program(tuple(kernels), tuple(plans), counters, choices=tuple(choices))


@dataclass(frozen=True)
class Built:
    """A program and the files it wants in its artifact. library: of CUTLASS instances, None where none is called."""

    program: Program
    cubins: Mapping[KernelSource, Cubin]
    library: Path | None


def build_program(
    draft: ProgramDraft, cache: Path, on_progress: Callable[[int, int], None] = lambda done, total: None
) -> Built:
    """Compile the draft's kernels through the cache, and finish it. Raises ``KernelBuildError``, ``BuildFailed``."""
    sources, instances = draft.sources(), draft.instances()
    total = len(sources) + len(instances)
    cubins = build_kernels(sources, draft.target, cache, lambda done, _: on_progress(done, total))
    library = None
    if instances:
        library = provide_library(
            instances, cutlass_cache(cache), lambda done, _, name: on_progress(len(sources) + done, total)
        )
    return Built(finish_program(draft, cubins, library.stem if library else ""), cubins, library)


def cutlass_cache(cache: Path) -> Path:
    """Where CUTLASS objects and libraries lie in a cache of kernels."""
    return cache / "cutlass"


def _kernel(call: Call, cubins: Mapping[KernelSource, Cubin] | None, library: str) -> Kernel:
    source = call.source
    if source is None:
        template = f"library:{call.library}"
        fixed = (*call.fixed, ("library", library)) if template in TEMPLATES else call.fixed
        return Kernel("", "", template, call.types, constexprs=fixed)
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
        cubin.early,
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
