"""Makes the report of an artifact: passes run again, every kernel of every bucket with its nodes, choice and cost."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from compilerllm.artifact import ArtifactInvalid, cutlass_line, read_log, read_manifest
from compilerllm.environment import cache_dir
from compilerllm.explain.cpu import CpuBuckets, host_calls
from compilerllm.explain.cuda import CudaBuckets
from compilerllm.explain.machine import cpu_machine, cuda_machine
from compilerllm.explain.report import BucketReport, IRNode, Kernel, Machine, Pick, Report
from compilerllm.explain.steps import Chosen, Step, choose_buckets, find_bucket
from compilerllm.explain.trace import Trace
from compilerllm.ir.graph import Module
from compilerllm.ir.step import Bucket
from compilerllm.ir.text import parse_module
from compilerllm.kernels.triton.target import find_cuda_target
from compilerllm.passes.pipeline import Options
from compilerllm.targets import is_cuda

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Look:
    """What to look at: buckets by name (all without any), the context of each sequence, or one step of one's own.

    bandwidth (GB/s) and tflops: of the machine, in place of what is known of the target or measured here.
    """

    buckets: tuple[str, ...] = ()
    context: int | None = None
    step: Step | None = None
    bandwidth: float | None = None
    tflops: float | None = None


@dataclass(frozen=True)
class Collected:
    """A report without times, and what measuring needs: the buckets it has, in order, sampling's left out."""

    report: Report
    chosen: tuple[Chosen, ...]


def collect(
    folder: Path, name: str, look: Look, on_progress: Progress = lambda done, total: None
) -> Collected:
    """The report of the artifact in ``folder``; ``name`` is the model's. Raises ``ArtifactInvalid``, ``UnknownBucket``."""
    manifest = read_manifest(folder)
    if manifest is None:
        raise ArtifactInvalid(
            f"{folder} holds no finished artifact. Build it with `compilerllm build MODEL --output DIR`."
        )
    trace = Trace()
    module = _rerun(folder, manifest, trace)
    buckets = [Bucket(**b) for b in manifest["buckets"]]
    longest = int(manifest["max_model_len"])
    if manifest["program"] is None:
        return Collected(_reference_report(name, manifest, folder, trace, look), ())
    nodes: Sequence[IRNode]
    kernels: Sequence[Kernel]
    picks: Sequence[Pick] = ()
    made: list[BucketReport]
    if is_cuda(manifest["target"]):
        target, own = find_cuda_target(manifest["target"]), cache_dir() / "tuning"
        machine = cuda_machine(target, own, look.bandwidth, look.tflops)
        cuda = CudaBuckets(module, trace, folder, manifest, target, own)
        chosen = _choose(buckets, look, longest, (*cuda.sampling_names(), "sampling"))
        cuda.prepare(buckets)
        made = cuda.report(chosen, machine, on_progress)
        joined = tuple(b.sampling for b in made if b.sampling)
        if not look.buckets and look.step is None:
            made += cuda.report_sampling((), machine)
        elif wanted := (*look.buckets, *joined):
            made += cuda.report_sampling(wanted, machine)
        nodes, kernels, picks = cuda.nodes.entries, cuda.kernels.entries, cuda.picks.entries
    else:
        chosen = _choose(buckets, look, longest, ())
        machine = cpu_machine(folder / manifest["library"], manifest, look.bandwidth, look.tflops)
        cpu = CpuBuckets(module, trace, manifest)
        _same_module(folder, trace.texts[trace.text(cpu.module)])
        made = cpu.report(chosen, machine)
        nodes, kernels = cpu.nodes.entries, cpu.kernels.entries
    report = _report(name, manifest, folder, machine, trace, nodes, kernels, picks, made)
    if left := sum(p.why == "left open" for p in picks):
        note = f"{left} choices are left to the machine that serves: what stands here is the default of each"
        report = replace(report, notes=(*report.notes, note))
    return Collected(report, tuple(chosen))


def _choose(buckets: Sequence[Bucket], look: Look, longest: int, sampling: Sequence[str]) -> list[Chosen]:
    if look.step is not None:
        return [find_bucket(buckets, look.step)]
    return choose_buckets(buckets, look.buckets, look.context, longest, sampling)


def _rerun(folder: Path, manifest: dict[str, Any], trace: Trace) -> Module:
    """The pipeline once more, from the captured module. Raises ``ArtifactInvalid`` where it makes something else."""
    path = folder / "captured.ir"
    try:
        captured = parse_module(path.read_text(), str(path))
    except OSError as error:
        raise ArtifactInvalid(
            f"{path} cannot be read ({error.strerror or error}). Build the artifact again."
        ) from error
    skip = manifest["key"]["fields"].get("passes.skip") or ()
    options = Options(level=manifest["level"], target=manifest["target"], skip=frozenset(skip))
    module = trace.pipeline(captured, options)
    if is_cuda(manifest["target"]) or manifest["program"] is None:
        _same_module(folder, trace.texts[trace.text(module)])
    return module


def _same_module(folder: Path, text: str) -> None:
    """Raises ``ArtifactInvalid`` where the artifact's module is not what the passes of this version make."""
    if (folder / "module.ir").read_text() != text:
        raise ArtifactInvalid(
            f"the passes of this version make another module than {folder} has, so that they cannot explain it. Build the "
            "artifact again, or explain it with the version that built it."
        )


def _report(
    name: str, manifest: dict[str, Any], folder: Path, machine: Machine, trace: Trace, nodes: Sequence[IRNode],
    kernels: Sequence[Kernel], picks: Sequence[Pick], buckets: Sequence[BucketReport],
) -> Report:  # fmt: skip
    facts = manifest["facts"]
    notes = [f"host call in {call}" for call in host_calls(manifest)]
    if line := cutlass_line(manifest):
        notes.append(f"CUTLASS: {line}")
    seconds = {k: float(v) for k, v in read_log(folder).get("seconds", {}).items()}
    return Report(
        name, str(manifest["id"]), str(manifest["version"]), int(manifest["level"]), str(facts["dtype"]),
        int(facts["num_layers"]), machine, tuple(trace.texts), tuple(trace.runs), tuple(nodes), tuple(kernels),
        tuple(picks), tuple(buckets), tuple(notes), seconds,
    )  # fmt: skip


def _reference_report(name: str, manifest: dict[str, Any], folder: Path, trace: Trace, look: Look) -> Report:
    machine = Machine(manifest["target"], "", look.bandwidth or 0.0, look.tflops or 0.0, 0.0, "not known")
    report = _report(name, manifest, folder, machine, trace, (), (), (), ())
    note = "level 0 has no kernels: every node runs as its ATen reference, one after another"
    return replace(report, notes=(note, *report.notes))
