"""The model under suspicion: its graph before any pass, its final graph, its weights, and how its program is run."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compilerllm.bisect.cpu_nodes import CpuNodes
from compilerllm.bisect.cuda_nodes import CudaNodes, OneChoice
from compilerllm.bisect.evaluate import number
from compilerllm.bisect.nodes import NodeRunner
from compilerllm.bisect.parameters import Parameters
from compilerllm.bisect.passes import Stage
from compilerllm.bisect.plan import Overlap, cpu_overlaps
from compilerllm.bisect.workload import Workload
from compilerllm.cuda_artifact import cuda_buckets, flat_module, prepare_bucket
from compilerllm.environment import cache_dir, num_threads
from compilerllm.ir.graph import Module
from compilerllm.ir.step import Bucket
from compilerllm.kernels.cpu.emit import emit_program
from compilerllm.kernels.cpu.target import find_target
from compilerllm.kernels.launch.gpu.backend import Backend
from compilerllm.kernels.launch.memory import aligned
from compilerllm.kernels.launch.program import CpuProgram
from compilerllm.kernels.triton.emitter import Chooser
from compilerllm.kernels.triton.target import find_cuda_target
from compilerllm.kernels.tuning import TunedChooser
from compilerllm.passes.pipeline import Options, Pass, run_pipeline
from compilerllm.passes.report import PassReport
from compilerllm.targets import is_cuda


@dataclass(frozen=True, eq=False)
class Subject:
    """captured: before any pass. final: after all of them, as the artifact has it. options: of the pipeline that made it.

    manifest, folder: the artifact's; without an artifact (a GPU's program that is interpreted) they are empty.
    """

    name: str
    captured: Module
    final: Module
    params: Parameters
    options: Options
    dtype: str
    vocab: int
    max_len: int
    max_num_seqs: int = 256
    max_tokens: int = 2048
    manifest: Mapping[str, Any] | None = None
    folder: Path | None = None
    place: Path | None = None

    @property
    def on_gpu(self) -> bool:
        return is_cuda(self.options.target)


class Program:
    """What executes a subject: the artifact's program as it is served, and its kernels node by node."""

    ran_as = ""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject

    def run(self, work: Workload) -> list[Tensor]:
        """Logits of every step, of the program as it is."""
        raise NotImplementedError

    def nodes(self) -> NodeRunner:
        """Its kernels one by one."""
        raise NotImplementedError

    def run_apart(self, work: Workload) -> list[Tensor] | None:
        """Logits with an arena in which no bytes are used twice; None where the nodes' run shows the same."""
        return None

    def overlaps(self) -> list[Overlap]:
        """Faults found in its memory plans."""
        return []

    def bucket_stages(self, final: Module, work: Workload) -> list[Stage]:
        """What becomes of the final module after the pipeline, for the buckets that the workload needs."""
        return []


class ReferenceProgram(Program):
    """Level O0: the final module is what runs."""

    ran_as = "torch operators"

    def run(self, work: Workload) -> list[Tensor]:
        from compilerllm.bisect.passes import run_stage

        return list(run_stage(Stage("", self.subject.final), self.subject.params, work))


