"""The CUDA part of an artifact: a program of launches per bucket, its cubins, the states it needs."""

import json
import shutil
import time
from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compilerllm.environment import cache_dir
from compilerllm.ir.graph import Module
from compilerllm.ir.step import Bucket
from compilerllm.kernels.cutlass.instances import TARGET as CUTLASS_TARGET
from compilerllm.kernels.cutlass.instances import Instance
from compilerllm.kernels.cutlass.supply import NONE as NO_CUTLASS
from compilerllm.kernels.cutlass.supply import Supply
from compilerllm.kernels.groups import state_entries
from compilerllm.kernels.launch.gpu.program import samples_all
from compilerllm.kernels.triton.target import CudaTarget

if TYPE_CHECKING:
    from compilerllm.passes.pipeline import GraphPass, ModulePass
    from compilerllm.passes.report import PassReport

    OnRewrite = Callable[[Module, PassReport], None]

NORM_LINEAR_TOKENS = 64  # up to so many tokens a linear's kernel may norm its input itself
NORM_ROUTE_TOKENS = 8  # up to so many the norm, the router's product and the routing are one kernel
FEW_ROWS = 16  # to sample, of a step with prompts, unless it has many
# Tokens of steps with prompts. Finer than powers of two where padding would cost most.
MIXED_TOKENS = (16, 32, 64, 128, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384)
DECODE_SEQUENCES = (
    1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768, 896, 1024,
)  # fmt: skip


def cuda_buckets(max_num_seqs: int, max_tokens: int) -> tuple[Bucket, ...]:
    """Decode steps by sequences; steps with prompts by tokens, with few rows to sample and with many."""
    decode = [s for s in DECODE_SEQUENCES if s < max_num_seqs] + [max_num_seqs]
    tokens = [t for t in MIXED_TOKENS if t < max_tokens] + [max_tokens]
    mixed = []
    for t in tokens:
        most = min(t, max_num_seqs)
        few = min(FEW_ROWS, most)
        mixed += [Bucket(t, few, few, t)] + ([Bucket(t, most, most, t)] if most > few else [])
    return (*(Bucket(s, s, s, 1) for s in decode), *mixed)


def bucket_passes(bucket: Bucket) -> "list[ModulePass]":
    """The rewrites that pay at the bucket's size, in order: early gathers, norms inside small linears, whole decodes."""
    from compilerllm.passes.fuse_norm_linear import fuse_norm_linear
    from compilerllm.passes.fuse_norm_route import fuse_norm_route
    from compilerllm.passes.fuse_qkv_attention import fuse_qkv_attention
    from compilerllm.passes.gather_early import gather_early
    from compilerllm.passes.sample_every_token import sample_every_token

    passes: list[ModulePass] = []
    if bucket.max_query > 1:
        passes.append(_on_main(gather_early))
    elif samples_all(bucket):
        passes.append(sample_every_token)
    if bucket.tokens <= NORM_LINEAR_TOKENS:
        passes.append(_on_main(fuse_norm_linear))
    if bucket.tokens <= NORM_ROUTE_TOKENS:
        passes.append(_on_main(fuse_norm_route))
    if bucket.max_query == 1:
        passes.append(_on_main(fuse_qkv_attention))
    return passes


def _on_main(run: "GraphPass") -> "ModulePass":
    """A pass over one function, run over ``main``."""

    @wraps(run)
    def on_module(module: Module, report: "PassReport") -> Module:
        main = run(module.main, report)
        return module if main is module.main else module.with_functions(main)

    return on_module


def prepare_bucket(module: Module, bucket: Bucket, on_rewrite: "OnRewrite | None" = None) -> Module:
    """What the graph of one bucket has beyond the others'. ``on_rewrite`` is called after each pass with what it made."""
    from compilerllm.passes.report import PassReport

    for run in bucket_passes(bucket):
        report = PassReport(run.__name__, module.main.name)
        start = time.perf_counter()
        module = run(module, report)
        report.seconds = time.perf_counter() - start
        if on_rewrite is not None:
            on_rewrite(module, report)
    return module


