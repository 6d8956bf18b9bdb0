"""Small decoders to bisect: weights in memory, an artifact made in this process, or a GPU's program to be interpreted."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from pathlib import Path

from torch import Tensor

from compilerllm.artifact import read_manifest, write_manifest
from compilerllm.bisect.parameters import Parameters
from compilerllm.bisect.report import Report
from compilerllm.bisect.search import Search
from compilerllm.bisect.subject import CpuArtifact, CudaProgram, Program, ReferenceProgram, Subject
from compilerllm.bisect.workload import Workload
from compilerllm.cpu_artifact import write_cpu
from compilerllm.ir.graph import Module
from compilerllm.ir.recipe import print_recipe
from compilerllm.ir.step import Bucket
from compilerllm.kernels.cpu.target import find_target
from compilerllm.kernels.launch.dtypes import IR_DTYPES
from compilerllm.kernels.triton.emitter import Chooser
from compilerllm.kernels.triton.interpreted_backend import InterpretedBackend
from compilerllm.passes.pipeline import Options, run_pipeline
from compilerllm.validation.weights import checkpoint

VOCAB = 48
TOKENS = [7 * i % VOCAB for i in range(1, 41)]
TARGET = "cpu-avx2"  # what every machine has, so that the same templates are tested everywhere
BUCKETS = (Bucket(2, 2, 2, 1), Bucket(64, 2, 64, 64))


class Tensors:
    """A checkpoint in memory."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors

    def names(self) -> Iterable[str]:
        return self.tensors

    def describe(self, name: str) -> tuple[str, tuple[int, ...]]:
        return IR_DTYPES[self.tensors[name].dtype], tuple(self.tensors[name].shape)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        return self.tensors[name][start:stop]


def subject(module: Module, target: str = "cpu", level: int = 2, seed: int = 0) -> Subject:
    """A captured module with random weights, and what the passes make of it now."""
    options = Options(level=level, target=target)
    tensors = {n: t * 3 if t.dim() > 1 else t for n, t in checkpoint(module, seed).items()}
    return Subject(
        "tiny", module, run_pipeline(module, options)[0], Parameters(lambda p: p, Tensors(tensors), 1 << 26), options,
        module.main.params[0].value.dtype, VOCAB, 64, max_num_seqs=64, max_tokens=64,
    )  # fmt: skip


def artifact(made: Subject, folder: Path) -> Subject:
    """The subject with an artifact for this CPU, as a build writes it."""
    target = find_target(TARGET)
    folder.mkdir(parents=True, exist_ok=True)
    final, manifest = write_cpu(made.final, target, BUCKETS, made.options.level, folder, lambda stage: None)
    write_manifest(
        folder,
        manifest | {
            "facts": {}, "vocab_size": VOCAB, "max_model_len": 64, "target": target.name, "level": made.options.level,
            "features": sorted(target.features), "buckets": [asdict(b) for b in BUCKETS],
            "parameters": [
                {"name": p.name, "dtype": p.type.dtype, "shape": list(p.type.shape), "recipe": print_recipe(p.recipe)}
                for p in final.param_instances()
            ],
        },
    )  # fmt: skip
    options = replace(made.options, target=target.name)
    return replace(made, final=final, manifest=read_manifest(folder), folder=folder, options=options)


def bisect(made: Subject, program: Program | None = None, every_node: bool = False) -> Report:
    """The report on a subject. Without ``program`` the final graph runs in the reference, so that passes alone matter."""
    work = Workload.of(TOKENS, VOCAB, 64)
    return Search(made, program or ReferenceProgram(made), work).run(every_node)


def on_cpu(made: Subject, folder: Path, every_node: bool = False) -> Report:
    """Build for this CPU, and bisect what was built."""
    whole = artifact(made, folder)
    return bisect(whole, CpuArtifact(whole), every_node)


def interpreted(made: Subject, folder: Path, chooser: Chooser, every_node: bool = False) -> Report:
    """Bisect a GPU's program, its kernels interpreted."""
    program = CudaProgram(made, InterpretedBackend(1 << 32), native=False, scratch=folder, chooser=chooser)
    return bisect(made, program, every_node)