class CpuArtifact(Program):
    """An artifact for a CPU."""

    def __init__(self, subject: Subject) -> None:
        super().__init__(subject)
        assert subject.manifest is not None and subject.folder is not None
        self.threads = num_threads()
        self.target = find_target(subject.options.target)
        self.ran_as = f"{self.threads} threads"
        self.manifest = subject.manifest
        self.buckets = [Bucket(**b) for b in subject.manifest["buckets"]]
        self.emitted = emit_program(subject.final, self.target)

    def run(self, work: Workload) -> list[Tensor]:
        return self._run(work, self.manifest["program"], None)

    def run_apart(self, work: Workload) -> list[Tensor]:
        return self._run(work, self.manifest["program"], "apart")

    def run_alone(self, work: Workload) -> list[Tensor]:
        """With one thread."""
        return self._run(work, self.manifest["program"], None, threads=1)

    def _run(
        self, work: Workload, spec: Mapping[str, Any], plan: str | None, threads: int | None = None
    ) -> list[Tensor]:
        from compilerllm.compiled import CompiledModel

        subject = self.subject
        assert subject.folder is not None
        model = CompiledModel.load(subject.folder, subject.params.source, threads=threads or self.threads)
        if plan is not None:
            apart = dict(spec) | {"plans": [self._apart(bucket) for bucket in self.buckets]}
            model.program = CpuProgram(model.library, apart, self.threads, subject.folder)
        model.allocate(work.num_blocks, max(len(work.sequences), 1))
        result = []
        for step in work.steps(len(model.groups)):
            model.forward(step)
            result.append(torch.from_numpy(model.logits().copy()))
        return result

    def _apart(self, bucket: Bucket) -> dict[str, Any]:
        """A plan in which every value has bytes of its own. Small buckets: pages are touched only when written."""
        dims = {"T": bucket.tokens, "S": bucket.sequences, "R": bucket.rows}
        end = 0
        places: dict[str, list[int]] = {"offsets": [], "scratch": []}
        sizes = [("offsets", v.tensor.nbytes) for _, v in self.emitted.slots]
        for kind, size in [*sizes, *(("scratch", s) for s in self.emitted.scratch)]:
            places[kind].append(end)
            end += aligned(number(size, dims))
        return {"arena_bytes": end, **places}

    def nodes(self) -> CpuNodes:
        s = self.subject
        return CpuNodes(s.final, s.params, self.target, cache_dir() / "libraries", self.threads)

    def overlaps(self) -> list[Overlap]:
        plans = self.manifest["program"]["plans"]
        found = [
            o for plan, bucket in zip(plans, self.buckets, strict=True)
            for o in cpu_overlaps(self.subject.final, self.emitted, plan, bucket)
        ]  # fmt: skip
        return list(dict.fromkeys(found))


class CudaProgram(Program):
    """A GPU's program, emitted here: interpreted without a GPU, native with one."""

    def __init__(
        self,
        subject: Subject,
        backend: Backend,
        *,
        native: bool,
        scratch: Path,
        chooser: Chooser | None = None,
    ) -> None:
        super().__init__(subject)
        self.backend, self.native, self.scratch = backend, native, scratch
        self.target = find_cuda_target(subject.options.target)
        self.ran_as = "on the GPU" if native else "kernels interpreted on the CPU"
        self.buckets = cuda_buckets(subject.max_num_seqs, subject.max_tokens)
        self._chooser = chooser
        self._shared: CudaNodes | None = None

    def chooser(self, forced: Mapping[tuple[str, str], Mapping[str, Any]] | None = None) -> OneChoice:
        base = self._chooser or TunedChooser.for_target(self.target, cache_dir() / "tuning")
        return OneChoice(base, forced)

    def make(
        self, shares: bool, forced: Mapping[tuple[str, str], Mapping[str, Any]] | None = None
    ) -> CudaNodes:
        s = self.subject
        cache = cache_dir() / "kernels" if self.native else None
        return CudaNodes(
            s.final, s.params, self.target, s.options.level, self.buckets, self.backend, self.chooser(forced),
            self.scratch, shares=shares, cache=cache,
        )  # fmt: skip

    def run(self, work: Workload) -> list[Tensor]:
        self._shared = self.make(shares=True)
        return self._shared.run_whole(work)

    def nodes(self) -> CudaNodes:
        return self.make(shares=False)

    def overlaps(self) -> list[Overlap]:
        return list(dict.fromkeys(self._shared.overlaps())) if self._shared is not None else []

    def bucket_stages(self, final: Module, work: Workload) -> list[Stage]:
        stages: list[Stage] = []
        flat = flat_module(final, lambda module, report: stages.append(Stage(report.name, module)))
        probe = self._shared or self.make(shares=True)
        buckets = list(dict.fromkeys(probe.buckets_of(work)))
        decode = [b for b in buckets if b.max_query == 1]
        mixed = [b for b in buckets if b.max_query > 1]
        plain = flat

        def note(module: Module, report: PassReport) -> None:
            nonlocal plain
            plain = module
            stages.append(Stage(report.name, module, flat))

        if mixed:
            prepare_bucket(flat, mixed[-1], note)
        for bucket in decode[:1]:
            prepare_bucket(flat, bucket, lambda m, r: stages.append(Stage(r.name, plain, m)))
        return stages


def pipeline_stages(subject: Subject, options: Options | None = None) -> list[Stage]:
    """The module before any pass, and after each that changed something."""
    stages = [Stage("capture", subject.captured)]

    def note(entry: Pass, module: Module, reports: list[PassReport]) -> None:
        del reports
        if module is not stages[-1].module:
            stages.append(Stage(entry.name, module))

    run_pipeline(subject.captured, options or subject.options, note)
    return stages
