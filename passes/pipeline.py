"""The one list of passes, in the order they run, and what runs it.

A level takes the passes marked with it or with a lower one. O0 has only what serving cannot do without; O1 has every
rewrite; O2 and O3 differ in what follows the passes (kernels, graphs, measured choices), not in the graph.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from compilerllm.ir.graph import Graph, Module
from compilerllm.ir.text import print_module
from compilerllm.ir.verify import verify
from compilerllm.passes.add_adapters import AdapterOptions, add_adapters
from compilerllm.passes.canonicalise import canonicalise
from compilerllm.passes.deduplicate import deduplicate
from compilerllm.passes.drop_batch import drop_batch
from compilerllm.passes.errors import UnknownPass
from compilerllm.passes.float_logits import float_logits
from compilerllm.passes.fold_scale import fold_scale
from compilerllm.passes.fuse_add_norm import fuse_add_norm
from compilerllm.passes.fuse_gated import fuse_gated
from compilerllm.passes.fuse_linear_act import fuse_linear_act
from compilerllm.passes.fuse_linear_add import fuse_linear_add
from compilerllm.passes.fuse_pointwise import fuse_pointwise
from compilerllm.passes.fuse_qkv import fuse_qkv
from compilerllm.passes.gather_rows import gather_rows
from compilerllm.passes.group_opaque import group_opaque
from compilerllm.passes.pack_projections import pack_projections
from compilerllm.passes.page_attention import page_attention
from compilerllm.passes.raise_gated_act import raise_gated_act
from compilerllm.passes.raise_partial_rope import raise_partial_rope
from compilerllm.passes.raise_softcap import raise_softcap
from compilerllm.passes.report import PassReport
from compilerllm.passes.rotate_boundary import rotate_boundary
from compilerllm.passes.segment_attention import segment_attention
from compilerllm.passes.shard import Mesh, shard
from compilerllm.passes.split_heads import split_heads

LEVELS = (0, 1, 2, 3)
GraphPass = Callable[[Graph, PassReport], Graph]
ModulePass = Callable[[Module, PassReport], Module]


@dataclass(frozen=True)
class Options:
    """How to run the pipeline.

    level: 0 to 3. target: the machine's name (no pass depends on it yet; kernels do). serve: False for a module that
    is no language model (``torch.compile``): the serve phase is left out. skip: names of passes to leave out, to
    bisect. verify: check the module after every pass. dump_ir: a folder for one numbered file a pass that changed
    something. mesh: this rank's place among tensor-parallel ranks. adapters: slots for low-rank adapters. stateless: every
    step has whole sequences, so that nothing is kept from one to the next.
    """

    level: int = 2
    target: str = "cpu"
    serve: bool = True
    skip: frozenset[str] = frozenset()
    verify: bool = False
    dump_ir: Path | None = None
    mesh: Mesh | None = None
    adapters: AdapterOptions | None = None
    stateless: bool = False


@dataclass(frozen=True)
class Pass:
    """One entry of the list. ``on_graph`` runs once for each function, ``on_module`` once."""

    name: str
    phase: str
    meaning: str
    level: int = 1
    on_graph: GraphPass | None = None
    on_module: Callable[[Module, PassReport, Options], Module] | None = None
    wanted: Callable[[Options], bool] = field(default=lambda options: True)

    def run(self, module: Module, options: Options) -> tuple[Module, list[PassReport]]:
        """The module after the pass (the same object if nothing changed) and a report for each function."""
        if self.on_module is not None:
            report = PassReport(self.name)
            start = time.perf_counter()
            module = self.on_module(module, report, options)
            report.seconds = time.perf_counter() - start
            return module, [report]
        assert self.on_graph is not None
        changed, reports = [], []
        for name, graph in module.functions.items():
            report = PassReport(self.name, name)
            start = time.perf_counter()
            new = self.on_graph(graph, report)
            report.seconds = time.perf_counter() - start
            reports.append(report)
            if new is not graph:
                changed.append(new)
        return (module.with_functions(*changed) if changed else module), reports


def _graph(run: GraphPass, phase: str, meaning: str, level: int = 1) -> Pass:
    return Pass(run.__name__, phase, meaning, level, on_graph=run)


def _module(run: ModulePass, phase: str, meaning: str, level: int = 1) -> Pass:
    return Pass(run.__name__, phase, meaning, level, on_module=lambda module, report, _: run(module, report))


PASSES: tuple[Pass, ...] = (
    # raise: find again what the model's code spelled out
    _graph(canonicalise, "raise", "one spelling for equal graphs: no identities, merged and sunk reshapes and permutes"),
    _graph(deduplicate, "raise", "compute equal expressions once, drop dead code"),
    _graph(raise_gated_act, "raise", "mul(act(gate), up) -> gated_act"),
    _graph(raise_softcap, "raise", "mul(tanh(div(x))) -> softcap"),
    _graph(raise_partial_rope, "raise", "rope over the first columns and a concat -> rope"),
    _graph(fold_scale, "raise", "constant factors folded where exact"),
    # serve: from one sequence to a step of many
    _graph(drop_batch, "serve", "[1, T, ...] -> [T, ...]", level=0),
    _graph(canonicalise, "serve", "what the batch axis hid", level=0),
    Pass(
        "segment_attention", "serve", "attention -> varlen_attention over a step of whole sequences", 0,
        on_module=lambda module, report, _: segment_attention(module, report),
        wanted=lambda options: options.stateless,
    ),
    _module(page_attention, "serve", "attention -> kv_write and paged_attention over states", level=0),
    _module(rotate_boundary, "serve", "a layer's last add moves to the next layer's start"),
    _graph(gather_rows, "serve", "final norm and lm_head for sampled rows only", level=0),
    _graph(float_logits, "serve", "logits leave in f32", level=0),
    # parallel, adapters: edits of recipes and what follows from them
    Pass(
        "shard", "parallel", "split linears and heads over ranks, all_reduce where they meet", 0,
        on_module=lambda module, report, options: shard(module, options.mesh, report) if options.mesh else module,
        wanted=lambda options: options.mesh is not None,
    ),
    Pass(
        "add_adapters", "adapters", "low-rank updates by slot on chosen linears", 0,
        on_module=lambda module, report, options: (
            add_adapters(module, options.adapters, report) if options.adapters else module
        ),
        wanted=lambda options: options.adapters is not None,
    ),
    # fuse: fewer, larger nodes with the same roundings
    _graph(deduplicate, "fuse", "compute equal expressions once, drop dead code"),
    _graph(split_heads, "fuse", "rows of a packed qkv in the order q, k, v"),
    _graph(pack_projections, "fuse", "linears of one input -> one linear with a concat recipe"),
    _graph(fuse_add_norm, "fuse", "add and the norm after it -> one node with both results"),
    _graph(fuse_gated, "fuse", "packed linear and gated_act -> linear_gated"),
    _graph(fuse_linear_act, "fuse", "linear and its activation -> linear_act"),
    _graph(fuse_linear_add, "fuse", "linear and a residual add -> linear_add"),
    _graph(fuse_qkv, "fuse", "split, qk-norm, rope and kv_write of a packed qkv -> qkv_rope_write"),
    _graph(canonicalise, "fuse", "what fusing left behind"),
    _module(group_opaque, "fuse", "torch operators without a kernel, in a row -> group, one call of the host"),
    _module(fuse_pointwise, "fuse", "pointwise neighbours, with at most one row reduction -> group"),
)  # fmt: skip
_NOT_FOR_TENSORS = frozenset(("serve", "parallel", "adapters"))

OnPass = Callable[[Pass, Module, list[PassReport]], None]


def run_pipeline(
    module: Module,
    options: Options | None = None,
    on_pass: OnPass | None = None,
    passes: Sequence[Pass] | None = None,
) -> tuple[Module, list[PassReport]]:
    """Run the passes of ``options.level``, or ``passes``, in order; ``on_pass`` is called after each with what it made.

    Raises ``UnknownPass`` for a wrong level or a name in ``skip``, and what a pass refuses with (``NotServable`` ...).
    """
    options = options or Options()
    reports: list[PassReport] = []
    number = 0
    if options.dump_ir is not None:
        options.dump_ir.mkdir(parents=True, exist_ok=True)
        _dump(options.dump_ir, 0, "input", module)
    for entry in passes_for(options) if passes is None else passes:
        new, found = entry.run(module, options)
        reports += found
        if new is not module:
            number += 1
            if options.dump_ir is not None:
                _dump(options.dump_ir, number, entry.name, new)
            if options.verify:
                verify(new)
        module = new
        if on_pass is not None:
            on_pass(entry, module, found)
    return module, reports


def passes_for(options: Options) -> list[Pass]:
    """The passes that ``run_pipeline`` runs, in order."""
    if options.level not in LEVELS:
        raise UnknownPass(
            f"level {options.level} does not exist; the levels are {', '.join(map(str, LEVELS))}"
        )
    if unknown := sorted(options.skip - pass_names()):
        raise UnknownPass(f"there is no pass {unknown[0]!r}; there are {', '.join(sorted(pass_names()))}")
    return [
        p for p in PASSES
        if p.level <= options.level and p.name not in options.skip and p.wanted(options)
        and (options.serve or p.phase not in _NOT_FOR_TENSORS)
    ]  # fmt: skip


def pass_names() -> frozenset[str]:
    return frozenset(p.name for p in PASSES)


def find_pass(name: str) -> Pass:
    """The pass called ``name`` (for ``opt --passes`` and tests). Raises ``UnknownPass``."""
    for entry in PASSES:
        if entry.name == name:
            return entry
    raise UnknownPass(f"there is no pass {name!r}; there are {', '.join(sorted(pass_names()))}")


def summary(reports: list[PassReport]) -> Mapping[str, tuple[int, int, float]]:
    """Per pass name: matches, near misses, seconds, over all functions and runs."""
    result: dict[str, tuple[int, int, float]] = {}
    for report in reports:
        matches, misses, seconds = result.get(report.name, (0, 0, 0.0))
        result[report.name] = (
            matches + report.matches,
            misses + len(report.near_misses),
            seconds + report.seconds,
        )
    return result


def _dump(folder: Path, number: int, name: str, module: Module) -> None:
    (folder / f"{number:02d}_{name}.ir").write_text(print_module(module, origins=True))


__all__ = ["PASSES", "Options", "Pass", "find_pass", "pass_names", "passes_for", "run_pipeline", "summary"]