def flat_module(module: Module, on_rewrite: "OnRewrite | None" = None) -> Module:
    """The module as CUDA programs are emitted from: calls inlined, routing fused."""
    from compilerllm.passes.fuse_route import fuse_route
    from compilerllm.passes.inline_calls import inline_calls
    from compilerllm.passes.report import PassReport

    for run in (inline_calls, fuse_route):
        report = PassReport(run.__name__)
        start = time.perf_counter()
        module = run(module, report)
        report.seconds = time.perf_counter() - start
        if on_rewrite is not None:
            on_rewrite(module, report)
    return module


def write_cuda(
    module: Module, target: CudaTarget, buckets: tuple[Bucket, ...], level: int, vocab: int, folder: Path,
    stage: Callable[[str], None], candidates: int = 1, rivals: int = 0,
) -> dict[str, Any]:  # fmt: skip
    """Emit every bucket, compile, save; gives the manifest's part. Raises ``KernelBuildError``, ``UnsupportedByTarget``.

    candidates: kernels to ship where no figure decides; rivals: where figures do, if steps are to be timed with each.
    """
    from compilerllm.kernels.cutlass.build import find_supply
    from compilerllm.kernels.triton.cutlass_calls import LEVEL as CUTLASS_LEVEL
    from compilerllm.kernels.triton.emit import build_program, cutlass_cache, draft_program
    from compilerllm.kernels.triton.emit_sampling import sampling_program
    from compilerllm.kernels.tuning import CHOICE_LEVEL, RivalChooser, TunedChooser

    stage("generate")
    flat = flat_module(module)
    most = candidates if level >= CHOICE_LEVEL else 1
    own = cache_dir() / "tuning"
    chooser = (
        RivalChooser.for_target(target, own, rivals) if rivals else TunedChooser.for_target(target, own, most)
    )
    kernels = cache_dir() / "kernels"
    uses_cutlass = level >= CUTLASS_LEVEL and target.name == CUTLASS_TARGET
    supply = find_supply(cutlass_cache(kernels)) if uses_cutlass else NO_CUTLASS
    draft = draft_program(flat, buckets, target, level, chooser, prepare_bucket, supply)
    stage("compile")
    built = build_program(draft, kernels, partial(_tell, stage))
    rows = tuple(sorted({b.rows for b in buckets}))
    sampling, more = sampling_program(vocab, rows, target, level, kernels)
    stage("save")
    (folder / "kernels").mkdir(exist_ok=True)
    for cubin in {c.key: c for c in (*built.cubins.values(), *more.values())}.values():
        shutil.copyfile(cubin.file, folder / "kernels" / f"{cubin.key}.cubin")
    if built.library is not None:
        shutil.copyfile(built.library, folder / built.library.name)
    for name, made in (("program", built.program), ("sampling", sampling)):
        (folder / f"{name}.json").write_text(json.dumps(made.to_json(), separators=(",", ":")))
    return {
        "program": "program.json",
        "sampling": "sampling.json",
        "features": [],
        "capability": target.capability,
        "peak_bandwidth": target.bandwidth,
        "peak_tflops": target.tflops,
        **state_entries(module),
        "picks": chooser.report(),
    } | ({"cutlass": _cutlass(draft.instances(), built.library, supply)} if uses_cutlass else {})


def _cutlass(instances: list[Instance], library: Path | None, supply: Supply) -> dict[str, Any]:
    """What the manifest says of CUTLASS: the instances that are called, what made them, or why there are none."""
    from compilerllm.kernels.cutlass.build import describe

    if library is None:
        return {"instances": [], "left_out": "" if supply.builds or supply.kept else supply.reason}
    return {
        "instances": [i.name for i in instances],
        "library": library.name,
        "tools": describe(library)["tools"],
        "left_out": "",
    }


def _tell(stage: Callable[[str], None], done: int, total: int) -> None:
    """Kernels compiled so far, as part of the stage's name."""
    if total:
        stage(f"compile {done}/{total}")
